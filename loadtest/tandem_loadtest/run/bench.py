"""A whole benchmark: `report = await run_bench(options, on_progress, stop)`.

The order: check the options and that the server is ready, warm up, search for the highest rate if
asked, then the repeats. Errors: `errors` (all are `BenchError`).
"""

import asyncio
import os
import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from time import monotonic

import msgspec

from ..client import SettingsError
from ..figures.collector import Collector
from ..figures.intervals import build_report
from ..figures.model import Event, Repeat, Report, SearchStep, ServerMetrics
from ..records import COMPLETE, Outcome, Record
from ..workload.settings import WorkloadError
from .errors import BenchError, OptionsError, WorkloadFailed
from .events import Commands
from .load import client_of, due_sessions, reference_client, sessions_of, writer_of
from .options import BenchOptions, BenchProgress, check_options
from .readiness import check_ready
from .search import highest_rate, lowest_rate, next_rate, search_warnings, step_of
from .server_metrics import MetricsWatch
from .spec import Load, RunSpec, Target
from .warm_up import warm_up
from .workers import Measured, Totals, Workers

__all__ = ["BenchError", "run_bench"]

OnProgress = Callable[[BenchProgress], None]


async def run_bench(options: BenchOptions, on_progress: OnProgress, stop: asyncio.Event) -> Report:
    """Run the benchmark. `on_progress` is called some ten times per second and process.

    When `stop` is set, the run ends and the report has what was measured so far. After a stop
    during the search, its only repeat has no request that was sent.

    Raises BenchError when nothing can be measured: for options that do not fit together, a workload
    that cannot be made, a server that is not ready, or a stop before the first request.
    """
    check_options(options)
    return await _Bench(options, on_progress, stop).run()


@dataclass(frozen=True, slots=True)
class _Observed:
    """What a run gave beside its records."""

    started: str
    """Time of day."""
    measured: Measured
    events: list[Event]
    server: list[ServerMetrics]
    warnings: list[str]
    """Of the commands and of the metrics pages."""


