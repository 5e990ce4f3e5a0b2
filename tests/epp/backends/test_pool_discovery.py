"""Discovery by an InferencePool on a real API server."""

import asyncio
import json
import logging
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tandem_epp.backends.inference_pool import PoolReference
from tandem_epp.backends.pool_discovery import PoolDiscovery
from tandem_kube.client import Api, connect
from tandem_kube.resources import INFERENCE_POOLS, ROLE_BINDINGS, ROLES

from ...cluster.control_plane import ControlPlane
from ...cluster.fixtures import LEFT_OUT
from ..h2c import speaking_http2
from ..real import Backend, Epp, serving, starting_epp, until
from .cluster_pods import Pods

pytestmark = [pytest.mark.component, pytest.mark.control_plane]

MODULE = "sigs.k8s.io/gateway-api-inference-extension@v1.5.0"
DEFINITION = "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml"
AS_TEST = ("--secure-serving=false", "--metrics-endpoint-auth=false", "--drain-timeout=0s")


@pytest.fixture(scope="module")
def pool_kind(control_plane: ControlPlane, go_program: Path) -> ControlPlane:
    """With the definition of InferencePool, from Go's module proxy."""
    done = subprocess.run(
        [go_program, "mod", "download", "-json", MODULE],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"{LEFT_OUT}{MODULE} cannot be fetched: {done.stdout}{done.stderr}")
    path = Path(json.loads(done.stdout)["Dir"]) / DEFINITION
    control_plane.kubectl("apply", "--server-side", f"--filename={path}")
    control_plane.wait_until_established(f"--filename={path}")
    return control_plane


