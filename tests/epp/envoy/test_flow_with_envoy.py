"""Flow control behind Envoy: requests wait in the EPP for longer than Envoy waits by itself."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tandem_contract import headers as wire
from tandem_operator.routing.envoy.clusters import Json
from tandem_operator.routing.envoy.http_filters import BodyMode

from ..flow.stack import FULL, FullStack
from ..real import Backend, Epp, envoy, envoy_settings, epp, serving

pytestmark = pytest.mark.component

PATIENCE = "0.3s"
"""What Envoy waits for each answer of the EPP."""


class Stack(FullStack):
    """A full backend behind EPP and Envoy."""

    epp: Epp


def hurry(bootstrap: Json) -> None:
    """Make Envoy's own patience short."""
    text = json.dumps(bootstrap)
    assert '"message_timeout": "5s"' in text
    bootstrap.update(
        json.loads(text.replace('"message_timeout": "5s"', f'"message_timeout": "{PATIENCE}"'))
    )


@pytest.fixture(params=["FULL_DUPLEX_STREAMED", "BUFFERED"])
def mode(request: pytest.FixtureRequest) -> BodyMode:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=["http2", "grpcio"])
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return ("--ext-proc-server", request.param)


@pytest.fixture
async def stack(tmp_path: Path, mode: BodyMode, flags: tuple[str, ...]) -> AsyncIterator[Stack]:
    backend = Backend("d", ranked_page=FULL)
    async with AsyncExitStack() as parts:
        await parts.enter_async_context(serving(backend))
        config = tmp_path / "router.yaml"
        listed: dict[str, Any] = {"name": "d", "url": f"http://127.0.0.1:{backend.port}"}
        config.write_text(json.dumps({"backends": [listed], "flow_control": {"enabled": True}}))
        picker = await parts.enter_async_context(epp(config, *flags))
        settings = envoy_settings(picker.grpc, body_mode=mode)
        url = await parts.enter_async_context(envoy(tmp_path, settings, change=hurry))
        http = await parts.enter_async_context(aiohttp.ClientSession())

        async def page() -> str:
            async with http.get(f"http://127.0.0.1:{picker.metrics}/metrics") as answer:
                return await answer.text()

        stack = Stack(backend, http, f"{url}/v1/completions", page)
        stack.epp = picker
        yield stack


async def test_a_request_waits_for_longer_than_envoys_own_patience(stack: Stack) -> None:
    first = await stack.start()
    second = asyncio.create_task(stack.send())
    await stack.holds(1)
    # Longer than Envoy's patience: without more time it would go to the fallback, which is dead.
    done, _ = await asyncio.wait([second], timeout=1.0)
    assert not done
    assert len(stack.backend.received) == 1
    stack.backend.release.set()
    assert [(await task)[0] for task in (first, second)] == [200, 200]
    assert wire.DESTINATION_ENDPOINT in stack.backend.received[1].headers
    await stack.holds(0)


async def test_a_request_that_waited_too_long_gets_429(stack: Stack) -> None:
    await stack.check_expiry()


async def test_a_client_that_leaves_is_forgotten(stack: Stack) -> None:
    await stack.check_leaving()


async def test_what_waits_while_the_epp_ends_is_answered(stack: Stack) -> None:
    def stop() -> None:
        for _ in range(2):
            # The second one ends the time in which new requests are still placed.
            stack.epp.process.send_signal(signal.SIGTERM)

    await stack.check_stop(stop)


async def test_what_waits_while_the_epp_is_killed_gets_a_503(stack: Stack) -> None:
    first = await stack.start()
    waiting = [asyncio.create_task(stack.send()) for _ in range(3)]
    await stack.holds(3)
    stack.epp.process.send_signal(signal.SIGKILL)
    assert [(await task)[0] for task in waiting] == [503] * 3
    stack.backend.release.set()
    await asyncio.gather(first, return_exceptions=True)
