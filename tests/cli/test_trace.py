"""The command against a real stack, and against a fake API server with two pods."""

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from click.testing import CliRunner

from tandem_cli.demo import pools
from tandem_cli.trace import find_trace_ports, trace
from tandem_contract import endpoints, headers, ports
from tandem_contract.paths import RoutingPath
from tandem_contract.trace import CandidateTrace, DecisionTrace, SidecarTrace
from tandem_engine.tiny import make_tiny_model
from tandem_local.stack import Stack
from tandem_operator.resources.pool_files import parse_pools

from .helpers import fake_api_server, tandem, unavailable

pytestmark = pytest.mark.component

NOT_FOUND = "no record of request unknown (asked: "


@pytest.mark.timeout(300)
async def test_history_of_a_request_through_a_real_stack(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", max_position=512)
    documents = pools.pair(tmp_path / "model", 512)
    for document in documents:
        document.data["spec"]["replicas"] = 1
    # On a busy machine the predicted cost may well prefer one engine for so short a prompt.
    plugins = [{"type": "active-request-scorer"}, {"type": "always-disagg-pd-decider"}]
    documents[1].data["spec"]["routing"] = {"epp": {"config": {"plugins": plugins}}}
    sets = parse_pools(documents)
    run_dir = ("--run-dir", str(tmp_path / "run"))
    async with Stack(sets, port=0, run_dir=tmp_path / "run") as stack:
        url = f"{stack.endpoint}/v1/completions"
        body = {"model": pools.SERVED, "prompt": list(range(10, 310)), "max_tokens": 2}
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
            assert answer.status == 200
            await answer.read()
            request_id = answer.headers[headers.REQUEST_ID]
            decode = answer.headers[headers.DECODE_BACKEND]
            prefill = answer.headers[headers.PREFILL_BACKEND]
        text, as_json, missing = await asyncio.gather(
            tandem("trace", request_id, *run_dir),
            tandem("trace", request_id, "--json", *run_dir),
            tandem("trace", "unknown", *run_dir),
        )
    code, out, err = text
    assert (code, err) == (0, "")
    words = [line[15:].partition("  ")[0] for line in out.splitlines() if " ms  " in line]
    events = [word for word in words if word in ("decided", "received", "prefill", "decode")]
    assert events == ["decided", "received", "prefill", "decode"]
    assert f"prefill    on {prefill}: answered" in out
    assert f"decode     on {decode}: answered" in out
    assert "KV transfer" in out
    code, out, _ = as_json
    (request,) = json.loads(out)["requests"]
    assert request["decision"]["path"] == RoutingPath.PREFILL_THEN_DECODE
    assert request["decision"]["decode"][0]["name"] == request["served"][0]["pod"] == decode
    code, out, err = missing
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {NOT_FOUND}")
    assert err.count("\n") == 1


def pod(name: str, *listens: int) -> dict[str, object]:
    container = {"name": "c", "ports": [{"containerPort": port} for port in listens]}
    return {"metadata": {"name": name}, "spec": {"containers": [container]}}


PODS = [
    pod("chat-epp", ports.EPP_GRPC, ports.EPP_HEALTH, ports.EPP_METRICS),
    pod("d-0", ports.SIDECAR, ports.SIDECAR_ADMIN),
    pod("d-1", ports.SIDECAR, ports.SIDECAR_ADMIN),
    pod("p-0", ports.ENGINE_PREFILL),
]


def test_a_router_of_a_cluster_is_asked_for_its_decisions() -> None:
    router = pod("chat-router", ports.ROUTER, ports.ROUTER_ADMIN, ports.EPP_PEERS)
    assert find_trace_ports([router]) == [("chat-router", True, ports.ROUTER_ADMIN, True)]


def test_pods_to_ask_are_recognized_by_their_declared_ports() -> None:
    native = {"name": "s", "ports": [{"containerPort": ports.SIDECAR_ADMIN}]}
    plain = {"metadata": {"name": "x"}, "spec": {"initContainers": [native], "containers": [{}]}}
    assert find_trace_ports([*PODS, plain]) == [
        ("chat-epp", True, ports.EPP_METRICS, False),
        ("d-0", False, ports.SIDECAR_ADMIN, False),
        ("d-1", False, ports.SIDECAR_ADMIN, False),
        ("x", False, ports.SIDECAR_ADMIN, False),
    ]


def cluster(folder: Path) -> AbstractAsyncContextManager[str]:
    """A kubeconfig for a server of PODS in namespace `n`: d-0 served request `r`, d-1 is down."""
    decode = (CandidateTrace("d-0", "10.0.0.1:8000"),)
    records = {
        "chat-epp:9090": [DecisionTrace("r", 5.0, 0.0, path=RoutingPath.UNIFIED, decode=decode)],
        "d-0:8001": [SidecarTrace("r", "chat", "/v1/chat/completions", 5.0)],
    }

    async def proxied(request: web.Request) -> web.Response:
        pod = request.match_info["pod"]
        if pod not in records:
            return unavailable(f"no connection to {pod}")
        trace_records = records[pod] if request.match_info["id"] == "r" else []
        return web.Response(
            status=200 if trace_records else 404, body=msgspec.json.encode(trace_records)
        )

    return fake_api_server(folder, PODS, f"{endpoints.REQUESTS}{{id}}", proxied)


async def test_a_cluster_is_asked_through_its_api_server(tmp_path: Path) -> None:
    async with cluster(tmp_path) as kubeconfig:
        text, missing = await asyncio.gather(
            tandem("trace", "r", "-n", "n", "--kubeconfig", kubeconfig),
            tandem("trace", "unknown", "--kubeconfig", kubeconfig),
        )
    code, out, _ = text
    assert code == 0
    assert "received   by d-0: chat /v1/chat/completions" in out
    assert out.splitlines()[-1] == "d-1 did not answer: no connection to d-1:8001"
    code, out, err = missing
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {NOT_FOUND}chat-epp, d-0); d-1 did not answer (no connection")


def test_wrong_usage_and_no_stack(tmp_path: Path) -> None:
    result = CliRunner().invoke(trace, ["r", "-n", "n", "--run-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "--run-dir is for this machine's stack" in result.stderr
    nowhere = CliRunner().invoke(trace, ["r", "--run-dir", str(tmp_path)])
    assert nowhere.exit_code == 1
    assert nowhere.stderr.startswith(f"error: no stack runs in {tmp_path}: ")
