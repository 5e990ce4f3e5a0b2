"""Sends a few sessions before the first repeat, which count nowhere.

They let the server finish what it does once (compile, load an adapter, open connections), tell what
its answers report, and calibrate prompts.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import msgspec

from ..calls import Result
from ..records import Outcome, Record
from ..workload.calibration import Sample, calibrated
from ..workload.sessions import Session
from ..workload.settings import Arrivals, Prompts
from .load import client_of, sessions_of, writer_of
from .look_ahead import LookAhead
from .sender import Sender
from .spec import RunSpec
from .timers import Timers
from .turns import TurnSender

SEED_DISTANCE = 1_000_003
"""Added to the run's seed: prompts of the warm-up are not those of a repeat."""


async def warm_up(
    spec: RunSpec, count: int, *, on_record: Callable[[Record], None], stop: asyncio.Event
) -> tuple[Prompts, list[str]]:
    """Send the first turns of `count` sessions: half of them one at a time, then the others at once
    (in closed loop, as many as the run's concurrency).

    Returns the prompts' settings, calibrated, and warnings. Raises
    WorkloadError or OSError when the workload cannot be made.
    """
    closed = Arrivals(process="closed", concurrency=1)
    spec = msgspec.structs.replace(
        spec, seed=spec.seed + SEED_DISTANCE, limit=count, duration=None, arrivals=closed
    )
    writer = writer_of(spec)
    samples: list[Sample] = []
    answered = 0

    def take(record: Record, result: Result | None) -> None:
        nonlocal answered
        on_record(record)
        if result is None or record.outcome is not Outcome.OK:
            return
        answered += 1
        if record.prompt_tokens:
            samples.append((*writer.size(result.call), record.prompt_tokens))

    sessions = [_first_turn(session) for session in sessions_of(spec, writer)]
    half = (len(sessions) + 1) // 2
    with Timers() as timers:
        async with client_of(spec.target, token_ids=False) as client:
            for part, concurrency in ((sessions[:half], 1), (sessions[half:], count)):
                turns = TurnSender(client.send, writer.call, timers, take, spec.target.model)
                turns.start = timers.now()
                ahead = LookAhead(part, writer.call, timers)
                sender = Sender(ahead, turns, concurrency=concurrency)
                await _run(sender, stop)
    return _calibrated(spec.prompts, samples, answered)


def _first_turn(session: Session) -> Session:
    """The session without its later turns, and without a think time before it."""
    return replace(session, turns=(replace(session.turns[0], think=0.0),))


async def _run(sender: Sender, stop: asyncio.Event) -> None:
    running = asyncio.create_task(sender.run())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        sender.stop(0.0)
    stopping.cancel()
    await running


def _calibrated(
    prompts: Prompts, samples: list[Sample], answered: int
) -> tuple[Prompts, list[str]]:
    if answered and not samples:
        return prompts, ["the server reports no usage: there are no token counts and no TPOT"]
    try:
        return calibrated(prompts, samples), []
    except ValueError as err:
        return prompts, [f"prompts are not calibrated, so that their lengths are estimates: {err}"]
