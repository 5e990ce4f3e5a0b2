"""The command against a real stack, and against an API server that stands for a cluster's."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from click.testing import CliRunner

from tandem_cli.demo import pools
from tandem_cli.trace import trace, witnesses_among
from tandem_contract import headers, ports
from tandem_contract.paths import RoutingPath
from tandem_contract.trace import CandidateTrace, DecisionTrace, SidecarTrace
from tandem_engine.tiny import make_tiny_model
from tandem_local.stack import Stack
from tandem_operator.resources.pool_files import parse_pools

pytestmark = pytest.mark.component

MISSING = "nobody knows request nobody: asked "


async def tandem(*args: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem_cli", "trace", *args),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


@pytest.mark.timeout(300)
async def test_a_request_through_a_real_stack_from_its_decision_to_its_end(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", max_position=512)
    documents = pools.pair(tmp_path / "model", 512)
    for document in documents:
        document.data["spec"]["replicas"] = 1
    sets = parse_pools(documents)
    here = ("--run-dir", str(tmp_path / "run"))
    async with Stack(sets, port=0, run_dir=tmp_path / "run") as stack:
        url = f"{stack.endpoint}/v1/completions"
        body = {"model": pools.SERVED, "prompt": list(range(10, 310)), "max_tokens": 2}
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
            assert answer.status == 200
            await answer.read()
            ident = answer.headers[headers.REQUEST_ID]
            decode = answer.headers[headers.DECODE_BACKEND]
            prefill = answer.headers[headers.PREFILL_BACKEND]
        story, programs, missing = await asyncio.gather(
            tandem(ident, *here), tandem(ident, "--json", *here), tandem("nobody", *here)
        )
    code, out, err = story
    assert (code, err) == (0, "")
    words = [line[15:].partition("  ")[0] for line in out.splitlines() if " ms  " in line]
    events = [word for word in words if word in ("decided", "received", "prefill", "decode")]
    assert events == ["decided", "received", "prefill", "decode"]
    assert f"prefill    on {prefill}: answered" in out
    assert f"decode     on {decode}: answered" in out
    assert "KV transfer" in out
    code, out, _ = programs
    (request,) = json.loads(out)["requests"]
    assert request["decision"]["path"] == RoutingPath.PREFILL_THEN_DECODE
    assert request["decision"]["decode"][0]["name"] == request["served"][0]["pod"] == decode
    code, out, err = missing
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {MISSING}")
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


def test_who_is_asked_is_told_by_the_ports_that_pods_declare() -> None:
    native = {"name": "s", "ports": [{"containerPort": ports.SIDECAR_ADMIN}]}
    plain = {"metadata": {"name": "x"}, "spec": {"initContainers": [native], "containers": [{}]}}
    assert witnesses_among([*PODS, plain]) == [
        ("chat-epp", True, ports.EPP_METRICS),
        ("d-0", False, ports.SIDECAR_ADMIN),
        ("d-1", False, ports.SIDECAR_ADMIN),
        ("x", False, ports.SIDECAR_ADMIN),
    ]


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[str]:
    """A kubeconfig for a server of PODS in namespace `n`: d-0 had request `r`, d-1 is not there."""
    decode = (CandidateTrace("d-0", "10.0.0.1:8000"),)
    known = {
        "chat-epp:9090": [DecisionTrace("r", 5.0, 0.0, path=RoutingPath.UNIFIED, decode=decode)],
        "d-0:8001": [SidecarTrace("r", "chat", "/v1/chat/completions", 5.0)],
    }

    async def listed(_request: web.Request) -> web.Response:
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": PODS})

    async def proxied(request: web.Request) -> web.Response:
        name = request.match_info["pod"]
        if name not in known:
            status = {"kind": "Status", "code": 503, "message": f"no connection to {name}"}
            return web.json_response(status, status=503)
        found = known[name] if request.match_info["id"] == "r" else []
        return web.Response(status=200 if found else 404, body=msgspec.json.encode(found))

    app = web.Application()
    at = "/api/v1/namespaces/n/pods"
    app.add_routes([web.get(at, listed), web.get(at + "/{pod}/proxy/requests/{id}", proxied)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = f"http://127.0.0.1:{runner.addresses[0][1]}"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "n"}}],
        "current-context": "x",
    }
    file = folder / "kubeconfig"
    file.write_text(json.dumps(config))
    try:
        yield str(file)
    finally:
        await runner.cleanup()


async def test_a_cluster_is_asked_through_its_api_server(tmp_path: Path) -> None:
    async with cluster(tmp_path) as kubeconfig:
        story, missing = await asyncio.gather(
            tandem("r", "-n", "n", "--kubeconfig", kubeconfig),
            tandem("nobody", "--kubeconfig", kubeconfig),
        )
    code, out, _ = story
    assert code == 0
    assert "received   by d-0: chat /v1/chat/completions" in out
    assert out.splitlines()[-1] == "d-1 did not answer: no connection to d-1:8001"
    code, out, err = missing
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {MISSING}chat-epp, d-0; d-1 did not answer (no connection")


def test_wrong_usage_and_nobody_to_ask(tmp_path: Path) -> None:
    both = CliRunner().invoke(trace, ["r", "-n", "n", "--run-dir", str(tmp_path)])
    assert both.exit_code == 2
    assert "--run-dir is for this machine's stack" in both.stderr
    nowhere = CliRunner().invoke(trace, ["r", "--run-dir", str(tmp_path)])
    assert nowhere.exit_code == 1
    assert nowhere.stderr.startswith(f"error: no stack runs in {tmp_path}: ")
