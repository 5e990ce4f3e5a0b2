"""The keys an endpoint's plans are signed with: which to add, which to drop, and when. Pure.

    ├── previous ──┼── current signs ──────────────────┬┼── next ──
                                     added AHEAD of its time

Names are `tandem_contract.plan`'s: the UTC second from which a key signs. All three may be in the
Secret at once; one older than the previous has nothing left to verify.
"""

import binascii
import math
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tandem_contract.plan import key_id, signs_from

from ..observed import Body

AHEAD: Final = 300.0
"""Seconds between a key's appearance and its first use: a mounted Secret follows within two
minutes, and clocks differ."""
SECRET_BYTES: Final = 32
_SHORTEST: Final = 16
"""Bytes; a shorter one would keep the EPP from starting."""


@dataclass(frozen=True)
class Rotation:
    """The keys to have, and when to look again."""

    keys: Mapping[str, bytes]
    next: float
    """Unix seconds at which one is added or dropped."""


def rotate(keys: Mapping[str, bytes], now: float, secret: bytes, period: float) -> Rotation:
    """The keys that there are to be at `now`, from those that there are.

    A key that is due is made of `secret`. Keys whose name is no time are somebody's own and stay.
    One that lies more than a period ahead was named by a wrong clock and is dropped. Raises
    ValueError when a key is due and `secret` is shorter than 32 bytes.
    """
    times = {name: at for name in keys if (at := signs_from(name)) is not None}
    times = {name: at for name, at in times.items() if at <= now + max(period, AHEAD)}
    newest = max(times.values(), default=None)
    added: dict[str, bytes] = {}
    if newest is None or now >= newest + period - AHEAD:
        if len(secret) < SECRET_BYTES:
            raise ValueError(f"a plan key is due: {SECRET_BYTES} random bytes are needed for it")
        # The first has nobody to wait for: no pod has started yet.
        newest = now if newest is None else math.ceil(max(newest + period, now + AHEAD))
        added[key_id(newest)] = secret.hex().encode()
        times[key_id(newest)] = newest
    come = sorted(name for name, at in times.items() if at <= now)
    kept = {
        name: value
        for name, value in keys.items()
        if signs_from(name) is None or (name in times and name not in come[:-2])
    }
    return Rotation({**kept, **added}, newest if newest > now else newest + period - AHEAD)


def keys_in(secret: Body | None) -> dict[str, bytes]:
    """The keys in a Secret; what no EPP could load is left out."""
    found = {}
    for name, value in ((secret or {}).get("data") or {}).items():
        try:
            key = b64decode(value, validate=True).strip()
        except (binascii.Error, TypeError):
            continue
        if len(key) >= _SHORTEST and "." not in name:
            found[name] = key
    return found


def secret_data(keys: Mapping[str, bytes]) -> dict[str, str]:
    """`keys` as a Secret's `data`."""
    return {name: b64encode(value).decode() for name, value in sorted(keys.items())}