class _Bench:
    def __init__(self, options: BenchOptions, on_progress: OnProgress, stop: asyncio.Event) -> None:
        self._options = options
        self._on_progress = on_progress
        self._stop = stop
        self._warnings: list[str] = []
        """Of the whole benchmark; every repeat has them."""
        self._steps: list[SearchStep] = []
        load = {name: getattr(options, name) for name in Load.__struct_fields__}
        self._spec = RunSpec(**load)

    async def run(self) -> Report:
        options = self._options
        self._check_workload()
        await self._check_servers()
        await self._warm_up()
        await self._search()
        if self._stop.is_set() and not self._steps:
            raise BenchError("the run was stopped before its first request: nothing was measured")
        repeats: list[Repeat] = []
        while not repeats or (len(repeats) < options.repeats and not self._stop.is_set()):
            repeats.append(await self._repeat(len(repeats)))
        report = build_report(
            repeats,
            tandem_version=tandem_version(),
            machine=machine(),
            url=options.target.url,
            model=options.target.model,
            endpoint=options.target.endpoint.value,
            workload=parameters(self._spec),
            processes=options.processes,
            gpus=options.gpus,
            slo=options.slo,
        )
        return msgspec.structs.replace(report, search=self._steps)

    def _check_workload(self) -> None:
        """Find errors before any request is sent, and in this process."""
        try:
            sessions_of(self._spec, writer_of(self._spec))
            client_of(self._spec.target, token_ids=False)
            if self._options.reference:
                reference_client(self._options.reference, self._spec.target)
        except (WorkloadError, SettingsError, OSError) as err:
            raise WorkloadFailed(str(err)) from err

    async def _check_servers(self) -> None:
        options, target = self._options, self._options.target
        self._on_progress(BenchProgress(phase="checking"))
        models = options.workload.models or [target.model]
        await check_ready(target, models, wait=options.wait, stop=self._stop)
        if reference := options.reference:
            server = Target(
                url=reference.url,
                model=reference.model or target.model,
                headers=reference.headers,
                ca_file=reference.ca_file,
            )
            await check_ready(server, [server.model], wait=options.wait, stop=self._stop)

    async def _warm_up(self) -> None:
        if not self._options.warm_up:
            return
        outcomes: Counter[Outcome] = Counter()
        reasons: Counter[str] = Counter()
        begun = monotonic()

        def take(record: Record) -> None:
            outcomes[record.outcome] += 1
            if record.outcome not in COMPLETE:
                reasons[record.error] += 1
            count = outcomes.total()
            totals = Totals(sent=count, finished=count, outcomes=outcomes)
            totals.elapsed = monotonic() - begun
            self._show(BenchProgress(phase="warm-up"), totals)

        prompts, warnings = await warm_up(
            self._spec, self._options.warm_up, on_record=take, stop=self._stop
        )
        self._warnings += warnings
        for reason, count in reasons.most_common(1):
            self._warnings.append(
                f"{reasons.total()} of {outcomes.total()} requests of the warm-up were lost,"
                f" {count} of them: {reason}"
            )
        self._spec = msgspec.structs.replace(self._spec, prompts=prompts)

    async def _search(self) -> None:
        """Find the rate of the repeats."""
        search, first = self._options.search, self._options.arrivals.rate
        if search is None or first is None:
            return
        lowest = lowest_rate(self._options.duration or first)
        while (
            rate := next_rate(self._steps, first=first, search=search, lowest=lowest)
        ) is not None:
            step = await self._search_step(rate)
            if step is None:
                self._warnings.append("the search was stopped before its end")
                break
            self._steps.append(step)
        else:
            self._warnings += search_warnings(self._steps, search)
        rate = highest_rate(self._steps, search)
        if rate is None:
            rate = min((step.rate for step in self._steps), default=first)
        self._spec = self._spec_at(rate, 0)

    async def _search_step(self, rate: float) -> SearchStep | None:
        """One step of the search; None when it was stopped."""
        slo, duration, number = self._options.slo, self._options.duration, len(self._steps) + 1
        if self._stop.is_set():
            return None
        if slo is None or duration is None:
            raise OptionsError("a search needs an SLO and a duration")
        spec = self._spec_at(rate, self._options.repeats + number)
        turns: Counter[int] = Counter()
        repeat = await self._measure(
            spec,
            BenchProgress(phase="search", step=number, rate=rate),
            on_record=lambda record: turns.update((record.turn,)),
        )
        if repeat.stopped:
            # The benchmark's own warnings are among them.
            self._warnings = repeat.generator.warnings
            return None
        return step_of(
            rate,
            repeat,
            duration=duration,
            sessions=turns[0],
            due=due_sessions(spec),
        )

    def _spec_at(self, rate: float, seed: int) -> RunSpec:
        arrivals = msgspec.structs.replace(self._spec.arrivals, rate=rate)
        return msgspec.structs.replace(
            self._spec, arrivals=arrivals, seed=self._options.seed + seed
        )

    async def _repeat(self, number: int) -> Repeat:
        """The repeat of this number, from 0."""
        return await self._measure(
            msgspec.structs.replace(self._spec, seed=self._options.seed + number),
            BenchProgress(phase="repeat", step=number + 1, steps=self._options.repeats),
            is_repeat=True,
        )

    async def _measure(
        self,
        spec: RunSpec,
        progress: BenchProgress,
        *,
        is_repeat: bool = False,
        on_record: Callable[[Record], None] = lambda _: None,
    ) -> Repeat:
        """One run of the schedule; only repeats have commands, metrics pages and a reference."""
        options = self._options
        collector = Collector(options.slo)
        reference = options.reference if is_repeat else None

        def take(record: Record) -> None:
            collector.add(record)
            on_record(record)

        async with Workers(
            spec,
            options.processes,
            reference=reference,
            on_record=take,
            on_progress=lambda totals: self._show(progress, totals),
        ) as workers:
            observed = await self._observe(workers, is_repeat=is_repeat)
            measured = observed.measured
            if reference:
                await workers.check(measured.peak_in_flight, self._stop, self._on_progress)
        return collector.repeat(
            started=observed.started,
            seconds=measured.seconds,
            stopped_at=measured.stopped_at,
            read_lag=measured.read_lag,
            cpu_share=measured.cpu_share,
            warnings=[*self._warnings, *workers.warnings, *observed.warnings],
            events=observed.events,
            server=observed.server,
        )

    async def _observe(self, workers: Workers, *, is_repeat: bool) -> _Observed:
        """Let the workers send, and watch what happens meanwhile."""
        options = self._options
        commands = Commands(options.commands if is_repeat else ())
        metrics = MetricsWatch(options.metrics_urls if is_repeat else ())
        async with metrics, commands:
            started = datetime.now().astimezone().isoformat(timespec="milliseconds")
            start = workers.start()
            metrics.start(start)
            commands.start(start)
            measured = await workers.results(self._stop, options.stop_grace)
            events, warnings = await commands.stop()
            server = await metrics.stop()
        warnings += [f"{page.url} cannot be read: {page.error}" for page in server if page.error]
        return _Observed(started, measured, events, server, warnings)

    def _show(self, progress: BenchProgress, totals: Totals) -> None:
        """Report the progress of a step, which `progress` names."""
        self._on_progress(
            msgspec.structs.replace(
                progress,
                elapsed=totals.elapsed,
                scheduled=totals.finished + totals.in_flight,
                sent=totals.sent,
                in_flight=totals.in_flight,
                finished=totals.finished,
                outcomes={outcome.value: count for outcome, count in totals.outcomes.items()},
            )
        )


def parameters(spec: RunSpec) -> dict[str, str | int | float | bool | None]:
    """What determines the load; None: not set, or without effect."""
    workload, arrivals = spec.workload, spec.arrivals
    return {
        "workload": workload.preset,
        # Without its directory, which says more of the machine than of the run.
        "file": os.path.basename(workload.file) if workload.file else None,
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "shared": workload.shared,
        "long": workload.long,
        "turns": workload.turns,
        "think": workload.think,
        "models": ", ".join(f"{name}={weight:g}" for name, weight in workload.models.items()),
        "prompts": spec.prompts.style,
        "arrivals": arrivals.process,
        "rate": arrivals.rate,
        "rate_end": arrivals.rate_end,
        "burstiness": arrivals.burstiness if arrivals.process == "gamma" else None,
        "concurrency": arrivals.concurrency,
        "time_factor": arrivals.time_factor if arrivals.process == "trace" else None,
        "limit": spec.limit,
        "duration": spec.duration,
        "max_in_flight": spec.max_in_flight,
        "stream": spec.target.stream,
        "ignore_eos": spec.target.ignore_eos,
        "seed": spec.seed,
    }


def tandem_version() -> str:
    """Version of the installed package; `unknown` for a checkout that is not installed."""
    try:
        return version("tandem-llm")
    except PackageNotFoundError:
        return "unknown"


def machine() -> str:
    """System, architecture and CPUs of this machine."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
