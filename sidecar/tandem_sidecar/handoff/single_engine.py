"""A generation that one engine serves alone: what is learned of its answer."""

import logging
from collections.abc import Callable

from tandem_contract.paths import ErrorPhase, RoutingPath
from tandem_contract.request_kinds import RequestKind
from tandem_contract.timing import UNKNOWN
from tandem_http1.client import ClientConnection
from tandem_http1.messages import Request, ResponseHead

from ..observability.record import Record, Result
from ..resume.kept_stream import KeptStream
from .context import Failover, SidecarContext
from .forward import Forward
from .reply import ServedBy
from .timing import EVENTS_SEARCHED, complete_timing, measure_leg, read_timing

log = logging.getLogger(__name__)


class SingleEngineGeneration(Forward):
    """A generation that is not split: the engine's answer with the sidecar's headers."""

    computes_prompt = True

    def __init__(
        self,
        context: SidecarContext,
        client: ClientConnection,
        request: Request,
        record: Record,
        failover: Failover | None = None,
        *,
        kept: KeptStream | None,
        kind: RequestKind,
        routed: bool,
        may_exhaust: Callable[[], bool],
    ) -> None:
        """`routed`: a router sent the request and reads the timing from the answer. `may_exhaust`:
        whether the prompt may itself be what hangs an engine."""
        super().__init__(context, client, request, record, failover, kept=kept)
        self.kind = kind
        self._routed = routed
        self._may_exhaust = may_exhaust

    def may_exhaust(self) -> bool:
        return self._may_exhaust()

    def header_lines(self) -> bytes:
        leg, path = self.leg, self.record.path or RoutingPath.UNIFIED
        timing = (self.record.timing or UNKNOWN) if self._routed else None
        return ServedBy(self.record.request_id, path, leg.backend, timing=timing).encode()

    def inspect_first_bytes(self, head: ResponseHead, data: bytes) -> None:
        self.leg.timing = engine = read_timing(head)
        begins_with_error = self._start.is_error
        failed = head.status >= 400 or begins_with_error
        seconds = None if failed else self._start.seconds_since(self.leg.started)
        others = None if self._overlap is None else self._overlap.others
        whole = not head.event_stream
        first = data if whole else data[:EVENTS_SEARCHED]
        self.record.timing = measure_leg(engine, seconds, first, inflight=others, whole=whole)
        self._end_overlap()
        if head.status >= 500:
            self._count_error(
                f"decode by {self.leg.backend}: answered with an error ({head.status})"
            )
        elif begins_with_error:
            detail = "a stream that begins with an error"
            self.leg.end(Result.ERROR, self._loop.time(), status=head.status, detail=detail)
            self._count_error(f"decode by {self.leg.backend}: {detail}")

    def inspect_last_bytes(self, data: bytes) -> None:
        timing = self.record.timing
        if timing is not None and timing.prompt is None:
            self.record.timing = complete_timing(timing, data)

    def report_loss(self, detail: str) -> str:
        self._count_error(f"decode failed: {detail}")
        return f"decode failed: {detail}"

    def _count_error(self, detail: str) -> None:
        self.record.errors += (ErrorPhase.DECODE,)
        ids = {"request_id": self.record.request_id, "engine_id": self.leg.attempt_id}
        log.warning("%s", detail, extra=ids)
