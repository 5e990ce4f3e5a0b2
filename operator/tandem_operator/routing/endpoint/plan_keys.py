"""Rotation of the keys that sign an endpoint's request plans: which to add and drop, when. Pure.

    ├── previous ──┼── current signs ──────────────────┬┼── next ──
                                                        └ added AHEAD seconds before it signs

A key's name is the UTC second from which it signs (`tandem_contract.plan`). The Secret may hold the
previous, the current and the next key at once: the previous one still verifies plans that were
signed just before the change. Older keys have nothing left to verify and are dropped.
"""

import binascii
import math
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tandem_contract.plan import key_id, signs_from

from ...observed import Body

AHEAD: Final = 300.0
"""Seconds between adding a key and its first signature: the kubelet updates a mounted Secret within
two minutes, and clocks differ."""
SECRET_BYTES: Final = 32
_MIN_SECRET_BYTES: Final = 16
"""Keys shorter than this would keep the EPP from starting."""


@dataclass(frozen=True)
class Rotation:
    """The keys the Secret should hold, and when to rotate again."""

    keys: Mapping[str, bytes]
    next: float
    """Unix seconds at which the next key is added or dropped."""


def rotate(keys: Mapping[str, bytes], now: float, secret: bytes, period: float) -> Rotation:
    """The keys that the Secret should hold at `now`, given the `keys` that it holds.

    A key that is due is made from `secret`, 32 random bytes. Keys whose name is no time were added
    by someone else and stay. A key that starts more than a period ahead was named by a wrong clock
    and is dropped. Raises ValueError when a key is due and `secret` is shorter than 32 bytes.
    """
    starts = {name: start for name in keys if (start := signs_from(name)) is not None}
    starts = {name: start for name, start in starts.items() if start <= now + max(period, AHEAD)}
    newest = max(starts.values(), default=None)
    added: dict[str, bytes] = {}
    if newest is None or now >= newest + period - AHEAD:
        if len(secret) < SECRET_BYTES:
            raise ValueError(f"a plan key is due: {SECRET_BYTES} random bytes are needed for it")
        # The first key signs at once: no pod has started yet that could lack it. A later one signs
        # AHEAD seconds from now at the earliest, so that every verifier has mounted it by then.
        newest = now if newest is None else math.ceil(max(newest + period, now + AHEAD))
        added[key_id(newest)] = secret.hex().encode()
        starts[key_id(newest)] = newest
    started = sorted(name for name, start in starts.items() if start <= now)
    # Keep the two latest keys that have started: the signing key and the one before it.
    remaining = {
        name: value
        for name, value in keys.items()
        if signs_from(name) is None or (name in starts and name not in started[:-2])
    }
    return Rotation({**remaining, **added}, newest if newest > now else newest + period - AHEAD)


def keys_in(secret: Body | None) -> dict[str, bytes]:
    """The keys in a Secret, without entries that the EPP could not load."""
    keys = {}
    for name, value in ((secret or {}).get("data") or {}).items():
        try:
            key = b64decode(value, validate=True).strip()
        except (binascii.Error, TypeError):
            continue
        # A dot separates the parts of a signed plan, so no key id may have one.
        if len(key) >= _MIN_SECRET_BYTES and "." not in name:
            keys[name] = key
    return keys


def secret_data(keys: Mapping[str, bytes]) -> dict[str, str]:
    """`keys` as a Secret's `data`."""
    return {name: b64encode(value).decode() for name, value in sorted(keys.items())}
