"""One request to this pod's engine and its answer back, without a hand-off.

Forward ─┬─ Alone         a generation that one engine serves
         └─ Passthrough   what generates nothing, websockets included
"""

import asyncio
from abc import ABC, abstractmethod

from tandem_contract.commandline import HostPort

from ..http.messages import Request, ResponseHead
from ..http.relay import EventChunks, Relay
from ..http.server import Client
from ..http.upstream import Call, Failure
from ..observability.record import Leg, Outcome, Phase, Record, Result
from .classify import result_of, result_of_failure
from .context import Tools
from .liveness import Pulse
from .machine import DRAINED
from .outbound import ANSWER_DROPPED, engine_request, fresh_id
from .reply import refuse


class Forward(ABC):
    """Until its first bytes the answer may become an error of ours; then it is whole or cut."""

    survives_half_close = False
    leg: Leg
    _head: ResponseHead
    _call: Call | None = None
    _pulse: Pulse

    def __init__(self, tools: Tools, client: Client, request: Request, record: Record) -> None:
        self.payload_only = request.http10
        self.tools = tools
        self.record = record
        self._loop = asyncio.get_running_loop()
        self._client = client
        self._request = request
        self._relay = Relay(client, request)
        self._chunks: EventChunks | None = None

    def start(self, engine: HostPort, backend: str, body: bytes) -> None:
        """Send `body` to `engine`, which is called `backend`; the rest is callbacks."""
        tools, record, request = self.tools, self.record, self._request
        tools.lifecycle.enter(self)
        tools.observer.on_request_start(record)
        ident = fresh_id(record.request_id)
        self.leg = record.leg(Phase.DECODE, backend, ident, record.received)
        self._pulse = tools.vigil.watch(engine, self)
        self._call = tools.pool.send(
            engine,
            request.method,
            engine_request(request, engine, self.leg, body),
            self,
            switching=bool(request.upgrade),
        )

    # For those below.

    @abstractmethod
    def lines(self) -> bytes:
        """Header lines of ours; `leg` knows what the engine said, if it did."""

    @abstractmethod
    def first_bytes(self, head: ResponseHead, data: bytes) -> None:
        """The answer begins."""

    @abstractmethod
    def lost(self, detail: str) -> str:
        """No answer comes, or no more of one; returns what the client is told."""

    # What the client's connection and the drain say.

    def client_left(self) -> None:
        self._abort()
        self.end(Outcome.ABANDONED)

    def client_full(self) -> None:
        if self._call is not None:
            self._call.pause()

    def client_ready(self) -> None:
        if self._call is not None:
            self._call.resume()

    def drain_expired(self) -> None:
        self._abort()
        self._break(503, DRAINED)

    def describe(self) -> dict[str, object]:
        return {
            "request_id": self.record.request_id,
            "path": self.record.path,
            "phase": "answering" if self._relay.written else "decoding",
            "age_seconds": round(self._loop.time() - self.record.received, 3),
        }

    # What the engine says.

    def head(self, head: ResponseHead) -> None:
        leg = self.leg
        leg.status, leg.first_byte = head.status, self._loop.time()
        self._head = head
        self._pulse.alive = True
        if head.event_stream:
            self._chunks = EventChunks(head, wire=not self.payload_only)

    def body(self, data: bytes, last: bool) -> None:
        self._pulse.alive = True
        if self._chunks is not None:
            data = self._chunks.take(data)
        if not (data or last):
            return
        if not self._relay.written:
            self._begin(data)
        if last:
            self.end_leg(result_of(self.leg.status or 0))
            self.end(Outcome.ANSWERED)
        self._relay.body(data, last=last)

    def failed(self, failure: Failure, detail: str) -> None:
        self._fail(result_of_failure(failure), detail)

    def silent(self, detail: str) -> None:
        """The engine hangs."""
        if self._call is not None:
            self._call.abort()
        self._fail(Result.SILENT, detail)

    # Ends.

    def end_leg(self, result: Result, detail: str = "") -> None:
        """The engine is done with, one way or another."""
        self._pulse.leave(self)
        self.leg.end(result, self._loop.time(), status=self.leg.status, detail=detail)

    def end(self, outcome: Outcome) -> None:
        """So is the request."""
        self.record.outcome, self.record.ended = outcome, self._loop.time()
        # Each knows the other: only the collector would free them, and the bodies with them.
        self._call = None
        self.tools.lifecycle.leave(self)
        self.tools.observer.on_request_end(self.record)

    def _begin(self, data: bytes) -> None:
        record, head = self.record, self._head
        record.status, record.first_byte = head.status, self._loop.time()
        self.first_bytes(head, data)
        closing = self.tools.lifecycle.draining
        self._relay.begin(head, ANSWER_DROPPED, self.lines(), close=closing)

    def _fail(self, result: Result, detail: str) -> None:
        self.end_leg(result, detail)
        self._break(502, self.lost(detail))

    def _abort(self) -> None:
        status = self.leg.status
        self.end_leg(Result.ABORTED if status is None or status < 500 else result_of(status))
        if self._call is not None:
            self._call.abort()

    def _break(self, status: int, message: str) -> None:
        if self._relay.written:
            self.end(Outcome.CUT)
            between = self._chunks is not None and self._chunks.between
            self._relay.cut(status, message, between_chunks=between)
        else:
            self.record.status, self.record.first_byte = status, self._loop.time()
            self.end(Outcome.FAILED)
            closing = self.tools.lifecycle.draining
            refuse(self._client, self._request, status, message, self.lines(), close=closing)
