"""InferenceModelRewrite and InferenceObjective on a real API server: they apply as they change."""

import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from tandem_contract import headers as wire
from tandem_contract import labels
from tandem_kube.client import Api, connect
from tandem_kube.resources import (
    ALPHA_OBJECTIVES,
    INFERENCE_POOLS,
    MODEL_REWRITES,
    OBJECTIVES,
    OLDER_MODEL_REWRITES,
    OLDER_OBJECTIVES,
    Resource,
)

from ...cluster.control_plane import ControlPlane
from ..real import Backend, Epp, envoy, envoy_settings, serving, starting_epp, until
from .cluster_pods import Pods
from .test_kubernetes_discovery import flags
from .test_pool_discovery import MODULE, Pool, pool, pool_kind, started

__all__ = ["pool", "pool_kind"]
pytestmark = [pytest.mark.component, pytest.mark.control_plane]

DEFINITION = "config/crd/bases/inference.networking.x-k8s.io_{plural}.yaml"
REWRITES = pytest.mark.parametrize(
    "kind", [MODEL_REWRITES, OLDER_MODEL_REWRITES], ids=lambda kind: kind.group, indirect=True
)
OBJECTIVE_KINDS = pytest.mark.parametrize(
    "kind",
    [OBJECTIVES, ALPHA_OBJECTIVES, OLDER_OBJECTIVES],
    ids=lambda kind: kind.api_version,
    indirect=True,
)
POOL_REFERENCE = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "group": {"type": "string", "default": "inference.networking.k8s.io"},
        "kind": {"type": "string", "default": "InferencePool"},
        "name": {"type": "string"},
    },
}
OBJECTIVE_SPEC = {
    "type": "object",
    "properties": {
        "priority": {"type": "integer", "format": "int32"},
        "poolRefs": {"type": "array", "items": POOL_REFERENCE},
        "poolSelector": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    },
}
"""Of llm-d.ai/v1, whose definition is in no Go module yet: the fields of llm-d's type."""


@pytest.fixture
def kind(
    request: pytest.FixtureRequest, pool_kind: ControlPlane, go_program: Path, tmp_path: Path
) -> Resource:
    """The kind whose definition is installed: that of the Gateway API Inference Extension, for
    llm-d's group under its name."""
    download = [go_program, "mod", "download", "-json", MODULE]
    done = subprocess.run(download, capture_output=True, text=True, check=True)
    resource: Resource = request.param
    original = Path(json.loads(done.stdout)["Dir"]) / DEFINITION.format(plural=resource.plural)
    definition = yaml.safe_load(original.read_text())
    # Groups that end in k8s.io need the annotation that the original has.
    definition["metadata"]["name"] = f"{resource.plural}.{resource.group}"
    definition["spec"]["group"] = resource.group
    if resource == OBJECTIVES:
        schema = {"type": "object", "properties": {"spec": OBJECTIVE_SPEC}}
        version = {"name": "v1", "served": True, "storage": True}
        definition["spec"]["versions"] = [{**version, "schema": {"openAPIV3Schema": schema}}]
    file = tmp_path / "definition.json"
    file.write_text(json.dumps(definition))
    pool_kind.kubectl("apply", "--server-side", f"--filename={file}")
    pool_kind.wait_until_established(f"--filename={file}")
    return resource


@pytest_asyncio.fixture
async def api(pool_kind: ControlPlane, kind: Resource) -> AsyncIterator[Api]:
    async with await connect(pool_kind.kubeconfig) as connected:
        yield connected
        # The other kinds are preferred or not by what is installed. kubectl waits until it is gone:
        # the next test may install another version under the same name.
        pool_kind.kubectl("delete", "customresourcedefinition", f"{kind.plural}.{kind.group}")


def rewrite(kind: Resource, namespace: str, target: str, pool: str = "p") -> dict[str, Any]:
    return {
        "apiVersion": kind.api_version,
        "kind": "InferenceModelRewrite",
        "metadata": {"name": f"to-{pool}", "namespace": namespace},
        "spec": {
            "poolRef": {"name": pool},
            "rules": [
                {
                    "matches": [{"model": {"value": "alias"}}],
                    "targets": [{"modelRewrite": target, "weight": 1}],
                }
            ],
        },
    }


