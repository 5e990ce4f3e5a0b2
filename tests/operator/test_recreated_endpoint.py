"""A DecodePool that is deleted and created again: addresses and keys of its endpoint stay."""

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tandem_contract import labels
from tandem_kube.client import Api
from tandem_kube.errors import NotFound
from tandem_kube.resources import DEPLOYMENTS, SECRETS, SERVICES, Object, Resource
from tandem_operator.planning.api_objects import FIELD_MANAGER

from ..cluster.control_plane import ControlPlane
from .killing import proxy
from .operating import DECODE_POOLS, Operator, api_of, decode, operating, until
from .test_killed import kill_after_each_write

pytestmark = pytest.mark.control_plane

_POOL: dict[str, Any] = {
    "role": "unified",
    "replicas": 0,
    "model": {"name": "tiny", "source": {"tiny": {}}},
    "engine": {"type": "torch"},
}
_LONG_AGO = "2026-01-31T10:00:00Z"
_KEPT = ((SECRETS, "d-plan-keys"), (SERVICES, "d-epp"), (SERVICES, "d"))


@dataclass
class Endpoint:
    """The endpoint `d` of one namespace."""

    api: Api
    namespace: str
    kubeconfig: Path
    log: Path

    def operating(self) -> AbstractContextManager[Operator]:
        """Run an operator until the block ends."""
        flags = f"--kubeconfig={self.kubeconfig}", f"--namespace={self.namespace}"
        return operating(self.log, *flags, "--no-leader-elect")

    async def create(self) -> None:
        await self.api.create(DECODE_POOLS, decode("d", self.namespace, **_POOL))

    async def delete(self) -> None:
        await self.api.delete(DECODE_POOLS, "d", self.namespace)

    async def get(self, resource: Resource, name: str) -> Object | None:
        try:
            return await self.api.get(resource, name, self.namespace)
        except NotFound:
            return None

    async def exists(self, resource: Resource, name: str) -> bool:
        return await self.get(resource, name) is not None

    async def has_all(self) -> bool:
        """Whether the objects that stay exist, and Envoy, which does not."""
        return all([await self.exists(*ref) for ref in (*_KEPT, (DEPLOYMENTS, "d-envoy"))])

    async def has_none(self) -> bool:
        return not any([await self.exists(*ref) for ref in _KEPT])

    async def kept(self) -> list[tuple[Any, ...]]:
        """Uids, addresses and keys of what stays."""
        found = [await self.get(*ref) for ref in _KEPT]
        return [
            (each["metadata"]["uid"], each.get("spec", {}).get("clusterIP"), each.get("data"))
            for each in found
            if each is not None
        ]

    async def unused_since(self) -> str | None:
        """The time that is written on the Service for clients; None: it is in use."""
        service = await self.api.get(SERVICES, "d", self.namespace)
        note: str | None = service["metadata"].get("annotations", {}).get(labels.UNUSED_SINCE)
        return note

    async def write_down(self, since: str) -> None:
        note = {"metadata": {"annotations": {labels.UNUSED_SINCE: since}}}
        await self.api.patch(SERVICES, "d", note, self.namespace)

    async def is_unused(self) -> bool:
        return await self.unused_since() is not None

    async def is_used(self) -> bool:
        return await self.unused_since() is None and await self.has_all()

    async def is_reduced(self) -> bool:
        """Whether Envoy is gone."""
        return not await self.exists(DEPLOYMENTS, "d-envoy")


@pytest.fixture
async def endpoint(crds: ControlPlane, namespace: str, tmp_path: Path) -> AsyncIterator[Endpoint]:
    async with api_of(crds.kubeconfig) as api:
        endpoint = Endpoint(api, namespace, crds.kubeconfig, tmp_path / "operator.log")
        await endpoint.create()
        yield endpoint


async def test_it_has_the_same_services_and_keys_again(endpoint: Endpoint) -> None:
    with endpoint.operating() as operator:
        await until(endpoint.has_all, operator)
        before = await endpoint.kept()
        await endpoint.delete()
        await until(endpoint.is_reduced, operator)
        await until(endpoint.is_unused, operator)
        assert await endpoint.kept() == before
        await endpoint.create()
        await until(endpoint.is_used, operator)
        assert await endpoint.kept() == before


