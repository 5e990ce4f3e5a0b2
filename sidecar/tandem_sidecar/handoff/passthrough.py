"""Requests that generate nothing: to the engine and back, byte for byte."""

import asyncio
import logging

from tandem_contract.commandline import HostPort

from ..http.messages import Request, ResponseHead
from ..http.relay import EventChunks, Relay
from ..http.server import Client
from ..http.tunnel import Tunnel
from ..http.upstream import Call, Failure
from ..seeing.record import PASSTHROUGH, Leg, Phase, Result
from .legs import result_of, result_of_failure
from .machine import DRAINED, Outcome
from .outbound import (
    ANSWER_DROPPED,
    REQUEST_ID,
    engine_request,
    fresh_id,
    header_lines,
    new_record,
    request_id,
)
from .reply import refuse
from .tools import Tools
from .vigil import Pulse

log = logging.getLogger(__name__)


class Passthrough:
    """A request that is none of a hand-off's: to the engine and back as it is."""

    def __init__(self, tools: Tools, client: Client, request: Request) -> None:
        self.survives_half_close = request.method in (b"GET", b"HEAD")
        self.payload_only = request.http10
        self._loop = asyncio.get_running_loop()
        self._tools = tools
        self._client = client
        self._request = request
        self._record = new_record(request, request_id(request), PASSTHROUGH)
        self._leg: Leg | None = None
        self._relay = Relay(client, request)
        self._chunks: EventChunks | None = None
        self._call: Call | None = None
        self._tunnel: Tunnel | None = None
        self._pulse: Pulse | None = None

    def start(self, engine: HostPort, body: bytes) -> None:
        """Send `body` to `engine`."""
        self._tools.lifecycle.enter(self)
        self._tools.observer.began(self._record)
        record, engine_id = self._record, fresh_id(self._record.request_id)
        self._leg = record.leg(Phase.DECODE, str(engine), engine_id, record.received)
        request = engine_request(self._request, engine, self._leg, body)
        self._pulse = self._tools.vigil.watch(engine, self)
        self._call = self._tools.pool.send(
            engine, self._request.method, request, self, switching=bool(self._request.upgrade)
        )

    def client_left(self) -> None:
        self._abort()
        self._end(Outcome.ABANDONED)

    def client_full(self) -> None:
        if self._call is not None:
            self._call.pause()

    def client_ready(self) -> None:
        if self._call is not None:
            self._call.resume()

    def drain_expired(self) -> None:
        if self._tunnel is not None:
            self._tunnel.cut(DRAINED)
            return
        self._abort()
        self._break(503, DRAINED)

    def describe(self) -> dict[str, object]:
        phase = "passthrough" if self._tunnel is None else "tunnel"
        return {"request_id": self._record.request_id, "phase": phase}

    def head(self, head: ResponseHead) -> None:
        record, now = self._record, self._loop.time()
        record.status, record.first_byte = head.status, now
        if self._leg is not None:
            self._leg.status, self._leg.first_byte = head.status, now
        self._alive()
        if head.status == 101 and self._call is not None:
            self._switch(head, self._call)
            return
        self._chunks = EventChunks(head, wire=not self.payload_only)
        close = self._tools.lifecycle.draining
        self._relay.begin(head, ANSWER_DROPPED, self._its_id(head), close=close)

    def body(self, data: bytes, last: bool) -> None:
        self._alive()
        if self._chunks is not None:
            data = self._chunks.take(data)
        if last:
            self._ended(result_of(self._record.status or 0))
            self._end(Outcome.ANSWERED)
        self._relay.body(data, last=last)

    def failed(self, failure: Failure, detail: str) -> None:
        self._failed(result_of_failure(failure), detail)

    def silent(self, detail: str) -> None:
        if self._call is not None:
            self._call.abort()
        self._failed(Result.SILENT, detail)

    def _failed(self, result: Result, detail: str) -> None:
        # Probes and scrapes ask several times a second: who asks is told, and that is enough.
        level = logging.DEBUG if self._request.method == b"GET" else logging.WARNING
        record = self._record
        # The path may hold names that are the client's own.
        ids = {"request_id": record.request_id}
        log.log(level, "passed through, %s: %s", record.method, detail, extra=ids)
        self._ended(result, detail)
        self._break(502, detail)

    def _its_id(self, head: ResponseHead) -> bytes:
        """Where an engine tells its id of the request, the client gets the client's."""
        said = head.value(REQUEST_ID)
        return header_lines({REQUEST_ID.decode(): self._record.request_id}) if said else b""

    def _alive(self) -> None:
        if self._pulse is not None:
            self._pulse.alive = True

    def _switch(self, head: ResponseHead, call: Call) -> None:
        """Both agreed on another protocol: bytes from here, for as long as they like."""
        lines = b"connection: upgrade\r\nupgrade: %b\r\n" % head.value(b"upgrade")
        lines += self._its_id(head)
        if self._pulse is not None:
            self._pulse.leave(self)
        self._tunnel = Tunnel(self._client, call, self._tunnel_ended)
        self._tunnel.begin(head.encode(ANSWER_DROPPED, lines, close=False, plain=False))

    def _tunnel_ended(self, why: str) -> None:
        self._ended(Result.LOST if why else Result.ANSWERED, why)
        self._end(Outcome.CUT if why else Outcome.ANSWERED)

    def _break(self, status: int, message: str) -> None:
        if self._relay.written:
            self._end(Outcome.CUT)
            between = self._chunks is not None and self._chunks.between
            self._relay.cut(status, message, between_chunks=between)
        else:
            self._record.status = status
            self._end(Outcome.FAILED)
            close = self._tools.lifecycle.draining
            refuse(self._client, self._request, status, message, b"", close=close)

    def _abort(self) -> None:
        self._ended(Result.ABORTED)
        if self._call is not None:
            self._call.abort()

    def _ended(self, result: Result, detail: str = "") -> None:
        if self._pulse is not None:
            self._pulse.leave(self)
        if self._leg is not None:
            self._leg.end(result, self._loop.time(), status=self._leg.status, detail=detail)

    def _end(self, outcome: Outcome) -> None:
        self._record.outcome, self._record.ended = outcome, self._loop.time()
        self._tools.lifecycle.leave(self)
        self._tools.observer.ended(self._record)
