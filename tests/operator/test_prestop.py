"""preStop of a prefill pod: the rendered command itself, run as a process."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from tandem_contract import metrics
from tandem_operator.pods import prestop
from tandem_operator.pods.manifests import pods

from .pool_yaml import pair

pytestmark = pytest.mark.component


class Engine:
    """Serves `/metrics` with given values; `asked` is set at each request."""

    def __init__(self) -> None:
        self.held = 1.0
        self.metrics_requested = asyncio.Event()
        self.port = 0

    async def metrics(self, _request: web.Request) -> web.Response:
        self.metrics_requested.set()
        return web.Response(text=page(held=self.held))


def page(*, running: float = 0, waiting: float = 0, held: float = 0) -> str:
    """A page of vLLM with two data-parallel ranks, the second of which is busy."""
    figures = {
        metrics.ENGINE_RUNNING: running,
        metrics.ENGINE_WAITING: waiting,
        metrics.ENGINE_KV_USAGE: held,
    }
    return "".join(
        f"# HELP {name} x\n# TYPE {name} gauge\n"
        f'{name}{{engine="0",model_name="a b"}} 0.0\n'
        f'{name}{{engine="1",model_name="a b"}} {value}\n'
        for name, value in figures.items()
    )


NAMES = [metrics.ENGINE_RUNNING, metrics.ENGINE_WAITING, metrics.ENGINE_KV_USAGE]


@pytest.mark.parametrize(
    ("text", "busy"),
    [
        (page(), False),
        (page(running=1), True),
        (page(waiting=2), True),
        (page(held=0.001), True),
        (page(running=1e-3), True),
        ("", True),
    ],
)
def test_a_pod_is_busy_while_requests_run_or_wait_or_blocks_are_held(text: str, busy: bool) -> None:
    assert prestop.busy(text, NAMES) is busy


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    served = Engine()
    app = web.Application()
    app.router.add_get("/metrics", served.metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served.port = runner.addresses[0][1]
    yield served
    await runner.cleanup()


def command(port: int, seconds: str) -> list[str]:
    """The rendered preStop command, with this port."""
    container: dict[str, Any] = pods(pair()[0])[0]["spec"]["containers"][0]
    python, *arguments = container["lifecycle"]["preStop"]["exec"]["command"]
    assert python == "python3"
    assert arguments[2:4] == ["8000", "120"]
    return [sys.executable, *arguments[:2], str(port), seconds, *arguments[4:]]


async def run(port: int, seconds: str = "60") -> asyncio.subprocess.Process:
    # Engines that download models have a proxy, which knows no pod: here nothing listens there.
    proxy = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY"), "http://127.0.0.1:1")
    return await asyncio.create_subprocess_exec(
        *command(port, seconds), env={"POD_IP": "127.0.0.1", **proxy}
    )


async def test_prestop_waits_until_no_block_is_held(engine: Engine) -> None:
    hook = await run(engine.port)
    for _ in range(2):
        engine.metrics_requested.clear()
        await engine.metrics_requested.wait()
    assert hook.returncode is None
    engine.held = 0.0
    assert await hook.wait() == 0


async def test_prestop_ends_at_its_timeout(engine: Engine) -> None:
    hook = await run(engine.port, "0.1")
    assert await hook.wait() == 0


async def test_prestop_ends_at_once_when_the_engine_has_exited(engine: Engine) -> None:
    hook = await run(1)
    assert await hook.wait() == 0
