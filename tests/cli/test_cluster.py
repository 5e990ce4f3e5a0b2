"""A cluster's sets, built from objects, and `tandem status` against a real API server."""

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from tandem_cli.cluster import (
    Condition,
    PodView,
    RouterView,
    SetView,
    build_sets,
    select,
)
from tandem_cli.cluster_tables import tables
from tandem_cli.main import main
from tandem_contract import labels
from tandem_kube.client import Api, connect
from tandem_kube.resources import DEPLOYMENTS, PODS, Resource

from ..cluster.control_plane import ControlPlane
from ..kube.apis import Script, scripted

DECODE_POOLS = Resource(labels.API_VERSION, "decodepools")
ALL_GOOD = {
    "Ready": ("True", "AllReady"),
    "PodsReady": ("True", "AllReady"),
    "Compatible": ("True", "Agrees"),
    "PeerReady": ("True", "Paired"),
    "RouterReady": ("True", "RouterReady"),
    "Progressing": ("False", "Complete"),
    "Stalled": ("False", "NotStalled"),
    "Draining": ("True", "PodsDrain"),
    "TransportVerified": ("Unknown", "NothingMoved"),
}


def conditions(**changed: tuple[str, str]) -> list[dict[str, str]]:
    return [
        {"type": kind, "status": status, "reason": reason, "message": f"about {kind}"}
        for kind, (status, reason) in {**ALL_GOOD, **changed}.items()
    ]


def pool(
    name: str,
    kind: str = "DecodePool",
    *,
    prefill: str | None = None,
    generation: int = 3,
    observed: int = 3,
    changed: dict[str, tuple[str, str]] | None = None,
) -> dict[str, Any]:
    spec: dict[str, Any] = {"model": {"name": "m"}}
    if prefill:
        spec["prefillRef"] = {"name": prefill}
    status = {
        "observedGeneration": observed,
        "model": "m",
        "desiredReplicas": 2,
        "readyReplicas": 1,
        "currentRevision": "aaa",
        "updateRevision": "bbb",
        "conditions": conditions(**(changed or {})),
    }
    if kind == "DecodePool":
        status["endpoint"] = f"http://{name}.n.svc:8080"
    metadata = {"name": name, "namespace": "n", "uid": f"u-{name}", "generation": generation}
    return {"kind": kind, "metadata": metadata, "spec": spec, "status": status}


def pod(name: str, of: str, role: str, *, ready: bool = True, **status: Any) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": "n",
        "uid": f"u-{name}",
        "labels": {labels.POOL: of, labels.ROLE: role, labels.REVISION: "aaa"},
    }
    pod_status = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": str(ready)}],
        **status,
    }
    return {"metadata": metadata, "spec": {"nodeName": "node-1"}, "status": pod_status}


def deployment(endpoint: str, component: str, available: int) -> dict[str, Any]:
    own_labels = {labels.ENDPOINT: endpoint, labels.COMPONENT: component}
    metadata = {"name": f"{endpoint}-{component}", "namespace": "n", "labels": own_labels}
    return {
        "metadata": metadata,
        "spec": {"replicas": 1},
        "status": {"availableReplicas": available},
    }


def test_a_set_has_its_pools_pods_and_routers() -> None:
    sets = build_sets(
        [pool("d", prefill="p"), pool("p", "PrefillPool"), pool("alone")],
        [pod("p-aaa-0", "p", "prefill"), pod("d-aaa-0", "d", "decode")],
        [deployment("d", "epp", 1), deployment("d", "envoy", 0), deployment("alone", "epp", 1)],
    )
    assert [(set_view.name, [p.name for p in set_view.pools]) for set_view in sets] == [
        ("alone", ["alone"]),
        ("p", ["p", "d"]),
    ]
    pair = sets[1]
    assert pair.ready
    assert pair.pools[0].pods == (PodView("p-aaa-0", "Ready", "node-1", "aaa", None),)
    assert pair.routers == (RouterView("d", "epp", 1, 1), RouterView("d", "envoy", 1, 0))
    assert [set_view.name for set_view in select(sets, "d")] == ["p"]
    assert select(sets, "none") == ()
    assert select(sets, None) == sets


