"""For how long streams stand still when their decode engine fails in the middle, with `--resume`.

    python -m benchmarks.outages [--rounds 3]       as root, for the network namespace of a node

16 streams, a token every 100 ms (`counting`), run at one engine when it

    is killed (SIGKILL), is stopped (SIGSTOP), its core hangs while its server answers `/health`, or
    its node is lost: all that is sent to it is dropped, and nothing comes back.

A stream's gap is the longest time between two of its events after that, less the time in which the
next engine computes prompt and answer. Behind a sidecar the alternate's engine goes on, behind the
router the other backend. A sidecar is lost with its node, and its streams are.
"""

import asyncio
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
from tests.namespaces import NotPermitted, namespaces

from tandem_local.ports import free_port

from .counting import INTERVAL, Client, Make, open_session, routed, sidecars, start_engine
from .figures import Figure, at_most, progress, report, without_target

STREAMS: Final = 16
TOKENS: Final = 120
BEFORE: Final = 3.0
"""Seconds from the streams' begin to the outage: in them the engine's time between tokens is
learned."""
_HOST: Final = "127.0.0.1"
_NODE: Final = "node"


@dataclass(frozen=True)
class Engine:
    """A process that serves as an engine."""

    process: asyncio.subprocess.Process
    url: str


@asynccontextmanager
async def engine(host: str, *within: str) -> AsyncIterator[Engine]:
    """An engine at `host`; `within`: words before its command."""
    port = free_port(_HOST)
    process = await start_engine(host, port, *within)
    try:
        yield Engine(process, f"http://{host}:{port}")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@dataclass(frozen=True)
class Node:
    """Where the first engine runs."""

    host: str
    within: tuple[str, ...]
    lose: Callable[[], None]


@contextmanager
def own_node() -> Iterator[Node]:
    """A node that can be lost. Raises NotPermitted."""
    with namespaces([_NODE]) as made:
        within = ("ip", "netns", "exec", made.names[_NODE])
        yield Node(made.address(_NODE), within, lambda: made.drop_all(_NODE))


@contextmanager
def this_node() -> Iterator[Node]:
    yield Node(_HOST, (), lambda: None)


@dataclass(frozen=True)
class Outage:
    """A way to fail."""

    name: str
    signal: signal.Signals | None
    """What the engine gets; None: its node is lost."""
    target: float
    """Of the gap's median, in seconds."""


OUTAGES: Final = (
    Outage("killed", signal.SIGKILL, 0.3),
    Outage("stopped", signal.SIGSTOP, 3.5),
    Outage("core hangs", signal.SIGUSR1, 3.5),
)
LOST_NODE: Final = Outage("node lost", None, 4.0)


async def gaps(outage: Outage, make: Make, streams: int) -> list[float]:
    """The gap of each stream of the engine that fails, in seconds."""
    clients = [Client(TOKENS) for _ in range(streams)]
    async with AsyncExitStack() as stack:
        node = stack.enter_context(own_node() if outage.signal is None else this_node())
        first = await stack.enter_async_context(engine(node.host, *node.within))
        second = await stack.enter_async_context(engine(_HOST))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        front = await stack.enter_async_context(make(first.url, second.url, directory, "--resume"))
        http = await stack.enter_async_context(open_session())
        asks = [client.ask(http, front, number) for number, client in enumerate(clients)]
        tasks = [asyncio.create_task(ask) for ask in asks]
        await asyncio.sleep(BEFORE)
        began = time.monotonic()
        if outage.signal is None:
            node.lose()
        else:
            first.process.send_signal(outage.signal)
        await asyncio.gather(*tasks)
    if not all(client.is_complete for client in clients):
        raise click.ClickException(f"{outage.name}: a stream is not whole")
    return [client.gap_beyond_prefill(began) for client in clients if client.backend == "d-0"]


async def measure(tier: str, make: Make, outage: Outage, rounds: int, streams: int) -> Figure:
    """All rounds of one kind of outage."""
    measured: list[float] = []
    for number in range(rounds):
        progress(f"{tier}, {outage.name}: round {number + 1} of {rounds}")
        measured += await gaps(outage, make, streams)
    name = f"{tier}, {outage.name}: gap of {len(measured)} streams beyond the prefill"
    return at_most(name, measured, "s", outage.target)


@click.command()
@click.option("--streams", default=STREAMS, show_default=True, help="at the engine that fails")
@click.option("--rounds", default=3, show_default=True)
@click.option("--json", "file", type=click.Path(path_type=Path), help="write all figures here")
def main(streams: int, rounds: int, file: Path | None) -> None:
    """Fail an engine in each way, and print for how long its streams stand still."""

    async def run() -> list[Figure]:
        figures = [without_target("between two tokens", INTERVAL, "s")]
        for outage in OUTAGES:
            figures.append(await measure("sidecar", sidecars, outage, rounds, streams))
        # The router gives each of its engines half of the streams.
        for outage in (*OUTAGES, LOST_NODE):
            try:
                figures.append(await measure("router", routed, outage, rounds, 2 * streams))
            except NotPermitted as err:
                progress(f"{outage.name}: not measured, {err}")
        return figures

    report(asyncio.run(run()), file)


if __name__ == "__main__":
    main()
