"""Reads of single objects by their names, and the Secret that is written after such a read.

Secrets are not watched: the permission to watch or list them cannot be limited to those of Tandem.
"""

import math
import os
import time
from collections.abc import Iterable
from typing import Final

from tandem_contract import labels
from tandem_kube.client import Api
from tandem_kube.errors import ApiError, Conflict, NotFound
from tandem_kube.resources import SECRETS, Object, Resource

from ..observed import Body, EndpointKey, Failure, Observed, PoolKey, SetKey
from ..planning.api_objects import FIELD_MANAGER
from ..planning.key_rotation import SECRET_BYTES, plan_transfer_keys
from ..pods.connectors import transfer_key_secret
from ..pods.manifests import plan_key_secret
from .cache import ClusterCache, WorkKey
from .watches import POOL_RESOURCES
from .write_errors import TRANSIENT_ERRORS, failure_from_error

_READ_AGAIN: Final = 60.0
"""Seconds after which a Secret of transfer keys is read again in any case."""
_KEYS_REFUSED: Final = (
    "the engines wait for the Secret {name} with the set's transfer keys, which the operator may"
    " not write: {message}. Allow it, or create a Secret of that name whose values are keys of 16"
    " bytes or more"
)


async def get_by_name(api: Api, resource: Resource, body: Body) -> Object | None:
    """The object that has the name of `body` now.

    Read with a list: RBAC grants the operator no `get` for these kinds, since nothing else would
    use it. Secrets are the exception.
    """
    metadata = body["metadata"]
    if resource == SECRETS:
        return await get_secret(api, metadata["namespace"], metadata["name"])
    field = f"metadata.name={metadata['name']}"
    listed = await api.list(resource, metadata["namespace"], fields=field)
    return listed.items[0] if listed.items else None


async def read_pools(api: Api, cache: ClusterCache, keys: Iterable[PoolKey]) -> set[WorkKey]:
    """Bring pools in the cache up to what the API server has now; the keys that this affects.

    The watch of pools, which may be behind, reports a change that is found here to no one.
    """
    affected: set[WorkKey] = set()
    for key in keys:
        known = cache.pools.by_key(key)
        name = f"metadata.name={key.name}"
        listed = await api.list(POOL_RESOURCES[key.kind], key.namespace, fields=name)
        live = {body["metadata"]["uid"] for body in listed.items}
        for pool in known:
            if pool.uid not in live:
                affected |= cache.remove(pool.uid)
        for body in listed.items:
            affected |= cache.upsert_pool(body)
    return affected


async def read_plan_keys(api: Api, cache: ClusterCache, key: EndpointKey) -> None:
    """Bring an endpoint's Secret of plan keys into the cache; a foreign one counts as none."""
    secret = await get_secret(api, key.namespace, plan_key_secret(key.name))
    object_labels = secret["metadata"].get("labels", {}) if secret else {}
    cache.set_plan_keys(key, secret if object_labels.get(labels.ENDPOINT) == key.name else None)


class TransferKeySecrets:
    """Keeps the Secrets of transfer keys up to date.

    A Secret that was right within the last minute is read again only before pods are made or
    removed: most reconciliations only write what pods report.
    """

    def __init__(self) -> None:
        self._right: dict[SetKey, tuple[float, float]] = {}
        """Set → when its Secret was last right, and when it changes next; `time.monotonic()`."""

    async def keep(
        self, api: Api, observed: Observed, period: float, *, touches_pods: bool
    ) -> tuple[float | None, Failure | None]:
        """Keep one set's; the seconds until it changes next, and why the API server refuses it.

        `period` as in `rotate`.
        """
        now, key = time.monotonic(), observed.key
        seen, change = self._right.pop(key, (-math.inf, 0.0))
        if not touches_pods and now < min(seen + _READ_AGAIN, change):
            self._right[key] = seen, change
            return change - now, None
        due, failure = await _keep_transfer_keys(api, observed, period)
        if due is not None:
            self._right[key] = now, now + due
        return due, failure


async def _keep_transfer_keys(
    api: Api, observed: Observed, period: float
) -> tuple[float | None, Failure | None]:
    name = transfer_key_secret(observed.key.name)
    try:
        live = await get_secret(api, observed.key.namespace, name)
        keys = plan_transfer_keys(observed, live, os.urandom(SECRET_BYTES), period)
        if keys is None:
            return None, None
        if keys.body is not None:
            # Without force for a new one: a Secret that someone creates right now is theirs.
            is_known = live is not None
            await api.apply(SECRETS, dict(keys.body), manager=FIELD_MANAGER, force=is_known)
    except TRANSIENT_ERRORS:
        raise
    except ApiError as err:
        if type(err) is Conflict:
            raise
        failure = failure_from_error(err)
        message = _KEYS_REFUSED.format(name=name, message=failure.message)
        return None, Failure(failure.reason, message)
    return keys.requeue_after, None


async def get_secret(api: Api, namespace: str, name: str) -> Object | None:
    try:
        return await api.get(SECRETS, name, namespace)
    except NotFound:
        return None
