"""What a drain of a decode engine's pod does to the streams that run there, with and without
`--resume`.

64 streams of 60 s, as they come from scripted engines (`counting`): a token every 100 ms, the first
one after 50 ms and 0.1 ms for each token of the prompt. Five seconds after they began the pod
drains: its sidecar by `/drain?wait=true`, as the engine's preStop hook does, or before the router
the engine itself, which answers its checks with 503 and finishes what runs.

A stream's gap is the longest time between two of its events after the drain began, in which it
also waits for the client's share of this machine. An error is a stream without its end, or with
another text than it has without a drain.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import click
from tests.sidecar.peers import Turn
from tests.sidecar.processes import drain

from .counting import (
    INTERVAL,
    Client,
    CountingEngine,
    Front,
    Make,
    open_session,
    routed,
    sidecars,
)
from .figures import Figure, at_most, progress, report, without_target

STREAMS: Final = 64
SECONDS: Final = 60.0
BEFORE: Final = 5.0
"""Seconds from the streams' begin to the drain."""
IDLE_TARGET, GAP_TARGET = 10, 500
"""Seconds, and milliseconds."""


Drains = Callable[[Front, CountingEngine], Coroutine[None, None, object]]
"""Drains the first engine's pod; it ends when who waits for the drain may go on."""


async def drain_pod(front: Front, _first: CountingEngine) -> None:
    """As the preStop hook of the engine does."""
    await drain(front.admin, wait=True)


async def drain_engine(_front: Front, first: CountingEngine) -> None:
    """As an engine does after SIGTERM."""
    first.health = not_serving
    await first.idle.wait()


async def not_serving(turn: Turn) -> None:
    turn.answer(503, b"shutting down")


async def measure(
    name: str, make: Make, drains: Drains, *flags: str, streams: int, seconds: float
) -> list[Figure]:
    """Drain once."""
    progress(name)
    clients = [Client(int(seconds / INTERVAL)) for _ in range(streams)]
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(CountingEngine()) for _ in range(2)]
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        front = await stack.enter_async_context(make(first.url, second.url, directory, *flags))
        http = await stack.enter_async_context(open_session())
        asks = [client.ask(http, front, number) for number, client in enumerate(clients)]
        tasks = [asyncio.create_task(ask) for ask in asks]
        await asyncio.sleep(BEFORE)
        began, hook = time.monotonic(), asyncio.create_task(drains(front, first))
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
        cases = (
            ("sidecar", sidecars, drain_pod, streams),
            ("router", routed, drain_engine, 2 * streams),
        )
        for name, make, drains, count in cases:
            for flags in ((), ("--resume",)):
                label = " ".join((name, *flags))
                figures += await measure(
                    label, make, drains, *flags, streams=count, seconds=seconds
                )
        return figures

    report(asyncio.run(run()), file)


if __name__ == "__main__":
    main()
