"""Time until a prefill engine's KV blocks are free again after clients left.

Clients leave at one of three moments: during the prefill, between the prefill's answer and the
decode engine's first token, or while the answer is streamed. Two reference engines with pulled KV
(NIXL), after one request that makes their connection. The model has random weights, 8 layers,
a hidden size of 512, float32, on CPU.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Final

import aiohttp
import click

from tandem_contract import endpoints, headers, metrics
from tandem_engine.tiny import make_tiny_model
from tandem_local.ports import free_port

from .figures import Figure, at_least, at_most, progress, report
from .handoff import VOCAB, prompt
from .peers import engine
from .proxies import server

PROMPT: Final = 600
CLIENTS: Final = 4
MOMENTS: Final = ("prefilling", "decoding", "answering")
"""The phases that the sidecar's `/state` shows at these moments."""
LIMIT: Final = 120.0
"""Seconds after which blocks count as never freed; their lease expires long before."""
_FLAGS: Final = ("--max-model-len", "2048", "--num-gpu-blocks-override", "2048")
_HOST: Final = "127.0.0.1"


@dataclass
class Setup:
    """A prefill and a decode engine behind a sidecar."""

    session: aiohttp.ClientSession
    prefill: str
    sidecar: str
    admin: str

    async def phase(self, request_id: str) -> str | None:
        """The phase of a request; None before it arrives and after it has ended."""
        async with self.session.get(self.admin + endpoints.STATE) as answer:
            running = (await answer.json())["in_flight"]
        # A running release has its request's id, too.
        phases = [work["phase"] for work in running if work["request_id"] == request_id]
        return next((phase for phase in phases if phase in MOMENTS), None)

    async def busy(self) -> bool:
        """Whether the prefill engine has KV blocks in use or held for a reader."""
        async with self.session.get(self.prefill + endpoints.METRICS) as answer:
            page = await answer.text()
        watched = (metrics.ENGINE_KV_USAGE, metrics.ENGINE_HELD)
        return any(
            float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(watched)
        )

    def ask(self, rng: random.Random, request_id: str) -> "aiohttp.client._RequestContextManager":
        """Request a streamed completion of a new random prompt."""
        body = {
            "model": "bench", "prompt": prompt(rng, PROMPT), "max_tokens": 256, "temperature": 0,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        routing = {
            headers.PREFILLER_HOST_PORT: self.prefill.removeprefix("http://"),
            headers.REQUEST_ID: request_id,
        }
        return self.session.post(f"{self.sidecar}/v1/completions", json=body, headers=routing)


async def leave(setup: Setup, rng: random.Random, request_id: str, moment: str) -> str | None:
    """Send a request and close its connection at `moment`, or at a later one. The actual moment."""
    answered = asyncio.Event()

    async def client() -> None:
        async with setup.ask(rng, request_id) as response:
            # The first bytes of the answer have come: from here on the moment is "answering".
            await response.content.readany()
            answered.set()
            await response.read()

    task = asyncio.create_task(client())
    phase = None
    while not answered.is_set() and not task.done():
        phase = await setup.phase(request_id)
        # Polling may miss a short phase: a later one counts too, and the figures show which.
        if phase is not None and MOMENTS.index(phase) >= MOMENTS.index(moment):
            break
    task.cancel()
    # Waits for the cancelled client without raising what it raised.
    await asyncio.wait([task])
    return "answering" if answered.is_set() else phase


async def leave_all(setup: Setup, count: int) -> Counter[str]:
    """Have `count` clients leave, `CLIENTS` at a time. The number that left at each moment."""
    rng, departures = random.Random(1), Counter[str]()
    moments = enumerate(islice(cycle(MOMENTS), count))

    async def clients(moments: Iterator[tuple[int, str]]) -> None:
        for index, moment in moments:
            at = await leave(setup, rng, f"left-{index}", moment)
            departures[at or "too early"] += 1

    await asyncio.gather(*(clients(moments) for _ in range(CLIENTS)))
    return departures


async def seconds_until_free(setup: Setup) -> float:
    """Seconds from now until all blocks are free, at most LIMIT."""
    start = time.perf_counter()
    # Without a pause: the time between two scrapes is the error of the figure.
    while await setup.busy() and time.perf_counter() - start < LIMIT:
        pass
    return time.perf_counter() - start


async def measure(count: int, scratch: Path) -> list[Figure]:
    """The time until all blocks are free, and how many clients left at the rarest moment."""
    async with running(scratch) as setup:
        # The first hand-off opens connections and reserves memory.
        async with setup.ask(random.Random(2), "warm") as response:
            await response.read()
        progress(f"{count} clients leave")
        left = await leave_all(setup, count)
        took = await seconds_until_free(setup)
    progress(", ".join(f"{n} {moment}" for moment, n in sorted(left.items())))
    fewest = min(left[moment] for moment in MOMENTS)
    return [
        at_most(f"all blocks free after {count} clients left", took, "s", 2),
        at_least("clients that left at the rarest moment", fewest, "of all", count // 10),
    ]


@asynccontextmanager
async def running(scratch: Path) -> AsyncIterator[Setup]:
    """Start two engines and a sidecar; end them afterwards."""
    make_tiny_model(scratch, vocab=VOCAB, layers=8, hidden=512, heads=8, kv_heads=2)
    port, admin = free_port(_HOST), free_port(_HOST)
    async with (
        engine(scratch, *_FLAGS, kv_role="kv_producer") as prefill,
        engine(scratch, *_FLAGS, kv_role="kv_consumer") as decode,
        server(
            "tandem-sidecar",
            port,
            (
                str(Path(sys.executable).with_name("tandem-sidecar")),
                *("--listen", f"{_HOST}:{port}", "--admin", f"{_HOST}:{admin}"),
                *("--engine", decode, "--prefill-allow", f"{_HOST}/32"),
            ),
            scratch / "sidecar.log",
        ),
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session,
    ):
        yield Setup(session, prefill, f"http://{_HOST}:{port}", f"http://{_HOST}:{admin}")


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
@click.option("--clients", default=200, show_default=True, help="number of clients that leave")
def main(file: Path | None, clients: int) -> None:
    """Measure how soon KV is released when clients leave."""
    with tempfile.TemporaryDirectory() as scratch:
        figures = asyncio.run(measure(clients, Path(scratch)))
    report(figures, file)


if __name__ == "__main__":
    main()
