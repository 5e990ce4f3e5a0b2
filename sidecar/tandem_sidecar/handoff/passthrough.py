"""A request that generates nothing: forwarded as it is, also a websocket or another protocol."""

import logging

from tandem_http1.client import ClientConnection
from tandem_http1.connection import Call
from tandem_http1.messages import Request, ResponseHead
from tandem_http1.tunnel import Tunnel

from ..observability.record import PASSTHROUGH, Outcome, Record, Result
from .context import Failover, SidecarContext
from .forward import Forward
from .machine import DRAIN_EXPIRED_MESSAGE
from .outbound import REQUEST_ID, client_request_id
from .reply import ANSWER_DROPPED, encode_headers, new_record

log = logging.getLogger(__name__)


class Passthrough(Forward):
    """A request that generates nothing; it may switch to another protocol."""

    def __init__(
        self,
        context: SidecarContext,
        client: ClientConnection,
        request: Request,
        request_id: str | None = None,
        *,
        record: Record | None = None,
        failover: Failover | None = None,
    ) -> None:
        """`request_id`: None takes the client's. `record`: None makes one."""
        if record is None:
            request_id = request_id or client_request_id(request)
            record = new_record(context, request, request_id, PASSTHROUGH)
        super().__init__(context, client, request, record, failover)
        # Reads are cheap for the engine, so they are finished for a client that closed its sending
        # side; see `http.client`.
        self.survives_half_close = request.method in (b"GET", b"HEAD")
        self._tunnel: Tunnel | None = None

    def header_lines(self) -> bytes:
        """The client's request id, if the engine's answer carries a request id."""
        if self.leg.status is None or not self._head.value(REQUEST_ID):
            return b""
        return encode_headers({REQUEST_ID.decode(): self.record.request_id})

    def inspect_first_bytes(self, head: ResponseHead, data: bytes) -> None:
        """Nothing to inspect: the sidecar does not interpret these answers."""

    def inspect_last_bytes(self, data: bytes) -> None:
        """Nothing to inspect, as above."""

    def report_loss(self, detail: str) -> str:
        # Probes and scrapes would fill the log several times a second while an engine is down, and
        # their senders see the error in the answer.
        level = logging.DEBUG if self.record.method == "GET" else logging.WARNING
        # The path is not logged: it may contain names that the client chose.
        ids = {"request_id": self.record.request_id}
        log.log(level, "passthrough of %s failed: %s", self.record.method, detail, extra=ids)
        return detail

    def describe(self) -> dict[str, object]:
        phase = "passthrough" if self._tunnel is None else "tunnel"
        return {"request_id": self.record.request_id, "phase": phase}

    def drain_expired(self) -> None:
        if self._tunnel is None:
            super().drain_expired()
        else:
            # Another protocol runs on the connection, and an HTTP error cannot be sent within it.
            self._tunnel.cut(DRAIN_EXPIRED_MESSAGE)

    def head(self, head: ResponseHead) -> None:
        super().head(head)
        if head.status == 101 and isinstance(self._call, Call):
            self._switch(head, self._call)

    def _switch(self, head: ResponseHead, call: Call) -> None:
        """Hand both connections to a tunnel; a silent engine is normal from here on."""
        self.record.status = head.status
        self.record.first_byte = self.leg.first_byte = self._loop.time()
        self.context.observer.on_answer(self.record, head)
        self._liveness.unwatch()
        upgrade = b"connection: upgrade\r\nupgrade: %b\r\n" % head.value(b"upgrade")
        lines = upgrade + self.header_lines()
        self._tunnel = Tunnel(self._client, call, self._tunnel_ended)
        self._tunnel.begin(head.encode(ANSWER_DROPPED, lines, close=False, plain=False))

    def _tunnel_ended(self, why: str) -> None:
        self._tunnel = None
        self.end_leg(Result.LOST if why else Result.ANSWERED, why)
        self.end(Outcome.CUT if why else Outcome.ANSWERED)