async def ask(url: str) -> tuple[int, str]:
    """Status of a request for the alias, and the message of its error."""
    body = {"model": "alias", "prompt": "hi"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        answer = await response.text()
        return response.status, answer if response.status != 200 else ""


@REWRITES
async def test_rules_apply_as_objects_change(
    control_plane: ControlPlane,
    pods: Pods,
    pool: Pool,
    kind: Resource,
    api: Api,
    tmp_path: Path,
) -> None:
    backend = Backend("vllm")
    backend.release.set()
    async with serving(backend):
        annotations = {labels.SERVED_MODELS: '["m", "n"]'}
        await pods.create_plain("vllm", {"app": "vllm"}, annotations)
        await pool.apply("vllm", backend.port)
        other = rewrite(kind, pods.namespace, "unknown", pool="other")
        await api.apply(kind, other, manager="test")
        async with started(tmp_path, pods.namespace, control_plane.kubeconfig) as epp:
            await until(epp.ready)
            async with envoy(tmp_path, envoy_settings(epp.grpc)) as url:
                status, message = await ask(url)
                assert status == 404, "rules of another pool do not count"
                assert "`alias` does not exist" in message

                async def reaches(model: str) -> bool:
                    status, _ = await ask(url)
                    return status == 200 and json.loads(backend.received[-1].body)["model"] == model

                async def is_refused() -> bool:
                    return (await ask(url))[0] == 404

                for target in ("m", "n"):
                    await api.apply(kind, rewrite(kind, pods.namespace, target), manager="test")
                    await until(lambda target=target: reaches(target))  # type: ignore[misc]
                await api.delete(kind, "to-p", pods.namespace)
                await until(is_refused)


def objective(
    kind: Resource, namespace: str, name: str, pool: str = "p", **spec: Any
) -> dict[str, Any]:
    refs = [{"name": "another"}, {"name": pool}]
    reference = {"poolRefs": refs} if kind == OBJECTIVES else {"poolRef": refs[1]}
    return {
        "apiVersion": kind.api_version,
        "kind": "InferenceObjective",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {**reference, **spec},
    }


@OBJECTIVE_KINDS
async def test_priorities_apply_as_objectives_change(
    control_plane: ControlPlane,
    pods: Pods,
    pool: Pool,
    kind: Resource,
    api: Api,
    tmp_path: Path,
) -> None:
    backend = Backend("vllm")
    backend.release.set()
    async with serving(backend):
        await pods.create_plain("vllm", {"app": "vllm"})
        await pool.apply("vllm", backend.port)
        other = objective(kind, pods.namespace, "other", pool="other", priority=7)
        await api.apply(kind, other, manager="test")
        async with started(tmp_path, pods.namespace, control_plane.kubeconfig) as epp:
            await until(epp.ready)
            async with envoy(tmp_path, envoy_settings(epp.grpc)) as url:
                await until(lambda: counts(epp, url, "premium", 0))
                for priority in (10, -5):
                    body = objective(kind, pods.namespace, "premium", priority=priority)
                    await api.apply(kind, body, manager="test")
                    await until(lambda priority=priority: counts(epp, url, "premium", priority))  # type: ignore[misc]
                assert not await counts(epp, url, "other", 7), "it is another pool's"


async def counts(epp: Epp, url: str, name: str, priority: int) -> bool:
    """Whether a request that names this objective is served and counts with this priority."""
    body, headers = {"model": "m", "prompt": "hi"}, {wire.OBJECTIVE: name}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body, headers=headers) as response,
    ):
        await response.read()
        served = response.status == 200
    figures = await epp.figures()
    rows = [(k, v) for k, v in figures.items() if k.startswith("llm_d_epp_request_total{")]
    return served and any(f'priority="{priority}"' in key and value for key, value in rows)


@pytest.mark.parametrize("kind", [OBJECTIVES], indirect=True)
async def test_an_objective_may_select_pools_by_their_labels(
    control_plane: ControlPlane,
    pods: Pods,
    pool: Pool,
    kind: Resource,
    api: Api,
    tmp_path: Path,
) -> None:
    backend = Backend("vllm")
    backend.release.set()
    async with serving(backend):
        await pods.create_plain("vllm", {"app": "vllm"})
        await pool.apply("vllm", backend.port)
        selected = objective(kind, pods.namespace, "premium", priority=4)
        selected["spec"].pop("poolRefs")
        expression = {"key": "tier", "operator": "In", "values": ["gold"]}
        selected["spec"]["poolSelector"] = {"matchExpressions": [expression]}
        await api.apply(kind, selected, manager="test")
        async with started(tmp_path, pods.namespace, control_plane.kubeconfig) as epp:
            await until(epp.ready)
            async with envoy(tmp_path, envoy_settings(epp.grpc)) as url:
                assert await counts(epp, url, "premium", 0), "the pool has no labels"
                labelled = {"metadata": {"name": "p", "labels": {"tier": "gold"}}}
                await api.patch(INFERENCE_POOLS, "p", labelled, pods.namespace)
                await until(lambda: counts(epp, url, "premium", 4))


@pytest.mark.parametrize("kind", [ALPHA_OBJECTIVES], indirect=True)
async def test_objects_of_a_pool_apply_to_pods_that_a_label_selects(
    control_plane: ControlPlane, pods: Pods, kind: Resource, api: Api, tmp_path: Path
) -> None:
    """As the operator starts the EPP: whichever of both groups the objects give the pool."""
    backend, config = Backend("vllm"), tmp_path / "router.yaml"
    backend.release.set()
    config.write_text("disaggregated_serving: {enabled: true}\n")
    older = {"name": "p", "group": "inference.networking.x-k8s.io"}
    for name, spec in (("premium", {"priority": 3}), ("batch", {"priority": -3, "poolRef": older})):
        await api.apply(kind, objective(kind, pods.namespace, name, **spec), manager="test")
    async with serving(backend):
        await pods.create(backend, "unified")
        arguments = (*flags(pods.namespace), "--inference-pool", "p")
        kubeconfig = str(control_plane.kubeconfig)
        async with starting_epp(config, *arguments, KUBECONFIG=kubeconfig) as epp:
            await until(epp.ready)
            async with envoy(tmp_path, envoy_settings(epp.grpc)) as url:
                await until(lambda: counts(epp, url, "premium", 3))
                await until(lambda: counts(epp, url, "batch", -3))
