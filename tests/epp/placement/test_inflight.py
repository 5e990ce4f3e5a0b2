"""The EPP compares what a sidecar had in flight with what it placed: both must count the same."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tandem_contract import headers as wire
from tandem_contract.plan_keys import PlanKeys
from tandem_epp.exchange import HttpRequest, ResponseHeaders
from tandem_epp.placement.placement import Placement

from ...sidecar.conftest import Harness
from ...sidecar.peers import Turn
from .test_picker import KEYS, PickerSetup

PATH = "/v1/completions"


class FakeVllm:
    """Answers prompts, streams without a usage, when the test lets it."""

    def __init__(self) -> None:
        self.arrived = asyncio.Semaphore(0)
        self.go = asyncio.Event()

    async def __call__(self, turn: Turn) -> None:
        self.arrived.release()
        await self.go.wait()
        turn.stream()
        turn.event('{"choices":[{"text":"hello"}]}')
        turn.event("[DONE]")
        turn.end()


class Stack:
    """An EPP and a sidecar with its engine, without Envoy in between."""

    def __init__(self, harness: Harness, engine: FakeVllm) -> None:
        self.harness, self.engine = harness, engine
        self.epp = PickerSetup(enabled=False, u="unified")
        self.requests = 0
        self.now = 0.0

    @property
    def samples(self) -> int:
        return self.epp["u"].estimates.prefill.count

    async def run(self, *, placed: int, others: int) -> None:
        """Run requests at the same time, `placed` by the EPP and `others` by another router."""
        self.engine.go.clear()
        # One moment for all: on a busy machine some could seem to begin after others had ended.
        self.now = time.time()
        tasks = [asyncio.create_task(self._place()) for _ in range(placed)]
        tasks += [asyncio.create_task(self._send({})) for _ in range(others)]
        for _ in tasks:
            await asyncio.wait_for(self.engine.arrived.acquire(), 10)
        self.engine.go.set()
        await asyncio.gather(*tasks)

    async def _place(self) -> None:
        self.requests += 1
        name = f"r{self.requests}"
        request = HttpRequest("POST", PATH, {wire.REQUEST_ID: name})
        placement = self.epp.picker.place(request, self._body(name).encode(), self.now)
        await self._send(dict(placement.mutation.set), placement, name)

    async def _send(
        self, headers: dict[str, str], placement: Placement | None = None, name: str = "other"
    ) -> None:
        url, sent = self.harness.url(PATH), {**headers, wire.REQUEST_ID: name}
        async with self.harness.http.post(url, data=self._body(name), headers=sent) as answer:
            if placement is not None:
                assert wire.TIMING in answer.headers
                response = ResponseHeaders(answer.headers[wire.TIMING], answer.status)
                placement.on_response_headers(response, self.now)
            await answer.read()
        if placement is not None:
            placement.end(self.now)

    def _body(self, name: str) -> str:
        return json.dumps({"model": "m", "prompt": f"{name} " * 400, "stream": True})


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    (tmp_path / "k").write_bytes(KEYS["k"])
    async with AsyncExitStack() as exits:
        harness, engine = Harness(exits), FakeVllm()
        await harness.start(engine, keys=PlanKeys(tmp_path), pod_name="u")
        yield Stack(harness, engine)


async def test_only_prompts_beside_known_ones_teach(stack: Stack) -> None:
    await stack.run(placed=1, others=0)
    for _ in range(3):
        await stack.run(placed=1, others=1)
        await stack.run(placed=2, others=1)
    assert stack.samples == 1
    # The first sample of a fresh engine counts only until the second one.
    await stack.run(placed=1, others=0)
    assert stack.samples == 1
    for _ in range(3):
        await stack.run(placed=3, others=0)
    assert stack.samples == 4
