"""Engines that compute nothing, and take for each step the time of `paced_engine`, in one process.

    python -m benchmarks.flow_engines PORT...

Continuous batching as vLLM's: a step computes a token for each running answer and up to `BUDGET`
tokens of prompts, in the order of their arrival. A request that finds `REQUESTS` in the batch, or
too little KV, waits in the engine's own queue. A prompt has a token for each number in it. Beside
the API and `/metrics`, each port takes:

    GET  /figures    what was computed since the last call, and the longest and mean queue
    POST /stall      no engine computes until the next call
    POST /hang       no metrics page is answered until the next call
"""

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import uvloop
from aiohttp import ClientConnectionResetError, web

from tandem_contract import metrics as names

from .paced_engine import PER_TOKEN, STEP

BUDGET: Final = 512
REQUESTS: Final = 32
KV_TOKENS: Final = 16_384
_BLOCK: Final = 16
_HISTOGRAMS: Final = (
    names.ENGINE_TTFT_SECONDS,
    names.ENGINE_QUEUE_SECONDS,
    names.ENGINE_PREFILL_SECONDS,
    names.ENGINE_PREFILL_TOKENS,
    names.ENGINE_DECODE_SECONDS,
    names.ENGINE_E2E_SECONDS,
    names.ENGINE_ITL_SECONDS,
)


@dataclass(eq=False)
class Running:
    """A request in an engine."""

    prompt: int
    output: int
    chunks: asyncio.Queue[bool] = field(default_factory=asyncio.Queue)
    """A token; True: the last one."""
    computed: int = 0
    generated: int = 0
    has_left: bool = False
    arrived: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    first: float = 0.0
    """When it got its first token."""
    latest: float = 0.0
    """When it got its latest token."""


@dataclass
class Figures:
    """Since they were last read."""

    tokens: int = 0
    answers: int = 0
    longest_queue: int = 0
    queued: float = 0.0
    """Requests in the queue × seconds."""
    seconds: float = 0.0


class Switches:
    """What holds for all engines of the process."""

    def __init__(self) -> None:
        self.computes, self.tells = asyncio.Event(), asyncio.Event()
        self.computes.set()
        self.tells.set()


