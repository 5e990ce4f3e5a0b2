"""A pool is deleted while the operator's watch of pools is silent: nothing of it comes back.

The watches of pods and of other objects work, so the operator learns that they were collected.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tandem_contract import labels
from tandem_kube.client import Api
from tandem_kube.resources import (
    CONTROLLER_REVISIONS,
    DEPLOYMENTS,
    POD_DISRUPTION_BUDGETS,
    PODS,
    SERVICES,
    Resource,
)
from tandem_operator.routing.objects.common import kept_objects

from ..cluster.control_plane import ControlPlane
from .killing import Proxy, proxy
from .operating import (
    DECODE_POOLS,
    PREFILL_POOLS,
    Operator,
    api_of,
    decode,
    names,
    operating,
    prefill,
    until,
)

pytestmark = pytest.mark.control_plane

_CHILDREN = (PODS, CONTROLLER_REVISIONS, POD_DISRUPTION_BUDGETS, DEPLOYMENTS, SERVICES)
_UNIFIED: dict[str, Any] = {
    "role": "unified",
    "replicas": 2,
    "model": {"name": "tiny", "source": {"tiny": {}}},
    "engine": {"type": "torch"},
}


@pytest.mark.parametrize("silent", [PREFILL_POOLS, DECODE_POOLS], ids=lambda kind: kind.plural)
async def test_nothing_of_a_deleted_pool_comes_back(
    crds: ControlPlane, namespace: str, tmp_path: Path, silent: Resource
) -> None:
    pools = [prefill("p", namespace, replicas=2), decode("d", namespace, **_UNIFIED)]
    deleted, other = pools if silent == PREFILL_POOLS else reversed(pools)
    resources = {"PrefillPool": PREFILL_POOLS, "DecodePool": DECODE_POOLS}
    async with _operator(crds, namespace, tmp_path) as (api, between, operator):
        await api.create(silent, deleted)
        name = deleted["metadata"]["name"]
        await until(_has_pods(api, namespace, name), operator)

        async def is_complete() -> bool:
            # A DecodePool has an endpoint's objects, too; a deletion amid their creation would
            # leave some to Kubernetes, as it may.
            status = (await api.get(silent, name, namespace)).get("status", {})
            return "endpoint" in status or silent == PREFILL_POOLS

        await until(is_complete, operator)
        between.silence_watches(silent.plural)
        await api.delete(silent, name, namespace)
        writes: list[str] = []

        async def note(request: web.Request) -> None:
            if request.method != "GET" and "dryRun" not in request.query:
                writes.append(f"{request.method} {request.path}: {await request.text()}")

        between.before = note

        async def is_collected() -> bool:
            found = {child for kind in _CHILDREN for child in await _of(api, kind, namespace)}
            return found <= {ref.name for ref in kept_objects(name)}

        await until(is_collected, operator)
        # While the operator makes another pool's pods, it has time to make the deleted pool's anew.
        await api.create(resources[other["kind"]], other)
        await until(_has_pods(api, namespace, other["metadata"]["name"]), operator)
        of_deleted = (f'"{labels.POOL}": "{name}"', f'"{labels.ENDPOINT}": "{name}"')
        assert [write for write in writes if any(text in write for text in of_deleted)] == []


@asynccontextmanager
async def _operator(
    crds: ControlPlane, namespace: str, folder: Path
) -> AsyncIterator[tuple[Api, Proxy, Operator]]:
    async with api_of(crds.kubeconfig) as api, proxy(crds.kubeconfig, folder) as between:
        flags = f"--kubeconfig={between.kubeconfig}", f"--namespace={namespace}"
        with operating(folder / "operator.log", *flags, "--no-leader-elect") as operator:
            yield api, between, operator


def _has_pods(api: Api, namespace: str, pool: str) -> Callable[[], Awaitable[bool]]:
    async def has_pods() -> bool:
        return len([name for name in await names(api, namespace) if name.startswith(pool)]) == 2

    return has_pods


async def _of(api: Api, kind: Resource, namespace: str) -> list[str]:
    listed = await api.list(kind, namespace, labels=labels.MANAGED_BY)
    return [body["metadata"]["name"] for body in listed.items]