def only(*pools: dict[str, Any], pods: Iterable[dict[str, Any]] = ()) -> SetView:
    (set_view,) = build_sets(pools, pods, [])
    return set_view


def test_a_prefill_and_a_decode_pool_of_one_name_keep_their_pods() -> None:
    set_view = only(
        pool("x", prefill="x"),
        pool("x", "PrefillPool"),
        pods=[pod("x-aaa-0", "x", "prefill"), pod("x-bbb-0", "x", "decode")],
    )
    assert [(p.kind, [q.name for q in p.pods]) for p in set_view.pools] == [
        ("PrefillPool", ["x-aaa-0"]),
        ("DecodePool", ["x-bbb-0"]),
    ]


@pytest.mark.parametrize(
    ("changed", "conditions"),
    [
        ({}, []),
        ({"Progressing": ("True", "RollingOut")}, ["Progressing"]),
        ({"Draining": ("True", "DrainStuck")}, ["Draining"]),
        ({"UpdateAvailable": ("True", "NewerTemplate")}, ["UpdateAvailable"]),
        ({"Ready": ("False", "Mismatch"), "Compatible": ("False", "Mismatch")}, ["Compatible"]),
        ({"Ready": ("False", "Paused")}, ["Ready"]),
    ],
)
def test_only_conditions_that_need_attention_are_shown(
    changed: dict[str, tuple[str, str]], conditions: list[str]
) -> None:
    set_view = only(pool("x", changed=changed))
    assert [condition.type for condition in set_view.pools[0].conditions] == conditions
    assert set_view.ready is ("Ready" not in changed)


@pytest.mark.parametrize(("observed", "subject"), [(0, "this pool"), (2, "this change")])
def test_a_status_of_an_older_generation_is_not_ready(observed: int, subject: str) -> None:
    set_view = only(pool("x", observed=observed))
    (condition,) = set_view.pools[0].conditions
    assert condition == Condition(
        *("Ready", "Unknown", "NotObserved"),
        f"the operator has not observed {subject} yet:"
        " kubectl get pods -A -l app.kubernetes.io/component=operator",
    )
    assert not set_view.ready


def test_the_tables_show_everything_and_interpret_no_markup() -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "[red]no such image[/red]"}}
    trouble = {"containerStatuses": [{"name": "engine", "state": waiting}]}
    set_view = only(
        pool("x", changed={"PeerReady": ("False", "PeerMissing")}),
        pods=[pod("x-0", "x", "decode", ready=False, **trouble)],
    )
    console = Console(width=160, markup=False)
    with console.capture() as captured:
        console.print(tables([set_view]))
    text = captured.get()
    assert "Set n/x: ready" in text
    assert "http://x.n.svc:8080" in text
    assert "aaa → bbb" in text
    assert "engine: ImagePullBackOff: [red]no such image[/red]" in text
    assert "DecodePool x: PeerReady=False PeerMissing: about PeerReady" in text


def tandem(*args: str, kubeconfig: Path | None = None) -> tuple[int, str, str]:
    environment = {"KUBECONFIG": str(kubeconfig or "/nonexistent"), "HOME": "/nonexistent"}
    unset = dict.fromkeys(("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"))
    result = CliRunner().invoke(main, ["status", *args], env={**environment, **unset})
    return result.exit_code, result.stdout, result.stderr


def test_neither_a_stack_nor_a_cluster(tmp_path: Path) -> None:
    code, out, err = tandem("--kubeconfig", str(tmp_path / "none"))
    assert (code, out, err) == (1, "", f"error: {tmp_path / 'none'}: no such kubeconfig file\n")
    code, _, err = tandem()
    assert code == 1
    assert err.startswith("error: no stack runs in ")
    assert "set KUBECONFIG" in err


