"""A worker process: `python -m tandem_loadtest.run.worker`, started by `workers`.

It reads its job from stdin and writes what it measures to stdout; `protocol` has the messages. It
ends when the run has ended, or when its parent has: at the end of stdin.
"""

import asyncio
import gc
import sys
from collections import deque
from typing import Final

import uvloop

from ..calls import Result
from ..records import Outcome, Record
from ..workload.settings import WorkloadError
from . import protocol
from .load import client_of, has_known_end, reference_client, sessions_of, share_of, writer_of
from .look_ahead import MOST_SECONDS, LookAhead
from .options import Reference
from .protocol import Batch, Check, Checked, Ended, FromWorker, Job, Ready, Refused, Start, Stop
from .reference_check import Answered, check_answers
from .self_watch import SelfWatch
from .sender import Sender
from .timers import Timers
from .turns import TurnSender

BATCH: Final = 0.1
"""Seconds between two batches: rare enough to cost nothing, often enough for a live display."""
LINE_LIMIT: Final = 64 << 20
"""Longest line from the parent, in bytes: a job with a large `extra_body`."""


async def main() -> None:
    """Do the job that stdin has."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_LIMIT)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    # Not print: a write that blocks would stop the clock of all requests in flight.
    output, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, sys.stdout)
    job = await protocol.read_from_parent(reader)
    if not isinstance(job, Job):
        return
    with Timers() as timers:
        try:
            worker = _Worker(job, timers, output)
        except (WorkloadError, OSError) as err:
            output.write(protocol.to_parent(Refused(message=str(err))))
            output.close()
            return
        await worker.run(reader)
    output.close()


class _Worker:
    """One run of one worker process."""

    def __init__(self, job: Job, timers: Timers, output: asyncio.WriteTransport) -> None:
        """Prepare the first prompts. Raises WorkloadError, or OSError for a file."""
        spec = job.spec
        self._target = spec.target
        self._reference = job.reference
        self._timers = timers
        self._output = output
        self._records: list[Record] = []
        self._answered: deque[Answered] = deque()
        """Answers to compare with the reference's."""
        self._client = client_of(spec.target, token_ids=job.reference is not None)
        writer = writer_of(spec)
        self._ahead = LookAhead(sessions_of(spec, writer), writer.call, timers)
        concurrency = spec.arrivals.concurrency if spec.arrivals.process == "closed" else None
        self._turns = TurnSender(
            send=self._client.send,
            write=writer.call,
            clock=timers,
            on_record=self._take,
            model=spec.target.model,
            max_in_flight=share_of(spec.max_in_flight, spec) if concurrency is None else None,
        )
        self._sender = Sender(
            self._ahead,
            self._turns,
            concurrency=None if concurrency is None else share_of(concurrency, spec),
            duration=spec.duration,
            has_known_end=has_known_end(spec),
        )
        self._ahead.fill(MOST_SECONDS)

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Send, report, and compare with the reference if the parent asks for it."""
        _quiet_collector()
        self._send_parent(Ready())
        start = await protocol.read_from_parent(reader)
        if not isinstance(start, Start):
            return
        self._turns.start = start.at
        async with self._client, asyncio.TaskGroup() as group:
            measuring = group.create_task(self._measure(start.at))
            tasks = [measuring]
            while (message := await protocol.read_from_parent(reader)) is not None:
                match message:
                    case Stop(grace=grace):
                        self._sender.stop(grace)
                    case Check(concurrency=concurrency) if self._reference:
                        checking = self._check(self._reference, measuring, concurrency)
                        tasks.append(group.create_task(checking))
            # The parent has what it needs, or has gone.
            for task in tasks:
                task.cancel()

    async def _check(
        self, reference: Reference, measuring: asyncio.Task[None], concurrency: int
    ) -> None:
        await measuring
        async with reference_client(reference, self._target) as client:
            await check_answers(client.send, self._answered, concurrency, self._send_parent)
        self._send_parent(Checked())

    async def _measure(self, start: float) -> None:
        watch = SelfWatch(self._timers)
        await self._timers.sleep_until(start)
        watch.start()
        batches = asyncio.create_task(self._send_batches())
        await self._sender.run()
        cpu_share = watch.stop()
        batches.cancel()
        self._send_batch()
        lag = watch.read_lag
        self._send_parent(
            Ended(
                read_lag=lag.counts,
                lag_total=lag.total,
                lag_minimum=lag.minimum if lag.count else 0.0,
                lag_maximum=lag.maximum if lag.count else 0.0,
                cpu_share=cpu_share,
                peak_in_flight=self._turns.counts.peak,
            )
        )

    async def _send_batches(self) -> None:
        while True:
            await asyncio.sleep(BATCH)
            self._send_batch()

    def _send_batch(self) -> None:
        counts = self._turns.counts
        records, self._records = self._records, []
        self._send_parent(
            Batch(
                records=records,
                begun=counts.begun,
                sent=counts.sent,
                in_flight=counts.in_flight,
            )
        )

    def _send_parent(self, message: FromWorker) -> None:
        self._output.write(protocol.to_parent(message))

    def _take(self, record: Record, result: Result | None) -> None:
        self._records.append(record)
        if self._reference and result is not None and record.outcome is Outcome.OK:
            self._answered.append(Answered(record.index, record.turn, result.call, result.answer))


def _quiet_collector() -> None:
    """Keep Python's garbage collector from pausing the event loop.

    What exists now lives to the end, so that no collection need look at it. Requests that end are
    freed by their reference counts; only failures leave cycles, which the rare collections free.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 1000)


if __name__ == "__main__":
    uvloop.run(main())