class Pool:
    """The InferencePool `p` of a namespace."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api, self._namespace = api, namespace

    async def apply(self, app: str, *ports: int, protocol: str = "http") -> None:
        body = {
            "apiVersion": INFERENCE_POOLS.api_version,
            "kind": "InferencePool",
            "metadata": {"name": "p", "namespace": self._namespace},
            "spec": {
                "selector": {"matchLabels": {"app": app}},
                "targetPorts": [{"number": port} for port in ports],
                "appProtocol": protocol,
                "endpointPickerRef": {"name": "epp", "port": {"number": 9002}},
            },
        }
        await self._api.apply(INFERENCE_POOLS, body, manager="test")

    async def delete(self) -> None:
        await self._api.delete(INFERENCE_POOLS, "p", self._namespace)


@pytest.fixture
async def pool(pool_kind: ControlPlane, pods: Pods) -> AsyncIterator[Pool]:
    async with await connect(pool_kind.kubeconfig) as api:
        yield Pool(api, pods.namespace)


@asynccontextmanager
async def started(folder: Path, namespace: str, kubeconfig: Path) -> AsyncIterator[Epp]:
    config = folder / "router.yaml"
    config.write_text("disaggregated_serving: {enabled: true}\n")
    flags = ("--pool-name", "p", "--pool-namespace", namespace, *AS_TEST)
    async with starting_epp(config, *flags, KUBECONFIG=str(kubeconfig)) as epp:
        yield epp


async def has_figure(epp: Epp, name: str, value: float) -> bool:
    try:
        return (await epp.figures()).get(name) == value
    except aiohttp.ClientError:
        return False


async def is_not_ready(epp: Epp) -> bool:
    return not await epp.ready()


async def test_changes_of_the_pool_apply_at_once(
    control_plane: ControlPlane, pods: Pods, pool: Pool, tmp_path: Path
) -> None:
    a, b = Backend("a"), Backend("b")
    async with serving(a, b):
        await pods.create_plain("vllm", {"app": "vllm"})
        await pods.create_plain("other", {"app": "other"})
        async with started(tmp_path, pods.namespace, control_plane.kubeconfig) as epp:
            await until(lambda: has_figure(epp, "tandem_epp_inference_pool", 0.0))
            assert not await epp.ready(), "there is no pool"

            await pool.apply("vllm", a.port)
            await until(epp.ready)
            assert await epp.serves("vllm")
            await pool.apply("vllm", a.port, b.port)
            await until(lambda: epp.serves("vllm-rank-0", "vllm-rank-1"))
            await pool.apply("other", b.port)
            await until(lambda: epp.serves("other"))
            assert await epp.ready()

            await pool.delete()
            await until(lambda: is_not_ready(epp))
            assert await epp.serves()
            await pool.apply("vllm", a.port)
            await until(epp.ready)
            assert await epp.serves("vllm")


async def test_pods_speak_the_protocol_that_the_pool_names(
    control_plane: ControlPlane, pods: Pods, pool: Pool, tmp_path: Path
) -> None:
    engine = Backend("a")
    async with serving(engine), speaking_http2(tmp_path, engine.port) as port:
        await pods.create_plain("vllm", {"app": "vllm"})
        await pool.apply("vllm", port)
        async with started(tmp_path, pods.namespace, control_plane.kubeconfig) as epp:
            await until(epp.ready)
            assert await epp.serves(), "a pod that speaks HTTP/2 only does not answer HTTP/1.1"
            await pool.apply("vllm", port, protocol="kubernetes.io/h2c")
            await until(lambda: epp.serves("vllm"))
            await pool.apply("vllm", engine.port)
            await until(lambda: epp.serves("vllm"))
            await pool.apply("vllm", engine.port, protocol="kubernetes.io/h2c")
            await until(epp.serves)


async def test_rights_to_read_pods_and_pools_are_enough(
    control_plane: ControlPlane, pods: Pods, pool: Pool, tmp_path: Path
) -> None:
    user = f"epp-of-{pods.namespace}"
    await pool.apply("vllm", 8000)
    kubeconfig = control_plane.kubeconfig_for(user)
    async with (
        started(tmp_path, pods.namespace, kubeconfig) as epp,
        await connect(control_plane.kubeconfig) as api,
    ):
        await until(lambda: has_figure(epp, "tandem_epp_inference_pool", 0.0))
        assert not await epp.ready()
        for body in rights(pods.namespace, user):
            await api.create(ROLES if body["kind"] == "Role" else ROLE_BINDINGS, body)
        await until(epp.ready)


def rights(namespace: str, user: str) -> list[dict[str, Any]]:
    """The rights that llm-d's charts give to the EPP."""
    api, metadata = "rbac.authorization.k8s.io", {"name": "epp", "namespace": namespace}
    verbs = ["get", "watch", "list"]
    kind = {"apiVersion": f"{api}/v1", "metadata": metadata}
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": verbs},
        {
            "apiGroups": [INFERENCE_POOLS.group],
            "resources": [INFERENCE_POOLS.plural],
            "verbs": verbs,
        },
    ]
    return [
        {**kind, "kind": "Role", "rules": rules},
        {
            **kind,
            "kind": "RoleBinding",
            "roleRef": {"apiGroup": api, "kind": "Role", "name": "epp"},
            "subjects": [{"apiGroup": api, "kind": "User", "name": user}],
        },
    ]


async def test_the_log_says_why_there_are_no_backends(
    pods: Pods, pool: Pool, caplog: pytest.LogCaptureFixture, control_plane: ControlPlane
) -> None:
    caplog.set_level(logging.INFO)
    changes = 0
    changed = asyncio.Event()

    def on_change() -> None:
        nonlocal changes
        changes += 1
        changed.set()

    async def next_change() -> None:
        await changed.wait()
        changed.clear()

    async with await connect(control_plane.kubeconfig) as api:
        discovery = PoolDiscovery(api, PoolReference(pods.namespace, "p"), on_change)
        running = asyncio.create_task(discovery.run())
        try:
            named = f"InferencePool {pods.namespace}/p (inference.networking.k8s.io/v1)"
            await until(lambda: logged(caplog, f"{named} does not exist: not ready"))
            assert not discovery.is_known
            await pool.apply("vllm", 8000)
            await next_change()
            assert discovery.is_known
            assert discovery.backends("") == []
            await pool.delete()
            await next_change()
            assert not discovery.is_known
            assert await logged(caplog, f"{named} was deleted; not ready")
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return any(text in record.getMessage() for record in caplog.records)
