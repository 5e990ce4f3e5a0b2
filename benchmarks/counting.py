"""Scripted engines whose streams tell whether they are whole, and what stands before two of them.

    python -m benchmarks.counting HOST PORT        an engine by itself; SIGUSR1: its core hangs
    process = await start_engine(host, port)       the same as a process, once it serves

A token comes every `INTERVAL` or `--interval`, the first one after `prefill_seconds`, as on an
accelerator that has nothing else to do. The engines compute nothing: real ones take longer for a
prompt, the more of them come at a time. `drain` and `outages` measure with them, and
`tests/chaos/test_streams.py` kills them.
"""

import asyncio
import itertools
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final

import aiohttp
import click
import yaml
from tests.router.processes import router
from tests.sidecar.peers import FakeDecode, Turn
from tests.sidecar.processes import sidecar
from tests.sidecar.resume.events import DONE, event

from tandem_contract import headers
from tandem_contract.commandline import HostPort
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import Plan, Target, load_keys, sign

INTERVAL: Final = 0.1
"""Seconds between two tokens of a stream."""
PROMPT: Final = [7] * 500


def prefill_seconds(tokens: int) -> float:
    """How long an engine takes for a prompt."""
    return 0.05 + tokens * 1e-4


class CountingEngine(FakeDecode):
    """Counts from the last id of its prompt on."""

    def __init__(self, interval: float = INTERVAL) -> None:
        """`interval`: seconds between two tokens."""
        super().__init__(self.count)
        self._interval = interval
        self.running = 0
        self.idle = asyncio.Event()
        self.hangs = False
        """Whether its core hangs, while its server answers."""

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
        due = asyncio.get_running_loop().time() + prefill_seconds(len(prompt))
        turn.stream()
        for number in range(body["max_tokens"]):
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            if self.hangs:
                await turn.gone.wait()
            if turn.gone.is_set():
                return
            due += self._interval
            token = prompt[-1] + 1 + number
            finish = "length" if number + 1 == body["max_tokens"] else None
            ids = ([token], prompt if number == 0 else None) if asked else (None, None)
            turn.chunk(event(f"{token} ", *ids, finish=finish))
        turn.chunk(DONE)
        turn.end()


@dataclass
class Front:
    """What the clients call."""

    url: str
    request_headers: Callable[[int], dict[str, str]]
    admin: HostPort


@dataclass
class Client:
    """One stream, and when its events came."""

    tokens: int
    prompt: list[int] = field(default_factory=lambda: PROMPT)
    times: list[float] = field(default_factory=list)
    text: str = ""
    is_complete: bool = False
    error: str = ""
    """What the server said instead of an answer, or in the middle of one."""
    backend: str = ""
    """Where it began."""

    async def ask(self, http: aiohttp.ClientSession, front: Front, number: int) -> None:
        """Send the request of this number, and read the answer to its end."""
        body = {"model": "m", "prompt": self.prompt, "max_tokens": self.tokens, "stream": True}
        sent, unread = front.request_headers(number), b""
        async with http.post(front.url, json=body, headers=sent) as response:
            self.backend = response.headers.get(headers.DECODE_BACKEND, "")
            async for data in response.content.iter_any():
                *events, unread = (unread + data).split(b"\n\n")
                self.times += [time.monotonic()] * len(events)
                for each in events:
                    self._take(each.removeprefix(b"data: "))
            if response.status != HTTPStatus.OK:
                self.error = unread.decode()

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            expected = "".join(f"{self.prompt[-1] + 1 + n} " for n in range(self.tokens))
            self.is_complete = self.text == expected
        else:
            event = json.loads(data)
            self.error = self.error or event.get("error", {}).get("message", "")
            for choice in event.get("choices", ()):
                self.text += choice["text"]

    def gap(self, since: float) -> float:
        """The longest time between two events after `since`, in seconds."""
        return self._longest(since)[0]

    def gap_beyond_prefill(self, since: float) -> float:
        """The same without the time in which the next engine computes prompt and answer."""
        gap, tokens = self._longest(since)
        return gap - prefill_seconds(len(self.prompt) + tokens)

    def _longest(self, since: float) -> tuple[float, int]:
        """The longest time, and how many events came before it."""
        gaps = [
            (after - before, number)
            for number, (before, after) in enumerate(itertools.pairwise(self.times), 1)
            if after >= since
        ]
        return max(gaps, default=(0.0, 0))


@asynccontextmanager
async def sidecars(first: str, second: str, directory: Path, *flags: str) -> AsyncIterator[Front]:
    """Two pods of a decode pool, before engines with these URLs; each request names the second as
    its alternate."""
    (directory / "k1").write_bytes(b"0123456789abcdef")
    keys = load_keys(directory)
    common = ("--plan-key-dir", str(directory), "--drain-timeout", "120s", *flags)
    async with (
        sidecar("--engine", first, "--pod-name", "d-0", *common) as pod,
        sidecar("--engine", second, "--pod-name", "d-1", *common) as other,
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

        yield Front(pod.url(), plan, pod.admin)


@asynccontextmanager
async def routed(first: str, second: str, directory: Path, *flags: str) -> AsyncIterator[Front]:
    """A router before engines with these URLs, with the default health checks."""
    listed = [
        {"name": f"d-{number}", "url": engine, "role": "unified"}
        for number, engine in enumerate((first, second))
    ]
    file = directory / "router.yaml"
    checks = {"path": "/health"}
    serving = {"enabled": False}
    data = {"backends": listed, "disaggregated_serving": serving, "health_checks": checks}
    file.write_text(yaml.safe_dump(data))

    async with router(file, "--no-warm-up", *flags) as process:
        yield Front(process.url(), lambda _: {}, process.admin)


Make = Callable[..., AbstractAsyncContextManager[Front]]
"""Makes a front of two engines. Arguments: their URLs, a folder for its files, and its flags."""


def open_session() -> aiohttp.ClientSession:
    """A session for any number of long streams."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )


async def start_engine(
    host: str, port: int, *within: str, interval: float = INTERVAL
) -> asyncio.subprocess.Process:
    """Start an engine; returns when it accepts connections. `within`: words before its command.
    Raises RuntimeError if it ends instead."""
    command = (*within, sys.executable, "-m", "benchmarks.counting", host, str(port))
    process = await asyncio.create_subprocess_exec(
        *command, "--interval", str(interval), stdout=asyncio.subprocess.PIPE
    )
    if process.stdout is None or not await asyncio.wait_for(process.stdout.readline(), 60):
        raise RuntimeError(f"an engine at {host}:{port} ended: see its message above")
    return process


async def serve(host: str, port: int, interval: float) -> None:
    """Be an engine until the process ends."""
    engine = CountingEngine(interval)
    engine.host, engine.port = host, port

    def hang() -> None:
        engine.hangs = True

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, hang)
    async with engine:
        click.echo("serves")
        await asyncio.Event().wait()


@click.command()
@click.argument("host")
@click.argument("port", type=int)
@click.option("--interval", default=INTERVAL, show_default=True, help="seconds between two tokens")
def main(host: str, port: int, interval: float) -> None:
    """Serve as an engine at HOST and PORT."""
    asyncio.run(serve(host, port, interval))


if __name__ == "__main__":
    main()
