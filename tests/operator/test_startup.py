"""The startup probe of engine, sidecar and EPP: the rendered command itself, run as a process.

The kubelet writes an event for each probe that fails. So this one runs until the server answers.
"""

import asyncio
import socket
import sys
from typing import Any

import pytest
from aiohttp import web

from .rendered_pods import engine, rendered
from .test_golden_manifests import ENDPOINTS, rendered_endpoint

pytestmark = pytest.mark.component


def containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


@pytest.mark.parametrize("case", ENDPOINTS)
def test_no_probe_of_a_set_asks_before_its_server_listens(case: str) -> None:
    """Nine containers of the quickstart did, in 15 of 64 lines of events."""
    specs = [pod["spec"] for pod in rendered()]
    for each in rendered_endpoint(case):
        if each["kind"] == "Deployment":
            specs.append(each["spec"]["template"]["spec"])
    probed = [
        c
        for spec in specs
        for c in containers(spec)
        if "readinessProbe" in c or "startupProbe" in c
    ]
    assert {"engine", "sidecar"} <= {c["name"] for c in probed}
    for container in probed:
        startup = container["startupProbe"]
        waits = "exec" in startup or startup.get("initialDelaySeconds", 0) >= 2
        assert waits, container["name"]


async def run(port: int, seconds: str) -> asyncio.subprocess.Process:
    command = engine(rendered()[0])["startupProbe"]["exec"]["command"]
    python, *arguments = command
    assert (python, arguments[2:]) == ("python3", ["8000", "/health", "600", "2"])
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments[:2], str(port), "/health", seconds, "2"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"POD_IP": "127.0.0.1"},
    )


async def test_it_waits_until_the_server_listens_and_is_healthy() -> None:
    statuses = iter([503, 503, 200])
    asked = asyncio.Event()

    async def health(_request: web.Request) -> web.Response:
        asked.set()
        return web.Response(status=next(statuses))

    app = web.Application()
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        # Not listening: connections to it are refused, as before a program has started.
        port = reserved.getsockname()[1]
    probe = await run(port, "60")
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asked.wait()
    assert await probe.wait() == 0
    assert next(statuses, None) is None
    await runner.cleanup()


@pytest.mark.parametrize("answer", [None, 503])
async def test_after_its_time_it_fails_and_says_why(answer: int | None) -> None:
    async def health(_request: web.Request) -> web.Response:
        return web.Response(status=answer or 500)

    app = web.Application()
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    port = 1
    if answer is not None:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
    probe = await run(port, "0.1")
    _, error = await probe.communicate()
    assert probe.returncode == 1
    reason = "[Errno 111] Connection refused" if answer is None else f"status {answer}"
    assert error.decode() == f"GET /health on port {port}: {reason}\n"
    await runner.cleanup()
