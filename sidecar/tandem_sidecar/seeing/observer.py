"""Makes metrics of each request's record."""

from tandem_contract.paths import RoutingPath

from .metrics import Metrics
from .record import Phase, Record, Result


class Observer:
    """Told of every request twice: when it begins and when it has ended."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def began(self, record: Record) -> None:
        self._metrics.in_flight.inc()

    def ended(self, record: Record) -> None:
        metrics = self._metrics
        metrics.in_flight.dec()
        for phase in record.errors:
            metrics.errors[phase].inc()
        if record.ignored:
            metrics.ignored_candidates.inc(record.ignored)
        if record.path is None:
            return
        metrics.requests[record.path].inc()
        if record.retries:
            metrics.retries.inc(record.retries)
        if record.path is RoutingPath.UNIFIED:
            metrics.unified(record.reason)
        elif record.path is RoutingPath.FALLBACK:
            metrics.fallbacks.inc()
        for leg in record.legs:
            if leg.result is not Result.ANSWERED or leg.ended is None:
                continue
            seconds = leg.ended - leg.started
            if leg.phase is Phase.PREFILL:
                metrics.prefill(leg.backend, seconds)
            elif leg.phase is Phase.DECODE:
                metrics.decode(leg.backend, seconds)
                if leg.timing is not None and leg.timing.transfer is not None:
                    metrics.transfer.observe(leg.timing.transfer)
