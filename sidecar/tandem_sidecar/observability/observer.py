"""Turns the record of each request into metrics, history, a log line and spans.

RequestObserver   gets every record when its request starts and when it has ended
History           recent requests by id, for `GET /requests/ID`
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from tandem_contract.paths import ErrorPhase, RoutingPath
from tandem_contract.plan import WARM_UP
from tandem_contract.request_ids import is_attempt_of
from tandem_contract.request_kinds import RequestKind
from tandem_contract.timing import UNKNOWN
from tandem_contract.trace import MAX_SAME_ID, LegTrace, MoveTrace, SidecarTrace
from tandem_http1.messages import ResponseHead

from .logs import log_requests
from .metrics import Metrics, Sample
from .moves import MoveReport, move_reports
from .record import MAX_TEXT, PASSTHROUGH, Leg, Outcome, Phase, Record, Result

_BATCH_SECONDS: Final = 0.02
"""Seconds for which ended requests are collected before they are processed together. Longer: a
batch grows so large that its processing delays running requests noticeably."""

# Members that each request is compared with. Python 3.11 looks a member up in its class as slowly
# as it does a function call.
_UNIFIED: Final = RoutingPath.UNIFIED
_FALLBACK: Final = RoutingPath.FALLBACK
_ABANDONED: Final = Outcome.ABANDONED
_FAILED: Final = Outcome.FAILED
_RELEASE: Final = Phase.RELEASE
_PREFILL: Final = Phase.PREFILL
_ANSWERED: Final = Result.ANSWERED
_KV_TRANSFER: Final = ErrorPhase.KV_TRANSFER


class Tracer(Protocol):
    """Sends the spans of requests to a collector."""

    def on_request_start(self, record: Record) -> None:
        """Set `record.trace` if the request is to be traced."""

    def on_request_end(self, record: Record) -> None:
        """Send the request's spans."""

    def on_release_end(self, record: Record, leg: Leg) -> None:
        """Send the span of a release that ended after its request."""


class History:
    """The requests that run, and a ring of the last `limit` that ended.

    About 1.5 KB for each: names and numbers.
    """

    def __init__(self, limit: int) -> None:
        self.running: set[Record] = set()
        self._ended: deque[Record] = deque(maxlen=limit)

    def resize(self, limit: int) -> None:
        """Keep the newest `limit` ended requests from now on."""
        if limit != self._ended.maxlen:
            self._ended = deque(self._ended, maxlen=limit)

    def start(self, record: Record) -> None:
        """Add a request that runs."""
        self.running.add(record)

    def end(self, records: Sequence[Record], *, keep: Sequence[Record]) -> None:
        """Remove `records` from the running ones; remember those in `keep`."""
        self.running.difference_update(records)
        self._ended.extend(keep)

    def find(self, request_id: str) -> list[SidecarTrace]:
        """The requests with this id, newest last, at most `MAX_SAME_ID`; those included that
        another sidecar sent here, since a stream that moved may outlive the record of its first
        pod."""
        # Only people ask, so a scan per query is cheaper than an index updated per request.
        matches = [
            record
            for record in (*self._ended, *self.running)
            if record.request_id == request_id or is_attempt_of(record.request_id, request_id)
        ]
        matches.sort(key=lambda record: record.received)
        return [to_trace(record) for record in matches[-MAX_SAME_ID:]]


