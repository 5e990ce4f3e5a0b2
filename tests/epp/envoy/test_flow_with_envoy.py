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
from tandem_contract import metrics as names
from tandem_operator.routing.envoy.clusters import Json
from tandem_operator.routing.envoy.http_filters import BodyMode

from ..real import Backend, Epp, envoy, envoy_settings, epp, serving, until

pytestmark = pytest.mark.component

FULL = (
    f"{names.PROCESS_START_TIME} 1.0\n{names.ENGINE_RUNNING} 1.0\n{names.ENGINE_KV_USAGE} 1.0\n"
    f'{names.ENGINE_CACHE_CONFIG}{{block_size="16",num_gpu_blocks="1000"}} 1.0\n'
)
"""The page of an engine without free KV."""
PATIENCE = "0.3s"
"""What Envoy waits for each answer of the EPP."""


class Stack:
    """A full backend behind EPP and Envoy."""

    def __init__(self, picker: Epp, backend: Backend, url: str) -> None:
        self.epp, self.backend, self._url = picker, backend, url
        self.http: aiohttp.ClientSession

    async def send(self, prompt: str = "hello", **headers: str) -> tuple[int, dict[str, str]]:
        body = {"model": "m", "prompt": prompt}
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"{self._url}/v1/completions"
        async with self.http.post(url, json=body, headers=sent) as answer:
            await answer.read()
            return answer.status, {key.lower(): value for key, value in answer.headers.items()}

    async def start(self) -> asyncio.Task[tuple[int, dict[str, str]]]:
        """Send a request that the backend answers when it is released."""
        task = asyncio.create_task(self.send("slow"))

        async def is_there() -> bool:
            return bool(self.backend.received)

        await until(is_there)
        return task

    async def holds(self, requests: int) -> None:
        """Wait until the EPP holds so many."""

        async def held() -> bool:
            figures = await self.epp.figures()
            return figures.get('tandem_epp_flow_held{priority="0"}', 0.0) == requests

        await until(held)


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
        stack = Stack(picker, backend, url)
        stack.http = await parts.enter_async_context(aiohttp.ClientSession())
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


async def test_whoever_waited_too_long_gets_429(stack: Stack) -> None:
    first = await stack.start()
    status, headers = await stack.send(x_llm_d_inference_ttl="500ms")
    assert status == 429
    assert headers[wire.REQUEST_DROPPED_REASON] == "rejected-ttl-expired"
    assert int(headers[wire.RETRY_AFTER]) >= 1
    stack.backend.release.set()
    await first


async def test_a_client_that_leaves_is_forgotten(stack: Stack) -> None:
    first = await stack.start()
    leaving = asyncio.create_task(stack.send())
    await stack.holds(1)
    leaving.cancel()
    await stack.holds(0)
    stack.backend.release.set()
    await first
    assert len(stack.backend.received) == 1


async def test_who_waits_while_the_epp_ends_gets_an_answer(stack: Stack) -> None:
    first = await stack.start()
    waiting = [asyncio.create_task(stack.send()) for _ in range(3)]
    await stack.holds(3)
    for _ in range(2):
        # The second one ends the time in which new requests are still placed.
        stack.epp.process.send_signal(signal.SIGTERM)
    for task in waiting:
        status, headers = await task
        assert (status, headers[wire.REQUEST_DROPPED_REASON]) == (503, "rejected-shutting-down")
    stack.backend.release.set()
    assert (await first)[0] == 200
