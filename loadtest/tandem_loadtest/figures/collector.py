"""Collects the records of a run as they arrive and makes its `Repeat`.

    collector = Collector(slo)
    for record in records:
        collector.add(record)
    repeat = collector.repeat(started=…, seconds=…, read_lag=…, cpu_share=…)

Values of a request are kept exactly, gaps in histograms: a request takes about 150 bytes.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import Final

import msgspec

from ..records import Outcome, Record
from .distributions import Delay, invalid_reason, of_histogram, of_values
from .groups import Group, merge
from .histogram import Histogram
from .model import (
    OTHERS,
    UNROUTED,
    Distribution,
    Event,
    Failure,
    Figures,
    Generator,
    Rates,
    Repeat,
    ServerMetrics,
    Slo,
    Stall,
    Timeline,
)
from .timeline import Moments, timeline

MOST_FAILURES: Final = 20
"""Reasons listed in a report; a further entry counts the rest."""
_MOST_REASONS: Final = 1000
"""Different reasons kept until then: reasons may contain text of the server."""
BUSY: Final = 0.9
"""CPU share from which on a worker process is likely to slow the measurement."""


class Collector:
    """Everything that is kept of the records of a run. Times in seconds after its start."""

    def __init__(self, slo: Slo | None = None) -> None:
        self._slo = slo
        self._groups: dict[tuple[str, str, str, str], Group] = {}
        """Routing path, prefill backend, decode backend, model → its requests."""
        self._intended = array("d")
        self._lateness = array("d")
        self._sent = array("d")
        self._ended = array("d")
        """Of requests that were sent."""
        self._failures: Counter[tuple[Outcome, str]] = Counter()
        self._other_failures = 0
        self._resent = 0
        self._stall: Stall | None = None

    def add(self, record: Record) -> None:
        """Add a record; in any order."""
        key = (record.path, record.prefill_backend, record.decode_backend, record.model)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group()
        group.add(record, self._slo)
        self._add_times(record)
        self._resent += record.resent
        if record.outcome is not Outcome.OK:
            self._add_failure(record)
        stall = longer_stall(record, self._stall.seconds if self._stall else 0.0)
        if stall is not None:
            self._stall = stall

    def _add_times(self, record: Record) -> None:
        self._intended.append(record.intended)
        if record.started is not None:
            # Two clock readings of a sender that is on time may be equal, never in reverse;
            # those of an intended time computed by addition may differ in the last bit.
            self._lateness.append(max(0.0, record.started - record.intended))
        if record.sent is not None:
            self._sent.append(record.sent)
            if record.ended is not None:
                self._ended.append(record.ended)

    def _add_failure(self, record: Record) -> None:
        reason = (record.outcome, record.error)
        if reason in self._failures or len(self._failures) < _MOST_REASONS:
            self._failures[reason] += 1
        else:
            self._other_failures += 1

    def repeat(
        self,
        *,
        started: str,
        seconds: float,
        stopped_at: float | None = None,
        read_lag: Histogram,
        cpu_share: Sequence[float],
        warnings: Sequence[str] = (),
        events: Sequence[Event] = (),
        server: Sequence[ServerMetrics] = (),
    ) -> Repeat:
        """Figures of all records so far; arguments as in `Repeat` and `Generator`.

        `stopped_at`: seconds after the start when the run was stopped early. `read_lag` and
        `cpu_share` are of all worker processes. The collector stays as it is.
        Raises ValueError when `seconds` is not positive.
        """
        if seconds <= 0:
            raise ValueError(f"a run of {seconds} seconds has no rates")
        generator = self._generator(read_lag, cpu_share, warnings)
        delay = Delay(_p99(generator.lateness), _p99(generator.read_lag))
        everything = merge(self._groups.values())
        paths, prefill, decode, models = (self._merged(part) for part in range(4))

        def figures(groups: dict[str, Group]) -> dict[str, Figures]:
            return {name: group.figures(self._slo, delay) for name, group in groups.items()}

        rates = _rates(everything, seconds, stopped_at, self._slo)
        return Repeat(
            started=started,
            seconds=seconds,
            stopped=stopped_at is not None,
            all=everything.figures(self._slo, delay),
            rates=msgspec.structs.replace(rates, invalid=_invalid_slo(delay, self._slo)),
            paths=figures(paths),
            prefill_backends=figures(prefill),
            decode_backends=figures(decode),
            models=figures(models) if len(models) > 1 else {},
            failures=self._failure_list(),
            timeline=self._timeline(
                self._end(everything, seconds, is_stopped=stopped_at is not None),
                everything,
                paths,
                decode,
            ),
            generator=generator,
            events=list(events),
            stall=self._stall,
            server=list(server),
        )

    def _generator(
        self, read_lag: Histogram, cpu_share: Sequence[float], warnings: Sequence[str]
    ) -> Generator:
        return Generator(
            lateness=of_values(self._lateness),
            read_lag=of_histogram(read_lag),
            cpu_share=list(cpu_share),
            resent=self._resent,
            warnings=[*warnings, *_cpu_warnings(cpu_share), *_resent_warnings(self._resent)],
        )

    def _timeline(
        self, end: float, everything: Group, paths: dict[str, Group], backends: dict[str, Group]
    ) -> Timeline:
        moments = Moments(
            end=end,
            intended=self._intended,
            sent=self._sent,
            ended=self._ended,
            ttft_intended=everything.ttft_intended,
            ttft=everything.ttft,
            losses=everything.losses,
            paths={name: group.ended for name, group in paths.items()},
            backends={name: group.ended for name, group in backends.items()},
        )
        return timeline(moments, everything.gaps)

    def _merged(self, part: int) -> dict[str, Group]:
        """Groups by one part of their key, in alphabetical order.

        Only the routing path has a name for requests without it.
        """
        members: dict[str, list[Group]] = {}
        for key, group in self._groups.items():
            name = key[part] or (UNROUTED if part == 0 else "")
            if name:
                members.setdefault(name, []).append(group)
        return {name: merge(members[name]) for name in sorted(members)}

    def _end(self, everything: Group, seconds: float, *, is_stopped: bool) -> float:
        """The end of the timeline."""
        end = max(seconds, max(everything.ended, default=0.0))
        # After the last answer of a run that was not stopped, requests may have gone unsent.
        return end if is_stopped else max(end, max(self._intended, default=0.0))

    def _failure_list(self) -> list[Failure]:
        listed = [
            Failure(outcome=str(outcome), reason=reason, count=count)
            for (outcome, reason), count in self._failures.most_common(MOST_FAILURES)
        ]
        others = self._failures.total() + self._other_failures - sum(f.count for f in listed)
        if others:
            listed.append(Failure(outcome=OTHERS, reason="less frequent reasons", count=others))
        return listed


def _p99(distribution: Distribution | None) -> float:
    return distribution.percentiles["99"] if distribution else 0.0


def _rates(everything: Group, seconds: float, stopped_at: float | None, slo: Slo | None) -> Rates:
    unsent = everything.losses.get(Outcome.UNSENT, ())
    end = inf if stopped_at is None else stopped_at
    due = everything.requests - sum(intended > end for intended in unsent)
    return Rates(
        due=due,
        lost=due - everything.complete,
        scheduled=due / seconds,
        requests=everything.complete / seconds,
        output_tokens=everything.output_tokens / seconds,
        total_tokens=(everything.prompt_tokens + everything.output_tokens) / seconds,
        goodput=everything.within_slo / seconds if slo else None,
        attainment=everything.within_slo / due if slo and due else None,
    )


def _invalid_slo(delay: Delay, slo: Slo | None) -> str | None:
    """Why the load generator was too late to judge the SLO; None if it was not."""
    if slo is None:
        return None
    limits = (("TTFT", slo.ttft, True), ("ITL", slo.itl, False), ("E2E", slo.e2e, True))
    reasons = (
        invalid_reason(
            limit, delay, from_intended=from_intended, scale_name=f"the SLO's limit of {name}"
        )
        for name, limit, from_intended in limits
        if limit is not None
    )
    return next((reason for reason in reasons if reason), None)


def _resent_warnings(resent: int) -> list[str]:
    if not resent:
        return []
    return [
        f"{resent} requests were sent again because their kept-alive connection had been closed by "
        "the server"
    ]


def _cpu_warnings(cpu_share: Sequence[float]) -> list[str]:
    busy = [share for share in cpu_share if share >= BUSY]
    if not busy:
        return []
    return [
        f"{len(busy)} of {len(cpu_share)} worker processes used {max(busy):.0%} of a CPU core: "
        "the load generator may be the bottleneck; raise --processes"
    ]


def longer_stall(record: Record, than: float) -> Stall | None:
    """The longest wait of a request's client if it is longer than `than` seconds, else None.

    A client waits from the time sent to the first token, between tokens, and from the last token to
    the end. An answer that is not streamed, and one that was lost before its first token, is a
    single wait for it.
    """
    if record.sent is None:
        return None
    longest = None
    first, last, ended = record.first_token, record.last_token, record.ended
    received = ended if first is None else first
    if received is not None and (seconds := received - record.sent) > than:
        than = seconds
        longest = Stall(seconds=seconds, at=record.sent, phase="first token", request=record.index)
    gaps = record.gaps
    if first is not None and gaps and (seconds := max(gaps)) > than:
        than = seconds
        at = first + sum(gaps[: gaps.index(seconds)])
        longest = Stall(seconds=seconds, at=at, phase="next token", request=record.index)
    if last is not None and ended is not None and (seconds := ended - last) > than:
        longest = Stall(seconds=seconds, at=last, phase="end", request=record.index)
    return longest
