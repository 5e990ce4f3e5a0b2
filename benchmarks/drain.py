"""What a drain of a decode engine's pod does to the streams that run there, with and without
`--resume`.

64 streams of 60 s, as they come from scripted engines: a token every 100 ms, the first one after
50 ms and 0.1 ms for each token of the prompt. Five seconds after they began the pod drains: its
sidecar by `/drain?wait=true`, as the engine's preStop hook does, or before the router the engine
itself, which answers its checks with 503 and finishes what runs. The scripted engines compute
nothing: real ones take longer for a prompt, the more of them come at a time.

A stream's gap is the longest time between two of its events after the drain began, in which it
also waits for the client's share of this machine. An error is a stream without its end, or with
another text than it has without a drain.
"""

import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import click
import yaml
from tests.router.processes import router
from tests.sidecar.peers import FakeDecode, Turn
from tests.sidecar.processes import drain, sidecar
from tests.sidecar.resume.events import DONE, event

from tandem_contract import headers
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import Plan, Target, load_keys, sign

from .figures import Figure, at_most, progress, report, without_target

STREAMS: Final = 64
SECONDS: Final = 60.0
INTERVAL: Final = 0.1
PROMPT: Final = [7] * 500
BEFORE: Final = 5.0
"""Seconds from the streams' begin to the drain."""
IDLE_TARGET, GAP_TARGET = 10, 500
"""Seconds, and milliseconds."""


class PacedEngine(FakeDecode):
    """Counts from the last id of its prompt on."""

    def __init__(self) -> None:
        super().__init__(self.count)
        self.running = 0
        self.idle = asyncio.Event()

    async def count(self, turn: Turn) -> None:
        self.running += 1
        self.idle.clear()
        try:
            await self._count(turn)
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()

    async def _count(self, turn: Turn) -> None:
        body = turn.request.json
        prompt, asked = body["prompt"], body.get("return_token_ids")
        due = asyncio.get_running_loop().time() + 0.05 + len(prompt) * 1e-4
        turn.stream()
        for number in range(body["max_tokens"]):
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            if turn.gone.is_set():
                return
            due += INTERVAL
            token = prompt[-1] + 1 + number
            finish = "length" if number + 1 == body["max_tokens"] else None
            ids = ([token], prompt if number == 0 else None) if asked else (None, None)
            turn.chunk(event(f"{token} ", *ids, finish=finish))
        turn.chunk(DONE)
        turn.end()


@dataclass
class Client:
    """One stream, and when its events came."""

    tokens: int
    times: list[float] = field(default_factory=list)
    text: str = ""
    is_complete: bool = False
    backend: str = ""
    """Where it began."""

    async def ask(self, http: aiohttp.ClientSession, front: "Front", number: int) -> None:
        """Send the request of this number, and read the answer to its end."""
        body = {"model": "m", "prompt": PROMPT, "max_tokens": self.tokens, "stream": True}
        sent, unread = front.request_headers(number), b""
        async with http.post(front.url, json=body, headers=sent) as response:
            self.backend = response.headers.get(headers.DECODE_BACKEND, "")
            async for data in response.content.iter_any():
                *events, unread = (unread + data).split(b"\n\n")
                self.times += [time.monotonic()] * len(events)
                for each in events:
                    self._take(each.removeprefix(b"data: "))

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            expected = "".join(f"{PROMPT[-1] + 1 + n} " for n in range(self.tokens))
            self.is_complete = self.text == expected
        else:
            choices = json.loads(data).get("choices") or [{"text": "error"}]
            self.text += choices[0]["text"]

    def gap(self, since: float) -> float:
        """The longest time between two events after `since`."""
        later = [t for t in self.times if t >= since]
        before = [t for t in self.times if t < since][-1:]
        times = before + later
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


@dataclass
class Front:
    """What the clients call, and how its engine is drained."""

    url: str
    request_headers: Callable[[int], dict[str, str]]
    drains: Callable[[], "asyncio.Task[object]"]
    """The task ends when who waits for the drain may go on."""


