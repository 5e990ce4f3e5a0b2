"""Recent requests by id, for `GET /requests/ID`: those that run, and a ring of those that ended."""

from collections import deque
from collections.abc import Sequence

from tandem_contract.trace import MAX_SAME_ID, LegTrace, SidecarTrace

from .record import MAX_TEXT, Leg, Record


class History:
    """Keeps the last `limit` ended requests: figures and names, about 1.5 KB each."""

    def __init__(self, limit: int) -> None:
        self.running: set[Record] = set()
        self._ended: deque[Record] = deque(maxlen=limit)

    def resize(self, limit: int) -> None:
        """Keep `limit` from now on, the latest."""
        if limit != self._ended.maxlen:
            self._ended = deque(self._ended, maxlen=limit)

    def began(self, record: Record) -> None:
        self.running.add(record)

    def ended(self, records: Sequence[Record], *, kept: Sequence[Record]) -> None:
        """These ended; nobody will ask for those that are not `kept`."""
        self.running.difference_update(records)
        self._ended.extend(kept)

    def find(self, request_id: str) -> list[SidecarTrace]:
        """What is known of `request_id`, the newest last."""
        # Asked by people: to look through all costs less than to index each.
        found = [r for r in (*self._ended, *self.running) if r.request_id == request_id]
        found.sort(key=lambda record: record.received)
        return [trace(record) for record in found[-MAX_SAME_ID:]]


def trace(record: Record) -> SidecarTrace:
    """The record as the wire has it."""
    return SidecarTrace(
        request_id=record.request_id,
        kind=record.kind,
        target=record.target,
        received=round(record.received_unix, 6),
        path=record.path,
        reason=record.reason,
        outcome=record.outcome,
        status=record.status,
        first_byte=_after(record, record.first_byte),
        ended=_after(record, record.ended),
        legs=tuple(_leg(record, leg) for leg in record.legs),
    )


def _leg(record: Record, leg: Leg) -> LegTrace:
    return LegTrace(
        phase=leg.phase.value,
        backend=leg.backend,
        engine_id=leg.engine_id,
        started=round(leg.started - record.received, 6),
        first_byte=_after(record, leg.first_byte),
        ended=_after(record, leg.ended),
        result=leg.result.value if leg.result is not None else None,
        status=leg.status,
        detail=leg.detail[:MAX_TEXT],
        timing=leg.timing,
    )


def _after(record: Record, when: float | None) -> float | None:
    return None if when is None else round(when - record.received, 6)