async def test_it_has_them_again_when_it_is_created_at_once(endpoint: Endpoint) -> None:
    with endpoint.operating() as operator:
        await until(endpoint.has_all, operator)
        before = await endpoint.kept()
        for _ in range(3):
            await endpoint.delete()
            await endpoint.create()
            pool = await endpoint.api.get(DECODE_POOLS, "d", endpoint.namespace)

            async def is_owned(uid: str = pool["metadata"]["uid"]) -> bool:
                envoy = await endpoint.get(DEPLOYMENTS, "d-envoy")
                owners = envoy["metadata"]["ownerReferences"] if envoy else ()
                return [owner["uid"] for owner in owners] == [uid] and await endpoint.is_used()

            await until(is_owned, operator)
            assert await endpoint.kept() == before


async def test_another_operator_deletes_them_after_a_while(endpoint: Endpoint) -> None:
    with endpoint.operating() as operator:
        await until(endpoint.has_all, operator)
        await endpoint.delete()
        await until(endpoint.is_unused, operator)
    await endpoint.write_down(_LONG_AGO)
    with endpoint.operating() as operator:
        await until(endpoint.has_none, operator)


async def test_an_operator_killed_after_any_write_leaves_nothing_behind_for_good(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    with endpoint.operating() as operator:
        await until(endpoint.has_all, operator)
    await endpoint.delete()
    await until(endpoint.is_reduced)
    await endpoint.write_down(_LONG_AGO)

    async def has_none(_api: Api, _namespace: str) -> bool:
        return await endpoint.has_none()

    async with proxy(endpoint.kubeconfig, tmp_path) as between:
        kills = await kill_after_each_write(
            between, endpoint.api, endpoint.namespace, endpoint.log, has_none
        )
    assert kills == len(_KEPT)


async def test_nothing_is_deleted_of_a_pool_that_the_operator_has_not_heard_of(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    async with proxy(endpoint.kubeconfig, tmp_path) as between:
        with replace(endpoint, kubeconfig=between.kubeconfig).operating() as operator:
            await until(endpoint.has_all, operator)
            before = await endpoint.kept()
            await endpoint.delete()
            await until(endpoint.is_unused, operator)
            between.silence_watches(DECODE_POOLS.plural)
            await endpoint.create()
            await endpoint.write_down(_LONG_AGO)
            await until(endpoint.is_used, operator)
    assert await endpoint.kept() == before


async def test_an_operator_that_was_away_begins_to_count_when_it_is_back(
    endpoint: Endpoint,
) -> None:
    with endpoint.operating() as operator:
        await until(endpoint.has_all, operator)
        before = await endpoint.kept()
    await endpoint.delete()
    # Garbage collection alone deletes the rest.
    await until(endpoint.is_reduced)
    assert not await endpoint.is_unused()
    with endpoint.operating() as operator:
        await until(endpoint.is_unused, operator)
    assert await endpoint.kept() == before


async def test_services_and_keys_of_an_older_operator_lose_their_owner_and_nothing_else(
    endpoint: Endpoint,
) -> None:
    with endpoint.operating() as operator:
        await until(endpoint.has_all, operator)
    before = await endpoint.kept()
    pool = await endpoint.api.get(DECODE_POOLS, "d", endpoint.namespace)
    owner = {
        "apiVersion": labels.API_VERSION,
        "kind": "DecodePool",
        "name": "d",
        "uid": pool["metadata"]["uid"],
    }
    for resource, name in _KEPT:
        live = await endpoint.api.get(resource, name, endpoint.namespace)
        for field in ("managedFields", "resourceVersion", "creationTimestamp", "uid"):
            live["metadata"].pop(field)
        # It wrote the address, too.
        live["metadata"]["ownerReferences"] = [owner]
        await endpoint.api.apply(resource, live, manager=FIELD_MANAGER, force=True)

    async def no_one_owns_them() -> bool:
        found = [await endpoint.get(*ref) for ref in _KEPT]
        return not any(each and each["metadata"].get("ownerReferences") for each in found)

    assert not await no_one_owns_them()
    with endpoint.operating() as operator:
        await until(no_one_owns_them, operator)
    assert await endpoint.kept() == before