@asynccontextmanager
async def sidecars(
    first: PacedEngine, second: PacedEngine, directory: Path, *flags: str
) -> AsyncIterator[Front]:
    """Two pods of a decode pool; each request names the second as its alternate."""
    (directory / "k1").write_bytes(b"0123456789abcdef")
    keys = load_keys(directory)
    common = ("--plan-key-dir", str(directory), "--drain-timeout", "120s", *flags)
    async with (
        sidecar("--engine", first.url, "--pod-name", "d-0", *common) as pod,
        sidecar("--engine", second.url, "--pod-name", "d-1", *common) as other,
    ):

        def plan(number: int) -> dict[str, str]:
            now, id = time.time(), f"r-{number}"
            made = Plan(
                RoutingPath.UNIFIED,
                "benchmark",
                Target("d-0", str(pod.listen)),
                request_id=id,
                expires=now + 60,
                alternates=(Target("d-1", str(other.listen)),),
            )
            return {headers.PLAN: sign(made, keys, now=now), headers.REQUEST_ID: id}

        yield Front(pod.url(), plan, lambda: asyncio.create_task(drain(pod.admin, wait=True)))


@asynccontextmanager
async def routed(
    first: PacedEngine, second: PacedEngine, directory: Path, *flags: str
) -> AsyncIterator[Front]:
    """A router of both engines, with the default health checks."""
    listed = [
        {"name": f"d-{number}", "url": engine.url, "role": "unified"}
        for number, engine in enumerate((first, second))
    ]
    file = directory / "router.yaml"
    checks = {"path": "/health"}
    serving = {"enabled": False}
    data = {"backends": listed, "disaggregated_serving": serving, "health_checks": checks}
    file.write_text(yaml.safe_dump(data))

    async def not_serving(turn: Turn) -> None:
        turn.answer(503, b"shutting down")

    async def told_to_end() -> None:
        first.health = not_serving
        await first.idle.wait()

    async with router(file, "--no-warm-up", *flags) as process:
        yield Front(process.url(), lambda _: {}, lambda: asyncio.create_task(told_to_end()))


Make = Callable[..., AbstractAsyncContextManager[Front]]
"""Makes a front of two engines. Arguments: both, a folder for its files, and its flags."""


async def measure(name: str, make: Make, *flags: str, streams: int, seconds: float) -> list[Figure]:
    """Drain once."""
    progress(name)
    clients = [Client(int(seconds / INTERVAL)) for _ in range(streams)]
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(PacedEngine()) for _ in range(2)]
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        front = await stack.enter_async_context(make(first, second, directory, *flags))
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        http = await stack.enter_async_context(session)
        asks = [client.ask(http, front, number) for number, client in enumerate(clients)]
        tasks = [asyncio.create_task(ask) for ask in asks]
        await asyncio.sleep(BEFORE)
        began, hook = time.monotonic(), front.drains()
        await first.idle.wait()
        idle = time.monotonic() - began
        await hook
        hooked = time.monotonic() - began
        await asyncio.gather(*tasks)
        ended = time.monotonic() - began
    at_first = [client for client in clients if client.backend == "d-0"]
    gaps = sorted(client.gap(began) * 1000 for client in at_first)
    p50, p99 = gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)]
    errors = sum(not client.is_complete for client in clients)
    figures = [
        without_target(f"{name}: streams at the engine", len(at_first), "streams"),
        at_most(f"{name}: errors", errors, "streams", 0),
        without_target(f"{name}: last stream ends after", ended, "s"),
        without_target(f"{name}: gap, p50", p50, "ms"),
    ]
    if "--resume" not in flags:
        return [
            *figures,
            without_target(f"{name}: gap, p99", p99, "ms"),
            without_target(f"{name}: engine idle after", idle, "s"),
        ]
    return [
        *figures,
        at_most(f"{name}: gap, p99", p99, "ms", GAP_TARGET),
        at_most(f"{name}: engine idle after", idle, "s", IDLE_TARGET),
        at_most(f"{name}: engine may end after", hooked, "s", IDLE_TARGET),
    ]


@click.command()
@click.option("--streams", default=STREAMS)
@click.option("--seconds", default=SECONDS, help="length of each stream")
@click.option("--json", "file", type=click.Path(path_type=Path), help="write all figures here")
def main(streams: int, seconds: float, file: Path | None) -> None:
    """Drain a pod that streams, and print what its streams and its engine do."""

    async def run() -> list[Figure]:
        figures: list[Figure] = []
        # The router gives each of its engines half of the streams.
        for name, make, count in (("sidecar", sidecars, streams), ("router", routed, 2 * streams)):
            for flags in ((), ("--resume",)):
                label = " ".join((name, *flags))
                figures += await measure(label, make, *flags, streams=count, seconds=seconds)
        return figures

    report(asyncio.run(run()), file)


if __name__ == "__main__":
    main()
