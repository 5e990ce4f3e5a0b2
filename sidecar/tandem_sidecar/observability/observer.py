"""Makes of each request's record what operators see: metrics, history, the log line, spans."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Final, Protocol

from tandem_contract.paths import ErrorPhase, RoutingPath
from tandem_contract.plan import WARM_UP
from tandem_contract.timing import UNKNOWN

from ..bodies.kinds import Kind
from .history import History
from .logs import log_requests
from .metrics import Metrics, Sample
from .record import PASSTHROUGH, Leg, Phase, Record, Result

_HELD_SECONDS: Final = 0.02
"""Longer: so many that to see to them is felt by other requests."""
_ABANDONED: Final = "abandoned"
"""`Outcome.ABANDONED`, of a room above this one."""


class Tracer(Protocol):
    """Who makes spans."""

    def began(self, record: Record) -> None:
        """Give the record its span's context, if it is to have one."""

    def ended(self, record: Record) -> None:
        """Send its spans off."""

    def released(self, record: Record, leg: Leg) -> None:
        """Send off the span of a release, which outlives its request."""


class Observer:
    """Told of every request twice: when it begins and when it has ended.

    What ended is held for `_HELD_SECONDS` and then seen to, many at a time: the processor is
    quicker at the same work again and again than between two requests.
    """

    def __init__(
        self, metrics: Metrics, history: History | None = None, tracer: Tracer | None = None
    ) -> None:
        self._metrics = metrics
        self._history = history or History(0)
        self._tracer = tracer
        self._held: list[Record] = []
        self._timer: asyncio.TimerHandle | None = None
        metrics.watch(
            "tandem_sidecar_in_flight",
            "Requests being served, by what they generate; passthrough: nothing.",
            self._in_flight,
            ["kind"],
        )

    def began(self, record: Record) -> None:
        """To be called before the record's first leg."""
        self._history.began(record)
        if self._tracer is not None:
            self._tracer.began(record)

    def ended(self, record: Record) -> None:
        """To be called once, when nothing of the record changes any more but a release."""
        self._held.append(record)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_HELD_SECONDS, self.catch_up)

    def catch_up(self) -> None:
        """See to what has ended: before anybody looks, and before the process ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, []
        for record in held:
            self._count(record)
            if self._tracer is not None:
                self._tracer.ended(record)
        # Probes and scrapes come several times a second: they would be all there is to see.
        told = [r for r in held if r.path is not None or r.method != "GET"]
        self._history.ended(held, kept=told)
        log_requests(told)

    def _count(self, record: Record) -> None:
        metrics = self._metrics
        metrics.outcomes.child(record.outcome).inc()
        for phase in record.errors:
            metrics.errors[phase].inc()
        if record.outcome == _ABANDONED:
            metrics.client_left.child(left_at(record)).inc()
        if record.ignored:
            metrics.ignored_candidates.inc(record.ignored)
        # A pair's first hand-off is nobody's request: slow by design, and counted by the EPP.
        if record.path is not None and record.reason != WARM_UP:
            self._generated(record, record.path)

    def _in_flight(self) -> Iterable[Sample]:
        running = Counter(record.kind for record in self._history.running)
        return [((kind,), float(running[kind])) for kind in (*Kind, PASSTHROUGH)]

    def released(self, record: Record, leg: Leg) -> None:
        """To be called when a release ended; the request may have ended before."""
        if leg.result is not None:
            self._metrics.legs[Phase.RELEASE][leg.result].inc()
        # Of a request that is still held, all spans are sent together.
        if self._tracer is not None and record not in self._held:
            self._tracer.released(record, leg)

    def _generated(self, record: Record, path: RoutingPath) -> None:
        metrics = self._metrics
        metrics.requests[path].inc()
        if path is RoutingPath.UNIFIED:
            metrics.unified(record.reason)
        elif path is RoutingPath.FALLBACK:
            metrics.fallbacks.inc()
        if record.first_byte is not None:
            metrics.first_byte[path].observe(record.first_byte - record.received)
        before: Leg | None = None
        for leg in record.legs:
            if leg.phase is Phase.RELEASE:
                continue
            self._leg(leg)
            if before is not None and before.result is not None and retries(before, leg):
                metrics.retried[before.result].inc()
            before = leg
        if ErrorPhase.KV_TRANSFER in record.errors:
            metrics.failed_loads.inc(failed_loads(record))

    def _leg(self, leg: Leg) -> None:
        if leg.result is None or leg.ended is None:
            return
        metrics = self._metrics
        metrics.legs[leg.phase][leg.result].inc()
        if leg.result is not Result.ANSWERED:
            return
        seconds = leg.ended - leg.started
        if leg.phase is Phase.PREFILL:
            metrics.prefill.child(leg.backend).observe(seconds)
            return
        metrics.decode.child(leg.backend).observe(seconds)
        timing = leg.timing or UNKNOWN
        metrics.engine_tells = timing is not UNKNOWN
        if timing.transfer is not None:
            metrics.transfer.observe(timing.transfer)


def retries(before: Leg, leg: Leg) -> bool:
    """Whether `leg` tries again what `before` failed at: another prefill, or a decode that does
    without what it was handed."""
    return before.result is not Result.ANSWERED and before.phase is leg.phase


def failed_loads(record: Record) -> int:
    """Decode legs that answered with an error to KV handed over: the engine counts these too."""
    handed = {
        leg.engine_id
        for leg in record.legs
        if leg.phase is Phase.PREFILL and leg.result is Result.ANSWERED
    }
    return sum(
        leg.phase is Phase.DECODE and leg.result is Result.ERROR and leg.engine_id in handed
        for leg in record.legs
    )


def left_at(record: Record) -> str:
    """When an abandoned request's client left: `prefill`, `handover` (the KV was ready and no
    engine had admitted its decode), `decode` (before the first byte), or `answer`."""
    if record.first_byte is not None:
        return "answer"
    legs = [leg for leg in record.legs if leg.phase is not Phase.RELEASE]
    if not legs or (legs[-1].phase is Phase.PREFILL and legs[-1].result is not Result.ANSWERED):
        return "prefill"
    last = legs[-1]
    handed = any(leg.phase is Phase.PREFILL for leg in legs) and last.first_byte is None
    return "handover" if handed else "decode"
