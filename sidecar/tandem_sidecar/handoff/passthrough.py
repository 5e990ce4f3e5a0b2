"""Requests that generate nothing: to the engine and back, byte for byte."""

import logging

from ..http.messages import Request, ResponseHead
from ..http.server import Client
from ..http.tunnel import Tunnel
from ..http.upstream import Call
from ..observability.record import PASSTHROUGH, Outcome, Result
from .context import Tools
from .forward import Forward
from .machine import DRAINED
from .outbound import ANSWER_DROPPED, REQUEST_ID, header_lines, new_record, request_id

log = logging.getLogger(__name__)


class Passthrough(Forward):
    """Whatever it is; it may become a tunnel."""

    def __init__(self, tools: Tools, client: Client, request: Request) -> None:
        record = new_record(request, request_id(request), PASSTHROUGH)
        super().__init__(tools, client, request, record)
        self.survives_half_close = request.method in (b"GET", b"HEAD")
        self._tunnel: Tunnel | None = None

    def lines(self) -> bytes:
        """Where an engine tells its id of the request, the client gets the client's."""
        if self.leg.status is None or not self._head.value(REQUEST_ID):
            return b""
        return header_lines({REQUEST_ID.decode(): self.record.request_id})

    def first_bytes(self, head: ResponseHead, data: bytes) -> None:
        """Whatever they say is the client's alone."""

    def lost(self, detail: str) -> str:
        # Probes and scrapes ask several times a second: who asks is told, and that is enough.
        level = logging.DEBUG if self.record.method == "GET" else logging.WARNING
        # The path may hold names that are the client's own.
        ids = {"request_id": self.record.request_id}
        log.log(level, "passed through, %s: %s", self.record.method, detail, extra=ids)
        return detail

    def describe(self) -> dict[str, object]:
        phase = "passthrough" if self._tunnel is None else "tunnel"
        return {"request_id": self.record.request_id, "phase": phase}

    def drain_expired(self) -> None:
        if self._tunnel is None:
            super().drain_expired()
        else:
            self._tunnel.cut(DRAINED)

    def head(self, head: ResponseHead) -> None:
        super().head(head)
        if head.status == 101 and self._call is not None:
            self._switch(head, self._call)

    def _switch(self, head: ResponseHead, call: Call) -> None:
        """Both agreed on another protocol: bytes from here, for as long as they like."""
        self.record.status, self.record.first_byte = head.status, self.leg.first_byte
        self._pulse.leave(self)
        lines = b"connection: upgrade\r\nupgrade: %b\r\n" % head.value(b"upgrade") + self.lines()
        self._tunnel = Tunnel(self._client, call, self._tunnel_ended)
        self._tunnel.begin(head.encode(ANSWER_DROPPED, lines, close=False, plain=False))

    def _tunnel_ended(self, why: str) -> None:
        self._tunnel = None
        self.end_leg(Result.LOST if why else Result.ANSWERED, why)
        self.end(Outcome.CUT if why else Outcome.ANSWERED)
