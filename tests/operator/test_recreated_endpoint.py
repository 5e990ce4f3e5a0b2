"""A DecodePool that is deleted and created again: clients hold the address of its endpoint."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tandem_kube.client import Api
from tandem_kube.errors import Invalid, NotFound
from tandem_kube.resources import SERVICES, Object

from ..cluster.control_plane import ControlPlane
from .operating import DECODE_POOLS, Operator, api_of, condition, decode, operating, until

pytestmark = pytest.mark.control_plane

_POOL: dict[str, Any] = {
    "role": "unified",
    "replicas": 0,
    "model": {"name": "tiny", "source": {"tiny": {}}},
    "engine": {"type": "torch"},
}


@dataclass
class Endpoint:
    """The endpoint `d` of one namespace, and the operator that writes it."""

    api: Api
    namespace: str
    operator: Operator

    async def create(self) -> None:
        await self.api.create(DECODE_POOLS, decode("d", self.namespace, **_POOL))

    async def delete(self) -> None:
        await self.api.delete(DECODE_POOLS, "d", self.namespace)

    async def service(self) -> Object | None:
        try:
            return await self.api.get(SERVICES, "d", self.namespace)
        except NotFound:
            return None

    async def gone(self) -> None:
        async def is_gone() -> bool:
            return await self.service() is None

        await until(is_gone, self.operator)

    async def address(self) -> str:
        """Wait until there is a Service."""
        found = list[Object]()

        async def exists() -> bool:
            service = await self.service()
            if service is not None:
                found.append(service)
            return bool(found)

        await until(exists, self.operator)
        return str(found[0]["spec"]["clusterIP"])


@pytest.fixture
async def endpoint(crds: ControlPlane, namespace: str, tmp_path: Path) -> AsyncIterator[Endpoint]:
    async with _endpoint(crds, namespace, tmp_path) as running:
        yield running


@asynccontextmanager
async def _endpoint(crds: ControlPlane, namespace: str, tmp_path: Path) -> AsyncIterator[Endpoint]:
    flags = f"--kubeconfig={crds.kubeconfig}", f"--namespace={namespace}", "--no-leader-elect"
    async with api_of(crds.kubeconfig) as api:
        with operating(tmp_path / "operator.log", *flags) as operator:
            endpoint = Endpoint(api, namespace, operator)
            await endpoint.create()
            yield endpoint


async def test_it_has_the_address_again(endpoint: Endpoint) -> None:
    address = await endpoint.address()
    await endpoint.delete()
    await endpoint.gone()
    await endpoint.create()
    assert await endpoint.address() == address
    annotated = {"routing": {"service": {"annotations": {"a": "b"}}}}
    await endpoint.api.patch(DECODE_POOLS, "d", {"spec": annotated}, endpoint.namespace)

    async def is_annotated() -> bool:
        service = await endpoint.service()
        return service is not None and service["metadata"]["annotations"].get("a") == "b"

    await until(is_annotated, endpoint.operator)
    assert await endpoint.address() == address, "a later write keeps it"


async def test_it_has_the_address_again_when_it_is_created_at_once(endpoint: Endpoint) -> None:
    address = await endpoint.address()
    for _ in range(3):
        await endpoint.delete()
        await endpoint.create()
        pool = await endpoint.api.get(DECODE_POOLS, "d", endpoint.namespace)

        async def is_owned(uid: str = pool["metadata"]["uid"]) -> bool:
            service = await endpoint.service()
            owners = service["metadata"]["ownerReferences"] if service else ()
            return [owner["uid"] for owner in owners] == [uid]

        await until(is_owned, endpoint.operator)
        assert await endpoint.address() == address


async def test_it_gets_another_address_when_that_is_taken(endpoint: Endpoint) -> None:
    address = await endpoint.address()
    await endpoint.delete()
    await endpoint.gone()
    metadata = {"name": "other", "namespace": endpoint.namespace}
    ports = {"clusterIP": address, "ports": [{"port": 80}]}
    taking = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": ports}

    async def is_taken() -> bool:
        try:
            await endpoint.api.create(SERVICES, taking)
        except Invalid:
            # The API server releases an address a moment after the Service is gone.
            return False
        return True

    await until(is_taken, endpoint.operator)
    await endpoint.create()
    assert await endpoint.address() != address

    async def no_write_is_refused() -> bool:
        pool = await endpoint.api.get(DECODE_POOLS, "d", endpoint.namespace)
        return "Service d" not in condition(pool, "RouterReady").get("message", "Service d")

    await until(no_write_is_refused, endpoint.operator)
