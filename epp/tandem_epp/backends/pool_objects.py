"""Objects of a kind that refer to an InferencePool, watched where their kind is installed.

    spec.poolRef         v1alpha2: one pool by name
    spec.poolRefs        v1: several by name
    spec.poolSelector    v1: pools by their labels

InferenceModelRewrite and InferenceObjective are in several groups and versions: the newest of llm-d
comes first; without any the older group of the Gateway API Inference Extension counts. A cluster
without all of them is asked again from time to time. The pool's labels are watched as soon as an
object selects by them.

Source: llm-d/llm-d-router (commit 24b7184370d7), apix/v1/inferenceobjective_types.go.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NoReturn, TypeVar

from tandem_contract.selectors import matches
from tandem_kube.client import Api
from tandem_kube.errors import ApiError, NotFound
from tandem_kube.reflector import Key, Reflector
from tandem_kube.resources import Object, Resource

from .inference_pool import GROUP, PoolName, PoolReference

_LOOK_SECONDS: Final = 60.0
"""Seconds after which a cluster without the kind is asked again."""

_log: Final = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class _PoolObject(Generic[T]):
    """An object that may apply to the pool."""

    value: T
    selector: Mapping[str, Any] | None
    """The labels that a pool must have; None: the object names the pool."""


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
        """`kinds`: the kind in its groups and versions, of which the first that is installed
        counts. `parse` gets objects that the API server has validated, and must not raise.
        `on_change` is called with what it made of all objects of the pool when one, or the pool's
        labels, have changed."""
        self._api, self._pool, self._kinds = api, pool, kinds
        self._value_of, self._on_change = parse, on_change
        self._look_seconds = look_seconds
        self._objects: Mapping[Key, _PoolObject[T]] = {}
        self._is_selected = asyncio.Event()
        """Set once an object selects pools by label."""
        self._labels: Mapping[Key, Mapping[str, str]] = {}
        """Those of the pool under its key; empty: there is no pool, or its labels do not count."""

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_installed(self._kinds, self._watch_objects))
            await self._is_selected.wait()
            groups = [PoolReference(self._pool.namespace, "", each) for each in self._pool.groups]
            pools = [each.resource for each in groups]
            tasks.create_task(self._watch_installed(pools, self._watch_labels))

    async def _watch_installed(
        self, kinds: Sequence[Resource], watch: Callable[[Resource], Coroutine[Any, Any, NoReturn]]
    ) -> None:
        while True:
            if (resource := await self._installed(kinds)) is not None:
                await watch(resource)
            await asyncio.sleep(self._look_seconds)

    async def _watch_objects(self, resource: Resource) -> NoReturn:
        _log.info("%s of %s are followed", resource.path(), self._pool)
        objects = Reflector(
            self._api,
            resource,
            self._pool.namespace,
            parse=self._parse,
            changed=lambda _: self._apply(),
        )
        self._objects = objects.items
        await objects.run()

    async def _watch_labels(self, resource: Resource) -> NoReturn:
        pools = Reflector(
            self._api,
            resource,
            self._pool.namespace,
            fields=f"metadata.name={self._pool.name}",
            parse=lambda body: body["metadata"].get("labels") or {},
            changed=lambda _: self._apply(),
        )
        self._labels = pools.items
        await pools.run()

    async def _installed(self, kinds: Sequence[Resource]) -> Resource | None:
        """The first of `kinds` that the cluster has; None: none, or it does not say now."""
        for resource in kinds:
            try:
                group = await self._api.raw(f"/apis/{resource.api_version}")
            except NotFound:
                continue
            except ApiError as err:
                _log.debug("%s: not known whether it is installed: %s", resource, err)
                return None
            if any(each["name"] == resource.plural for each in group.get("resources") or ()):
                return resource
        return None

    def _parse(self, body: Object) -> _PoolObject[T] | None:
        """What to keep of an object; None: it never applies to the pool."""
        spec = body.get("spec") or {}
        selector = spec.get("poolSelector")
        is_named = any(
            each.get("name") == self._pool.name and each.get("group", GROUP) in self._pool.groups
            for each in (spec.get("poolRef") or {}, *(spec.get("poolRefs") or ()))
        )
        if "deletionTimestamp" in body["metadata"] or not (is_named or selector):
            return None
        if not is_named:
            self._is_selected.set()
        return _PoolObject(self._value_of(body), None if is_named else selector)

    def _apply(self) -> None:
        labels = next(iter(self._labels.values()), None)
        self._on_change(
            each.value
            for each in self._objects.values()
            if each.selector is None or (labels is not None and matches(each.selector, labels))
        )
