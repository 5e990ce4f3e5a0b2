"""Objects of a kind that refer to an InferencePool, watched where their kind is installed.

InferenceModelRewrite and InferenceObjective have two groups each: llm-d's comes first; without it
the older group of the Gateway API Inference Extension counts. A cluster without both is asked
again from time to time.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Generic, NoReturn, TypeVar

from tandem_kube.client import Api
from tandem_kube.errors import ApiError, NotFound
from tandem_kube.reflector import Reflector
from tandem_kube.resources import Object, Resource

from .inference_pool import PoolName

_LOOK_SECONDS: Final = 60.0
"""Seconds after which a cluster without the kind is asked again."""

_log: Final = logging.getLogger(__name__)
T = TypeVar("T")


class PoolObjects(Generic[T]):
    """The objects that refer to one pool."""

    def __init__(
        self,
        api: Api,
        pool: PoolName,
        kinds: Sequence[Resource],
        parse: Callable[[Object], T],
        on_change: Callable[[Iterable[T]], None],
        *,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        """`kinds`: the kind in its groups, of which the first that is installed counts. `parse`
        gets objects that the API server has validated, and must not raise. `on_change` is called
        with what it made of all objects when one has changed."""
        self._api, self._pool, self._kinds = api, pool, kinds
        self._value_of, self._on_change = parse, on_change
        self._look_seconds = look_seconds

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            if (resource := await self._installed()) is not None:
                await self._watch(resource)
            await asyncio.sleep(self._look_seconds)

    async def _watch(self, resource: Resource) -> NoReturn:
        _log.info("%s of %s are followed", resource.path(), self._pool)
        objects: Reflector[T] = Reflector(
            self._api,
            resource,
            self._pool.namespace,
            parse=self._parse,
            changed=lambda _: self._on_change(objects.items.values()),
        )
        await objects.run()

    async def _installed(self) -> Resource | None:
        """The kind that the cluster has; None: none, or it does not say now."""
        for resource in self._kinds:
            try:
                found = await self._api.raw(f"/apis/{resource.api_version}")
            except NotFound:
                continue
            except ApiError as err:
                _log.debug("%s: not known whether it is installed: %s", resource, err)
                return None
            if any(each["name"] == resource.plural for each in found.get("resources") or ()):
                return resource
        return None

    def _parse(self, body: Object) -> T | None:
        pool = (body.get("spec") or {}).get("poolRef") or {}
        is_ours = pool.get("name") == self._pool.name and pool.get("group") in self._pool.groups
        if not is_ours or "deletionTimestamp" in body["metadata"]:
            return None
        return self._value_of(body)
