"""The parent's side of the worker processes: starts them at one instant and merges what they send.

async with Workers(spec, 3, on_record=collector.add) as workers:
    workers.start()
    measured = await workers.results(stop)
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Final, Self

import msgspec

from ..figures.histogram import Histogram
from ..records import Outcome, Record
from . import protocol
from .errors import WorkloadFailed
from .options import BenchProgress, Reference
from .protocol import Batch, Check, Checked, Ended, Job, Ready, Refused, Start, Stop, Verdict
from .spec import RunSpec
from .verification import Verification
from .worker_link import WorkerLink, unreported

LEAD: Final = 0.1
"""Seconds between the order to start and the start: enough for all workers to get it."""
PERIOD: Final = 0.1
"""Seconds between two reports of progress during the check against a reference."""


@dataclass(slots=True)
class Totals:
    """Requests of all workers so far."""

    elapsed: float = 0.0
    """Seconds since the start."""
    sent: int = 0
    in_flight: int = 0
    finished: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run gave beside its records."""

    seconds: float
    """From the start to the end of the last answer, or to the stop if that is later."""
    stopped_at: float | None
    """Seconds after the start when it was stopped early, or a worker died; None: it was not."""
    read_lag: Histogram
    cpu_share: list[float]
    peak_in_flight: int


class Workers:
    """Worker processes of one run."""

    def __init__(
        self,
        spec: RunSpec,
        processes: int,
        *,
        reference: Reference | None = None,
        on_record: Callable[[Record], None],
        on_progress: Callable[[Totals], None] = lambda _: None,
    ) -> None:
        """`on_record` gets every record once; with a reference, `ok` ones after its verdict."""
        # A process without a share of the load would send nothing.
        closed = spec.arrivals.concurrency if spec.arrivals.process == "closed" else None
        self._parts = min(processes, closed or spec.max_in_flight)
        self._spec = spec
        self._reference = reference
        self._on_record = on_record
        self._on_progress = on_progress
        self._links: list[WorkerLink] = []
        self._readers: list[asyncio.Task[None]] = []
        self._totals = Totals()
        self._verification = Verification(on_record)
        self._start = 0.0
        self._last_end = 0.0
        self._stopped_at: float | None = None
        self.warnings: list[str] = []
        """What went wrong so far."""

    async def __aenter__(self) -> Self:
        """Start the processes and wait until all have prepared their prompts.

        Raises WorkloadFailed when the workload cannot be made or a process does not start.
        """
        try:
            for part in range(self._parts):
                spec = msgspec.structs.replace(self._spec, part=part, parts=self._parts)
                self._links.append(await WorkerLink.open(Job(spec=spec, reference=self._reference)))
            self._readers = [asyncio.create_task(self._read(link)) for link in self._links]
            for link in self._links:
                await link.ready.wait()
                if link.refusal is not None:
                    raise WorkloadFailed(link.refusal)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the processes."""
        await asyncio.gather(*(link.close() for link in self._links))
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    @property
    def pids(self) -> list[int]:
        """Process ids, in the order of parts."""
        return [link.pid for link in self._links]

    def start(self) -> float:
        """Let all begin at the same instant. Returns it, on CLOCK_MONOTONIC."""
        self._start = monotonic() + LEAD
        self._tell_all(Start(at=self._start))
        return self._start

    async def results(self, stop: asyncio.Event, grace: float = 0.0) -> Measured:
        """Wait for all requests; stop early when `stop` is set, with `grace` seconds for answers.

        A worker that dies ends the run, with a warning.
        """
        stopper = asyncio.create_task(self._stop_on(stop, grace))
        for link in self._links:
            await link.done.wait()
        stopper.cancel()
        ends = [link.ended for link in self._links if link.ended]
        peak = sum(end.peak_in_flight for end in ends)
        lag = Histogram()
        for end in ends:
            lag.merge(end.lag())
        stopped_at = None
        if self._stopped_at is not None:
            # It may have been stopped before all workers began.
            stopped_at = max(0.0, self._stopped_at - self._start)
        return Measured(
            seconds=max(self._last_end, stopped_at or 0.0) or monotonic() - self._start,
            stopped_at=stopped_at,
            read_lag=lag,
            cpu_share=[end.cpu_share for end in ends],
            peak_in_flight=peak,
        )

    async def check(
        self,
        concurrency: int,
        stop: asyncio.Event,
        on_progress: Callable[[BenchProgress], None] = lambda _: None,
    ) -> None:
        """After `results`: compare the answers with the reference's, until `stop` is set."""
        stopped = asyncio.create_task(stop.wait())
        checked = asyncio.create_task(self._check_links(max(1, concurrency)))
        while not (stop.is_set() or checked.done()):
            on_progress(self._verification.progress)
            await asyncio.wait(
                {stopped, checked}, timeout=PERIOD, return_when=asyncio.FIRST_COMPLETED
            )
        stopped.cancel()
        checked.cancel()
        on_progress(self._verification.progress)
        self.warnings += self._verification.finish(stopped=stop.is_set())

    async def _check_links(self, concurrency: int) -> None:
        for link in self._links:
            if not link.checked.is_set():
                link.tell(Check(concurrency=concurrency))
                await link.checked.wait()

    async def _stop_on(self, stop: asyncio.Event, grace: float) -> None:
        await stop.wait()
        self._stop(grace)

    def _stop(self, grace: float) -> None:
        self._stopped_at = self._stopped_at or monotonic()
        self._tell_all(Stop(grace=grace))

    def _tell_all(self, message: Start | Stop) -> None:
        for link in self._links:
            link.tell(message)

    async def _read(self, link: WorkerLink) -> None:
        while (message := await protocol.read_from_worker(link.stdout)) is not None:
            match message:
                case Ready():
                    link.ready.set()
                case Refused(message=reason):
                    link.refusal = reason
                case Batch():
                    self._take(link, message)
                case Ended():
                    link.ended = message
                    link.done.set()
                case Verdict():
                    self._verification.take(message)
                case Checked():
                    link.checked.set()
        await self._handle_exit(link)

    async def _handle_exit(self, link: WorkerLink) -> None:
        """Account for what a worker leaves that ended before its run."""
        if link.ended is None and not link.closing:
            reason = await link.exit_reason()
            if not link.ready.is_set():
                link.refusal = link.refusal or f"a worker process did not start: {reason}"
            else:
                self.warnings.append(
                    f"a worker process died, so the run was stopped: {reason}; the requests that"
                    " it had not reported count as unsent"
                )
                self._totals.in_flight -= link.batch.in_flight
                self._stop(0.0)
                self._record_unreported(link)
        for event in (link.ready, link.done, link.checked):
            event.set()

    def _record_unreported(self, link: WorkerLink) -> None:
        died = monotonic() - self._start if self._start else 0.0
        for record in unreported(link, last_end=self._last_end, died=died):
            self._count(record)
            self._on_record(record)

    def _count(self, record: Record) -> None:
        self._totals.finished += 1
        self._totals.outcomes[record.outcome] += 1

    def _take(self, link: WorkerLink, batch: Batch) -> None:
        totals, before = self._totals, link.batch
        totals.elapsed = monotonic() - self._start
        totals.sent += batch.sent - before.sent
        totals.in_flight += batch.in_flight - before.in_flight
        link.batch = msgspec.structs.replace(batch, records=[])
        for record in batch.records:
            link.reported.add((record.index, record.turn))
            self._count(record)
            if record.ended is not None and record.ended > self._last_end:
                self._last_end = record.ended
            if self._reference and record.outcome is Outcome.OK:
                self._verification.hold(record)
            else:
                self._on_record(record)
        self._on_progress(totals)
