"""Rotation of keys in a Secret: which to add and drop, when. Pure.

`rotate` is for the keys that sign an endpoint's plans, and for those of `plan_transfer_keys`, with
which the reference engines of a set prove themselves to each other.

    ├── previous ──┼── current signs ──────────────────┬┼── next ──
                                                        └ added AHEAD seconds before it signs

A key's name is the UTC second from which it signs (`tandem_contract.plan`). The Secret may hold the
previous, the current and the next key at once: the previous one still verifies plans that were
signed just before the change. Older keys have nothing left to verify and are dropped.
"""

import binascii
import math
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from tandem_contract import labels
from tandem_contract.plan import key_id, signs_from

from ..observed import Body, Observed, PoolKey, PoolResource
from ..pods.connectors import transfer_key_secret, uses_transfer_keys
from .actions import PoolPlan
from .api_objects import FIELD_MANAGER
from .drift import is_up_to_date
from .revisions import owner_reference

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


@dataclass(frozen=True)
class TransferKeys:
    """The Secret that a set should have."""

    body: Body | None
    """What to apply; None: the Secret is as it should be."""
    requeue_after: float
    """Seconds until the next key is added or dropped."""


def pools_with_transfer_keys(plans: Iterable[PoolPlan]) -> list[PoolKey]:
    """The pools whose engines, by their present spec, mount the Secret."""
    return [plan.key for plan in plans if plan.pool is not None and uses_transfer_keys(plan.pool)]


def plan_transfer_keys(
    observed: Observed, live: Body | None, secret: bytes, period: float
) -> TransferKeys | None:
    """The Secret of a set, from the `live` one; `secret` and `period` as in `rotate`.

    None: no pool is left, or the Secret is a user's own, which has not the operator's label.
    """
    pools = (observed.prefill, *observed.decodes)
    owners = [pool for pool in pools if pool is not None and not pool.deleting]
    is_users = (
        live is not None
        and live["metadata"].get("labels", {}).get(labels.MANAGED_BY) != FIELD_MANAGER
    )
    if not owners or is_users:
        return None
    rotation = rotate(keys_in(live), observed.now, secret, period)
    body = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": transfer_key_secret(observed.key.name),
            "namespace": observed.key.namespace,
            "labels": {
                labels.NAME: "tandem",
                labels.INSTANCE: observed.key.name,
                labels.COMPONENT: "transfer-keys",
                labels.MANAGED_BY: FIELD_MANAGER,
            },
            "ownerReferences": [_owner(pool) for pool in sorted(owners, key=lambda p: p.uid)],
        },
        "type": "Opaque",
        "data": secret_data(rotation.keys),
    }
    is_same = live is not None and is_up_to_date(live, body) and keys_in(live) == rotation.keys
    return TransferKeys(None if is_same else body, max(1.0, rotation.next - observed.now))


def _owner(pool: PoolResource) -> Body:
    """Without `controller`: every pool of the set owns the Secret, so it goes with the last one."""
    reference = owner_reference(pool)
    return {name: reference[name] for name in ("apiVersion", "kind", "name", "uid")}