async def test_a_cluster_without_the_crds(tmp_path: Path) -> None:
    async with scripted(Script([], []), tmp_path):
        result = await asyncio.to_thread(tandem, "-A", kubeconfig=tmp_path / "scripted.kubeconfig")
    missing = "error: this cluster has no prefillpools.tandem.dev: install Tandem's Helm chart\n"
    assert result == (1, "", missing)


async def fill(api: Api, namespace: str) -> None:
    """A lone DecodePool with one pod and its EPP, as an operator would leave them."""
    own_labels = {labels.ENDPOINT: "chat", labels.COMPONENT: "epp"}
    spec = {"containers": [{"name": "c", "image": "x"}]}
    created = await api.create(
        DECODE_POOLS,
        {
            "apiVersion": labels.API_VERSION,
            "kind": "DecodePool",
            "metadata": {"name": "chat", "namespace": namespace},
            "spec": {"role": "unified", "model": {"name": "m"}},
        },
    )
    status = {
        "observedGeneration": created["metadata"]["generation"],
        "desiredReplicas": 1,
        "readyReplicas": 1,
        "conditions": dated(),
    }
    await api.patch(DECODE_POOLS, "chat", {"status": status}, namespace, subresource="status")
    await api.create(
        PODS,
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "chat-aaa-0",
                "namespace": namespace,
                "labels": {labels.POOL: "chat", labels.ROLE: "unified"},
            },
            "spec": spec,
        },
    )
    await api.create(
        DEPLOYMENTS,
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "chat-epp", "namespace": namespace, "labels": own_labels},
            "spec": {
                "replicas": 0,
                "selector": {"matchLabels": own_labels},
                "template": {"metadata": {"labels": own_labels}, "spec": spec},
            },
        },
    )


async def filled(kubeconfig: Path, namespace: str) -> None:
    async with await connect(kubeconfig) as api:
        await fill(api, namespace)


async def unready(kubeconfig: Path, namespace: str) -> None:
    async with await connect(kubeconfig) as api:
        status = {"conditions": dated(Ready=("False", "PodsNotReady"))}
        await api.patch(DECODE_POOLS, "chat", {"status": status}, namespace, subresource="status")


def dated(**changed: tuple[str, str]) -> list[dict[str, str]]:
    return [{**c, "lastTransitionTime": "2026-01-01T00:00:00Z"} for c in conditions(**changed)]


@pytest.mark.control_plane
def test_a_real_cluster(crds: ControlPlane, namespace: str) -> None:
    admin = crds.kubeconfig
    result = tandem("-n", namespace, kubeconfig=admin)
    nothing = f"error: no PrefillPool and no DecodePool in namespace {namespace}\n"
    assert result == (1, "", nothing)

    asyncio.run(filled(admin, namespace))
    code, out, err = tandem("-n", namespace, "-o", "json", kubeconfig=admin)
    assert (code, err) == (0, "")
    (pool_set,) = json.loads(out)["sets"]
    assert (pool_set["name"], pool_set["ready"]) == ("chat", True)
    assert [pod["name"] for pod in pool_set["pools"][0]["pods"]] == ["chat-aaa-0"]
    assert pool_set["routers"] == [
        {"endpoint": "chat", "component": "epp", "desired": 0, "available": 0}
    ]
    code, out, _ = tandem("chat", "-n", namespace, "--kubeconfig", str(admin))
    assert code == 0
    assert f"Set {namespace}/chat: ready" in out

    asyncio.run(unready(admin, namespace))
    code, out, _ = tandem("chat", "-n", namespace, kubeconfig=admin)
    assert code == 1
    assert "DecodePool chat: Ready=False PodsNotReady: about Ready" in out
    result = tandem("none", "-n", namespace, kubeconfig=admin)
    assert result == (1, "", f"error: no set or pool none in namespace {namespace}\n")

    code, _, err = tandem("-n", namespace, kubeconfig=crds.kubeconfig_for("stranger"))
    assert code == 1
    assert err.startswith(f"error: not permitted to list prefillpools in namespace {namespace}: ")
    assert f'cannot list resource "prefillpools" in API group "{labels.GROUP}"' in err
