"""`tandem doctor` without a stack, and against a fake API server with three pods."""

import asyncio
import json
import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner

from tandem_cli.doctor import doctor
from tandem_contract import ports
from tandem_operator.pods.manifests import pods

from ..operator.pool_yaml import pair
from .helpers import fake_api_server, tandem, unavailable

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


async def run_doctor(*args: str, home: Path) -> tuple[int, str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("KUBECONFIG", "XDG_RUNTIME_DIR")}
    return await tandem("doctor", *args, env={**env, "HOME": str(home)})


@pytest.mark.timeout(120)
async def test_without_a_stack_or_cluster_it_prints_one_line(tmp_path: Path) -> None:
    (code, out, err), (other, _, named) = await asyncio.gather(
        run_doctor(home=tmp_path), run_doctor("--run-dir", str(tmp_path), home=tmp_path)
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


def cluster(folder: Path) -> AbstractAsyncContextManager[str]:
    """A kubeconfig for a server with a prefill and two decode pods as the operator makes them.

    The last pod's engine is down.
    """
    running = [
        {**pod, "status": {"phase": "Running", "podIP": f"10.0.0.{i}"}}
        for i, pod in enumerate(pods(pair()[0]))
    ]
    prefill, decode, _ = (pod["metadata"]["name"] for pod in running)
    pages = {
        f"{prefill}:{ports.ENGINE_PREFILL}": engine_pages(4096),
        f"{decode}:{ports.ENGINE_DECODE}": engine_pages(2048),
        f"{decode}:{ports.SIDECAR_ADMIN}": {"/metrics": SIDECAR_METRICS, "/readyz": "ready"},
    }

    async def proxied(request: web.Request) -> web.Response:
        page = pages.get(request.match_info["pod"], {}).get("/" + request.match_info["path"])
        if page is None:
            return unavailable("no connection")
        return web.Response(text=page if isinstance(page, str) else json.dumps(page))

    return fake_api_server(folder, running, "/{path:.*}", proxied)


@pytest.mark.timeout(120)
async def test_a_cluster_is_checked_through_its_api_server(tmp_path: Path) -> None:
    async with cluster(tmp_path) as kubeconfig:
        text, as_json = await asyncio.gather(
            run_doctor("--kubeconfig", kubeconfig, home=tmp_path),
            run_doctor("-n", "n", "--kubeconfig", kubeconfig, "--json", home=tmp_path),
        )
    code, out, err = as_json
    assert (code, err) == (1, "")
    problems = [f for f in json.loads(out)["findings"] if f["severity"] in ("broken", "warning")]
    assert {(f["check"], f["seen"].partition(":")[0]) for f in problems} == {
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
