"""InferenceModelRewrite objects of an InferencePool, watched where their definition is installed.

llm-d's group comes first; without it the older group of the Gateway API Inference Extension counts.
A cluster without both is asked again from time to time.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final, NoReturn

from tandem_kube.client import Api
from tandem_kube.errors import ApiError, NotFound
from tandem_kube.reflector import Reflector
from tandem_kube.resources import MODEL_REWRITES, OLDER_MODEL_REWRITES, Object, Resource

from .inference_pool import PoolReference
from .rewrite_rules import RewriteObject, rewrite_rules

_LOOK_SECONDS: Final = 60.0
"""Seconds after which a cluster without the definition is asked again."""

_log: Final = logging.getLogger(__name__)


class RewriteDiscovery:
    """The objects that refer to one pool."""

    def __init__(
        self,
        api: Api,
        pool: PoolReference,
        on_change: Callable[[Iterable[RewriteObject]], None],
        *,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        """`on_change` is called with all objects when one has changed."""
        self._api, self._pool, self._on_change = api, pool, on_change
        self._look_seconds = look_seconds

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            if (resource := await self._installed()) is not None:
                await self._watch(resource)
            await asyncio.sleep(self._look_seconds)

    async def _watch(self, resource: Resource) -> NoReturn:
        _log.info("%s of %s are followed", resource.path(), self._pool)
        objects: Reflector[RewriteObject] = Reflector(
            self._api,
            resource,
            self._pool.namespace,
            parse=self._parse,
            changed=lambda _: self._on_change(objects.items.values()),
        )
        await objects.run()

    async def _installed(self) -> Resource | None:
        """The kind that the cluster has; None: neither, or it does not say now."""
        for resource in (MODEL_REWRITES, OLDER_MODEL_REWRITES):
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

    def _parse(self, body: Object) -> RewriteObject | None:
        metadata, spec = body["metadata"], body.get("spec") or {}
        pool = spec.get("poolRef") or {}
        is_ours = (pool.get("name"), pool.get("group")) == (self._pool.name, self._pool.group)
        if not is_ours or "deletionTimestamp" in metadata:
            return None
        return RewriteObject(metadata["creationTimestamp"], metadata["name"], rewrite_rules(spec))
