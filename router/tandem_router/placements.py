"""Tells the picker what happens to the requests that it placed: when they are answered, and end.

The data path fills one record per request and reports to its observer. `Placements` is that
observer: it passes everything on to the sidecar's, and keeps the placement of each record while its
request runs.
"""

from time import time
from typing import Final

from tandem_contract import headers
from tandem_contract.paths import RoutingPath
from tandem_epp.exchange import ResponseHeaders
from tandem_epp.placement.placement import Placement
from tandem_http1.messages import ResponseHead
from tandem_sidecar.handoff.context import RecordObserver
from tandem_sidecar.observability.record import Leg, Phase, Record

_PREFILL: Final = headers.PREFILL_BACKEND.encode()


class Placements:
    """The running requests' placements, by their record."""

    def __init__(self, observer: RecordObserver) -> None:
        self._observer = observer
        self._running: dict[Record, Placement] = {}

    def add(self, record: Record, placement: Placement) -> None:
        """The request of `record` was placed and is about to be served."""
        self._running[record] = placement

    def replace(self, record: Record, placement: Placement) -> None:
        """The request is placed anew."""
        self._running[record].end(time())
        self._running[record] = placement

    def on_failure(self, record: Record) -> None:
        """The request's decode backend failed, and it is placed anew next."""
        # As Envoy would tell of a backend that closes the connection.
        failed = ResponseHeaders(timing=None, status=502)
        self._running[record].on_response_headers(failed, time())

    def leave(self, record: Record) -> None:
        """Likewise, but it waits, and is added again once it is placed."""
        self.on_failure(record)
        self.drop(record)

    def drop(self, record: Record) -> None:
        """The request was placed and is not sent."""
        self._running.pop(record).end(time())

    def on_refusal(self) -> None:
        """Pass it on."""
        self._observer.on_refusal()

    def on_request_start(self, record: Record) -> None:
        """Pass it on, once."""
        # A request that was placed anew has legs already.
        if not record.legs:
            self._observer.on_request_start(record)

    def on_answer(self, record: Record, head: ResponseHead | None) -> None:
        """The prefill is over, and the status tells how the backends did."""
        placement = self._running.get(record)
        if placement is not None:
            placement.on_response_headers(_response(record, head), time())

    def on_rest(self, record: Record, head: ResponseHead) -> None:
        """The prefill is over. What it took is not compared with the prediction, which did not know
        that another engine had computed most of it."""
        placement = self._running.get(record)
        if placement is not None:
            prefill = _prefill_name(record, head)
            rest = ResponseHeaders(None, head.status, prefill, record.path)
            placement.on_response_headers(rest, time())

    def on_request_end(self, record: Record) -> None:
        """Return the counts of the request's backends."""
        placement = self._running.pop(record, None)
        if placement is not None:
            placement.end(time())
        self._observer.on_request_end(record)

    def on_release_end(self, record: Record, leg: Leg) -> None:
        """Pass it on."""
        self._observer.on_release_end(record, leg)


def _response(record: Record, head: ResponseHead | None) -> ResponseHeaders:
    """The answer to the request of `record`, as the picker would hear of it from Envoy."""
    retry_after = head.value(b"retry-after") if head is not None else b""
    return ResponseHeaders(
        timing=record.timing.encode() if record.timing is not None else None,
        status=record.status or 0,
        prefill=_prefill_name(record, head),
        path=record.path,
        retry_after=retry_after.decode("latin-1") or None,
        is_stream=head is not None and head.event_stream,
    )


def _prefill_name(record: Record, head: ResponseHead | None) -> str | None:
    """The backend that ran the prefill, or was asked last; None unless the request is split."""
    if record.path is not RoutingPath.PREFILL_THEN_DECODE:
        return None
    # Where a sidecar hands off, its answer names the backend.
    if head is not None and (named := head.value(_PREFILL)):
        return named.decode("latin-1")
    names = [leg.backend for leg in record.legs if leg.phase is Phase.PREFILL]
    return names[-1] if names else None