class RequestObserver:
    """Processes ended requests in batches, every `_BATCH_SECONDS` at most.

    One batch costs less CPU than the same work spread between requests, because code and data stay
    in the processor's caches.
    """

    def __init__(
        self, metrics: Metrics, history: History | None = None, tracer: Tracer | None = None
    ) -> None:
        self._metrics = metrics
        self._history = history or History(0)
        self._tracer = tracer
        self._ended: list[Record] = []
        """Ended requests that are not processed yet."""
        self._timer: asyncio.TimerHandle | None = None
        """Calls `catch_up`; not None exactly while `_ended` holds something."""
        metrics.add_gauge(
            "tandem_sidecar_in_flight",
            "Requests being served, by API; passthrough: requests that generate nothing.",
            self._in_flight,
            ["kind"],
        )

    def on_request_start(self, record: Record) -> None:
        """Call before the record's first leg: tracing decides here on the legs' `traceparent`."""
        self._history.start(record)
        if self._tracer is not None:
            self._tracer.on_request_start(record)

    def on_refusal(self) -> None:
        """Call for a generation that is refused before it has a record."""
        self._metrics.errors[ErrorPhase.ORCHESTRATION].inc()

    def on_answer(self, record: Record, head: ResponseHead | None) -> None:
        """Nothing: all that is counted of an answer is in the record."""

    def on_rest(self, record: Record, head: ResponseHead) -> None:
        """Likewise."""

    def on_request_end(self, record: Record) -> None:
        """Call once, when nothing but release legs of the record can still change."""
        self._ended.append(record)
        if self._timer is None:
            # The first record of a batch starts the timer; a scrape may call `catch_up` earlier.
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_BATCH_SECONDS, self.catch_up)

    def on_release_end(self, record: Record, leg: Leg) -> None:
        """Call when a release leg ended, before or after its request did."""
        if leg.result is not None:
            self._metrics.legs[_RELEASE][leg.result].inc()
        # A request that still waits for `catch_up` sends this span together with its others.
        if self._tracer is not None and record not in self._ended:
            self._tracer.on_release_end(record, leg)

    def catch_up(self) -> None:
        """Process the ended requests now: before metrics are read, and before the process exits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._ended = self._ended, []
        for record in batch:
            self._count(record)
            if self._tracer is not None:
                self._tracer.on_request_end(record)
        # GETs that are passed through are probes and scrapes, several a second: they would push
        # every other request out of the history and the log.
        notable = [r for r in batch if r.path is not None or r.method != "GET"]
        self._history.end(batch, keep=notable)
        log_requests(notable)

    def _count(self, record: Record) -> None:
        metrics = self._metrics
        metrics.outcomes.child(record.outcome).inc()
        for phase in record.errors:
            metrics.errors[phase].inc()
        if record.outcome == _ABANDONED:
            metrics.client_left.child(left_at(record)).inc()
        if record.moves or record.not_resumed:
            for report in move_reports(record):
                metrics.count_move(report)
        if record.ignored:
            metrics.ignored_candidates.inc(record.ignored)
        # Warm-up requests come from the EPP, not from a client: they are slow because they make the
        # pair's first connection, and the EPP counts them (tandem_epp_warmups_total).
        if record.path is not None and record.reason != WARM_UP:
            self._count_generation(record, record.path)

    def _in_flight(self) -> Iterable[Sample]:
        running = Counter(record.kind for record in self._history.running)
        return [((kind,), float(running[kind])) for kind in (*RequestKind, PASSTHROUGH)]

    def _count_generation(self, record: Record, path: RoutingPath) -> None:
        metrics = self._metrics
        metrics.requests[path].inc()
        if record.outcome == _FAILED:
            metrics.unserved[path].inc()
        if path is _UNIFIED:
            metrics.count_unified(record.reason)
        elif path is _FALLBACK:
            metrics.fallbacks.inc()
        if record.first_byte is not None:
            metrics.first_byte[path].observe(record.first_byte - record.received)
        if record.timing is not None:
            metrics.count_prompt(record.timing)
        previous: Leg | None = None
        for leg in record.legs:
            if leg.phase is _RELEASE:  # counted by `on_release_end`
                continue
            self._count_leg(leg)
            if previous is not None and previous.result is not None and is_retry(previous, leg):
                metrics.retried[previous.result].inc()
            previous = leg
        if _KV_TRANSFER in record.errors:
            metrics.failed_loads.inc(count_failed_loads(record))

    def _count_leg(self, leg: Leg) -> None:
        if leg.result is None or leg.ended is None:
            return
        metrics = self._metrics
        metrics.legs[leg.phase][leg.result].inc()
        if leg.result is not _ANSWERED:
            return
        seconds = leg.ended - leg.started
        if leg.phase is _PREFILL:
            metrics.prefill.child(leg.backend).observe(seconds)
            return
        metrics.decode.child(leg.backend).observe(seconds)
        if leg.streamed:
            metrics.streamed.inc()
        # `UNKNOWN` is what a head without `x-tandem-timing` is parsed to. An engine that sends the
        # header includes the transfer in it, whenever there was one.
        timing = leg.timing or UNKNOWN
        metrics.engine_reports_times = timing is not UNKNOWN
        if timing.transfer is not None:
            metrics.transfer.observe(timing.transfer)


def is_retry(previous: Leg, leg: Leg) -> bool:
    """Whether `leg` repeats what `previous` failed at: a prefill on another pod, or a decode that
    computes the prompt instead of loading its KV."""
    return previous.result is not _ANSWERED and previous.phase is leg.phase


def count_failed_loads(record: Record) -> int:
    """Decode legs that had KV to load and were answered with an error.

    The decode engine counts these failures, too.
    """
    # The legs of an attempt share its id. Concurrent ones: a load can fail before the prefill ends.
    handed_off = {leg.attempt_id for leg in record.legs if leg.phase is _PREFILL}
    return sum(
        leg.phase is Phase.DECODE and leg.result is Result.ERROR and leg.attempt_id in handed_off
        for leg in record.legs
    )


def left_at(record: Record) -> str:
    """When the client of an abandoned request left, a label value.

    `prefill`; `handover`: the prefill had ended and no engine had admitted the decode; `decode`:
    before the first byte of the answer; `answer`: after it.
    """
    if record.first_byte is not None:
        return "answer"
    legs = [leg for leg in record.legs if leg.phase is not _RELEASE]
    is_prefill = not legs or legs[-1].phase is _PREFILL
    if is_prefill and (not legs or legs[-1].result is not _ANSWERED):
        return "prefill"
    is_admitted = not is_prefill and legs[-1].status is not None
    has_prefill = any(leg.phase is _PREFILL for leg in legs)
    return "handover" if has_prefill and not is_admitted else "decode"


def to_trace(record: Record) -> SidecarTrace:
    """The record as `GET /requests/ID` returns it: times in seconds after `received`."""
    return SidecarTrace(
        request_id=record.request_id,
        kind=record.kind,
        target=record.target,
        received=round(record.received_unix, 6),
        path=record.path,
        reason=record.reason,
        outcome=record.outcome,
        status=record.status,
        first_byte=_since_received(record, record.first_byte),
        ended=_since_received(record, record.ended),
        timing=record.timing,
        legs=tuple(_to_leg_trace(record, leg) for leg in record.legs),
        moves=tuple(_to_move_trace(record, report) for report in move_reports(record)),
    )


def _to_move_trace(record: Record, report: MoveReport) -> MoveTrace:
    return MoveTrace(
        at=round(report.at - record.received, 6),
        cause=report.cause.value,
        method=report.method.value,
        result=report.result.value if report.result is not None else None,
        source=report.source,
        target=report.target,
        delivered=report.delivered,
        seam=report.seam,
        recomputed=report.recomputed,
        gap=None if report.gap is None else round(report.gap, 6),
        why=report.why,
    )


def _to_leg_trace(record: Record, leg: Leg) -> LegTrace:
    return LegTrace(
        phase=leg.phase.value,
        backend=leg.backend,
        engine_id=leg.attempt_id,
        started=round(leg.started - record.received, 6),
        first_byte=_since_received(record, leg.first_byte),
        ended=_since_received(record, leg.ended),
        result=leg.result.value if leg.result is not None else None,
        status=leg.status,
        detail=leg.detail[:MAX_TEXT],
        timing=leg.timing,
        streamed=leg.streamed,
    )


def _since_received(record: Record, time: float | None) -> float | None:
    return None if time is None else round(time - record.received, 6)