class PacedEngine:
    """One engine."""

    def __init__(self, switches: Switches) -> None:
        self._switches = switches
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        self._told: list[Running] = []
        """Those that get a token at the end of the step."""
        self._has_work = asyncio.Event()
        self._figures = Figures()
        self._prompt_tokens = self._generated = self._answers = 0
        self._sums = {name: [0.0, 0] for name in _HISTOGRAMS}
        """Sum and count of each histogram."""
        self._started = time.time()

    async def run(self) -> None:
        """Compute until cancelled."""
        while True:
            await self._has_work.wait()
            await self._switches.computes.wait()
            began = time.monotonic()
            self._admit()
            tokens = self._compute()
            await asyncio.sleep(max(0.0, began + STEP + PER_TOKEN * tokens - time.monotonic()))
            self._tell(time.monotonic())
            self._count(tokens, time.monotonic() - began)
            if not self._running and not self._waiting:
                self._has_work.clear()

    def _admit(self) -> None:
        used = sum(each.prompt + each.output for each in self._running)
        while self._waiting and len(self._running) < REQUESTS:
            first = self._waiting[0]
            used += first.prompt + first.output
            if used > KV_TOKENS and self._running:
                return
            first.admitted = time.monotonic()
            self._running.append(self._waiting.popleft())

    def _compute(self) -> int:
        budget, tokens = BUDGET, 0
        for each in list(self._running):
            if each.has_left:
                self._running.remove(each)
                continue
            if each.computed < each.prompt:
                part = min(budget, each.prompt - each.computed)
                each.computed += part
                budget -= part
                tokens += part
                self._prompt_tokens += part
                if each.computed < each.prompt:
                    continue
            else:
                tokens += 1
            self._told.append(each)
        return tokens

    def _tell(self, now: float) -> None:
        """The step has ended: its tokens go to the clients."""
        for each in self._told:
            each.generated += 1
            self._generated += 1
            if each.generated == 1:
                each.first = now
                self._observe(names.ENGINE_TTFT_SECONDS, now - each.arrived)
                self._observe(names.ENGINE_QUEUE_SECONDS, each.admitted - each.arrived)
                self._observe(names.ENGINE_PREFILL_SECONDS, now - each.admitted)
                self._observe(names.ENGINE_PREFILL_TOKENS, each.prompt)
            else:
                self._observe(names.ENGINE_ITL_SECONDS, now - each.latest)
            each.latest = now
            is_last = each.generated >= each.output
            each.chunks.put_nowait(is_last)
            if is_last:
                self._running.remove(each)
                self._figures.answers += 1
                self._answers += 1
                self._observe(names.ENGINE_DECODE_SECONDS, now - each.first)
                self._observe(names.ENGINE_E2E_SECONDS, now - each.arrived)
        self._told.clear()

    def _observe(self, name: str, value: float) -> None:
        entry = self._sums[name]
        entry[0] += value
        entry[1] += 1

    def _count(self, tokens: int, seconds: float) -> None:
        figures, queue = self._figures, len(self._waiting)
        figures.tokens += tokens
        figures.seconds += seconds
        figures.queued += queue * seconds
        figures.longest_queue = max(figures.longest_queue, queue)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions: a stream of tokens."""
        body = await request.json()
        sequence = Running(max(1, len(body["prompt"].split())), body.get("max_tokens", 16))
        self._waiting.append(sequence)
        self._has_work.set()
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        try:
            await self._stream(sequence, answer, request)
        except ClientConnectionResetError:
            # Its client has left, which cancels this handler a moment later.
            pass
        finally:
            sequence.has_left = True
            if sequence in self._waiting:
                self._waiting.remove(sequence)
        return answer

    async def _stream(
        self, sequence: Running, answer: web.StreamResponse, request: web.Request
    ) -> None:
        is_last = await sequence.chunks.get()
        await answer.prepare(request)
        while True:
            await answer.write(b'data: {"choices":[{"index":0,"text":" a"}]}\n\n')
            if is_last:
                break
            is_last = await sequence.chunks.get()
        await answer.write(b"data: [DONE]\n\n")

    async def page(self, _request: web.Request) -> web.Response:
        """GET /metrics."""
        await self._switches.tells.wait()
        used = sum(each.computed + each.generated for each in self._running)
        lines = (
            f"{names.PROCESS_START_TIME} {self._started}",
            f"{names.ENGINE_RUNNING} {len(self._running)}",
            f"{names.ENGINE_WAITING} {len(self._waiting)}",
            f"{names.ENGINE_KV_USAGE} {min(1.0, used / KV_TOKENS)}",
            f'{names.ENGINE_CACHE_CONFIG}{{block_size="{_BLOCK}",'
            f'num_gpu_blocks="{KV_TOKENS // _BLOCK}"}} 1',
            f"{names.ENGINE_PROMPT_TOKENS} {self._prompt_tokens}",
            f"{names.ENGINE_GENERATION_TOKENS} {self._generated}",
            f'{names.ENGINE_SUCCESS}{{finished_reason="length"}} {self._answers}',
            *(f"{name}_sum {total}" for name, (total, _) in self._sums.items()),
            *(f"{name}_count {number}" for name, (_, number) in self._sums.items()),
        )
        return web.Response(text="\n".join(lines) + "\n")

    async def figures(self, _request: web.Request) -> web.Response:
        """GET /figures."""
        figures, self._figures = self._figures, Figures()
        return web.json_response(figures.__dict__)


def _toggle(event: asyncio.Event) -> None:
    event.clear() if event.is_set() else event.set()


async def serve(numbers: Sequence[int]) -> None:
    """Serve an engine on each port until cancelled."""
    switches = Switches()

    async def stall(_request: web.Request) -> web.Response:
        _toggle(switches.computes)
        return web.Response()

    async def hang(_request: web.Request) -> web.Response:
        _toggle(switches.tells)
        return web.Response()

    async with asyncio.TaskGroup() as tasks:
        for port in numbers:
            engine = PacedEngine(switches)
            tasks.create_task(engine.run())
            app = web.Application(client_max_size=1 << 26)
            app.router.add_post("/v1/completions", engine.complete)
            app.router.add_get("/metrics", engine.page)
            app.router.add_get("/figures", engine.figures)
            app.router.add_post("/stall", stall)
            app.router.add_post("/hang", hang)
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
        print(json.dumps({"ready": True}), flush=True)


if __name__ == "__main__":
    uvloop.run(serve([int(port) for port in sys.argv[1:]]))
