"""`tandem doctor` without a stack, and against a fake API server with three pods."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner

from tandem_cli.doctor import doctor
from tandem_contract import ports
from tandem_operator.pods.manifests import pods

from ..operator.pool_yaml import pair

pytestmark = pytest.mark.component

ENGINE_METRICS = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="64",cache_dtype="auto",engine="0"} 1.0
# TYPE vllm:nixl_num_failed_transfers counter
vllm:nixl_num_failed_transfers_total{engine="0",model_name="m"} 3.0
"""
SIDECAR_METRICS = """\
# TYPE disaggregated_requests_total counter
disaggregated_requests_total{routing_path="fallback"} 5.0
disaggregated_requests_total{routing_path="unified"} 15.0
# TYPE disaggregated_fallback_total counter
disaggregated_fallback_total 5.0
# TYPE disaggregated_errors_total counter
disaggregated_errors_total{phase="kv_transfer"} 2.0
"""


async def tandem(*args: str, home: Path) -> tuple[int, str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("KUBECONFIG", "XDG_RUNTIME_DIR")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem_cli", "doctor", *args),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**kept, "HOME": str(home)},
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


@pytest.mark.timeout(120)
async def test_without_a_stack_or_cluster_it_prints_one_line(tmp_path: Path) -> None:
    (code, out, err), (other, _, named) = await asyncio.gather(
        tandem(home=tmp_path), tandem("--run-dir", str(tmp_path), home=tmp_path)
    )
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "no stack runs in" in err
    assert "give --kubeconfig FILE or set KUBECONFIG" in err
    assert (other, named.count("\n")) == (1, 1)
    assert f"no stack runs in {tmp_path}: start one with tandem up" in named


def test_a_stack_and_a_cluster_exclude_each_other() -> None:
    result = CliRunner().invoke(doctor, ["--run-dir", ".", "-n", "x"])
    assert result.exit_code == 2
    assert "--run-dir is for this machine's stack" in result.output


def engine_pages(longest: int) -> dict[str, Any]:
    model = {"id": "org/model", "root": "org/model", "owned_by": "vllm", "max_model_len": longest}
    return {
        "/health": "",
        "/metrics": ENGINE_METRICS,
        "/v1/models": {"object": "list", "data": [model]},
        "/version": {"version": "0.32.0"},
    }


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[str]:
    """A kubeconfig for a server with a prefill and two decode pods as the operator makes them.

    The last pod's engine is down.
    """
    made = [
        {**pod, "status": {"phase": "Running", "podIP": f"10.0.0.{i}"}}
        for i, pod in enumerate(pods(pair()[0]))
    ]
    prefill, decode, _ = (pod["metadata"]["name"] for pod in made)
    known = {
        f"{prefill}:{ports.ENGINE_PREFILL}": engine_pages(4096),
        f"{decode}:{ports.ENGINE_DECODE}": engine_pages(2048),
        f"{decode}:{ports.SIDECAR_ADMIN}": {"/metrics": SIDECAR_METRICS, "/readyz": "ready"},
    }

    async def listed(_request: web.Request) -> web.Response:
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": made})

    async def proxied(request: web.Request) -> web.Response:
        said = known.get(request.match_info["pod"], {}).get("/" + request.match_info["path"])
        if said is None:
            status = {"kind": "Status", "code": 503, "message": "no connection"}
            return web.json_response(status, status=503)
        return web.Response(text=said if isinstance(said, str) else json.dumps(said))

    app = web.Application()
    at = "/api/v1/namespaces/n/pods"
    app.add_routes([web.get(at, listed), web.get(at + "/{pod}/proxy/{path:.*}", proxied)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "c", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}
        ],
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


@pytest.mark.timeout(120)
async def test_a_cluster_is_checked_through_its_api_server(tmp_path: Path) -> None:
    async with cluster(tmp_path) as kubeconfig:
        text, as_json = await asyncio.gather(
            tandem("--kubeconfig", kubeconfig, home=tmp_path),
            tandem("-n", "n", "--kubeconfig", kubeconfig, "--json", home=tmp_path),
        )
    code, out, err = as_json
    assert (code, err) == (1, "")
    found = [f for f in json.loads(out)["findings"] if f["severity"] in ("broken", "warning")]
    assert {(f["check"], f["seen"].partition(":")[0]) for f in found} == {
        ("compatible", "maxModelLen"),
        ("reachable", "/health"),
        ("sidecar", "/metrics"),
        ("lost KV", "3 transfers failed since it started"),
        ("lost KV", "2 hand-offs whose KV did not arrive"),
        ("fallbacks", "5 of 20 requests should have been split but were not"),
    }
    code, out, err = text
    assert (code, err) == (1, "")
    assert "maxModelLen: prefill has 4096, decode has 2048" in out
    assert " and 1 more: 3 transfers failed since it started" in out
    assert "fix: set engine.maxModelLen on the PrefillPool only" in out
