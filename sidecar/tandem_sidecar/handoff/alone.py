"""A generation that this pod's engine serves alone: no prefill elsewhere was wanted."""

import logging

from tandem_contract.paths import ErrorPhase, RoutingPath
from tandem_contract.timing import Timing

from ..http.messages import Request, ResponseHead
from ..http.server import Client
from ..observability.record import Record, Result
from .classify import read_timing, tells_of_failure
from .context import Tools
from .forward import Forward
from .reply import Served

log = logging.getLogger(__name__)


class Alone(Forward):
    """Answered as the engine answers, under Tandem's headers."""

    def __init__(
        self, tools: Tools, client: Client, request: Request, record: Record, *, routed: bool
    ) -> None:
        """`routed`: a router waits for the timing."""
        super().__init__(tools, client, request, record)
        self._routed = routed

    def lines(self) -> bytes:
        leg, path = self.leg, self.record.path or RoutingPath.UNIFIED
        timing: Timing | None = leg.timing if self._routed else None
        return Served(self.record.request_id, path, leg.backend, timing=timing).lines()

    def first_bytes(self, head: ResponseHead, data: bytes) -> None:
        self.leg.timing = read_timing(head)
        if head.status >= 500:
            self._error(f"decode by {self.leg.backend}: answered with an error ({head.status})")
        elif tells_of_failure(head, data):
            # The leg is still out, and watched.
            detail = "a stream that begins with an error"
            self.leg.end(Result.ERROR, self._loop.time(), status=head.status, detail=detail)
            self._error(f"decode by {self.leg.backend}: {detail}")

    def lost(self, detail: str) -> str:
        self._error(f"decode failed: {detail}")
        return f"decode failed: {detail}"

    def _error(self, what: str) -> None:
        self.record.errors += (ErrorPhase.DECODE,)
        ids = {"request_id": self.record.request_id, "engine_id": self.leg.engine_id}
        log.warning("%s", what, extra=ids)
