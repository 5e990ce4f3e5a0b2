"""What flow control tells engines: a higher priority overtakes others in vLLM's own queue."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tandem_contract import metrics as names
from tandem_epp.request.engine_priority import with_priority

from .engines import MODEL_NAME
from .single import SingleVllm, single_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
POLICY = ("--scheduling-policy", "priority")
TOKENS = 3500
"""Of the answer that keeps the engine busy while the others come."""


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SingleVllm]:
    """It computes one request at a time."""
    directory = tmp_path_factory.mktemp("priorities")
    with single_vllm(model, directory, "--max-num-seqs", "1", *POLICY) as running:
        yield running


def body(priority: int, **fields: Any) -> bytes:
    """A request as an EPP sends it on that propagates priorities."""
    asked = {"model": MODEL_NAME, "prompt": "Hello", "ignore_eos": True, **fields}
    return with_priority(json.dumps(asked).encode(), priority)


async def stream(http: aiohttp.ClientSession, engine: SingleVllm) -> AsyncIterator[bytes]:
    """The chunks of a long answer to a request of priority 0."""
    asked = body(0, max_tokens=TOKENS, stream=True)
    async with http.post(f"{engine.url}/v1/completions", data=asked, headers=JSON) as answer:
        assert answer.status == 200, await answer.text()
        async for chunk in answer.content.iter_any():
            yield chunk


JSON = {"content-type": "application/json"}


async def test_a_higher_priority_overtakes_those_that_wait(
    engine: SingleVllm, http: aiohttp.ClientSession
) -> None:
    await engine.ready()
    running = stream(http, engine)
    await anext(running)
    ended: list[int] = []

    async def send(priority: int) -> None:
        asked = body(priority, max_tokens=1)
        async with http.post(f"{engine.url}/v1/completions", data=asked, headers=JSON) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        ended.append(priority)

    waiting = []
    # The least important come first, and each waits before the next one comes.
    for number, priority in enumerate((-1, 0, 0, 10)):
        waiting.append(asyncio.create_task(send(priority)))
        await engine.metric_reaches(http, names.ENGINE_WAITING, number + 1)
    assert not ended
    # The client leaves, and the engine takes the next one.
    await running.aclose()
    await asyncio.gather(*waiting)
    assert ended == [10, 0, 0, -1]
