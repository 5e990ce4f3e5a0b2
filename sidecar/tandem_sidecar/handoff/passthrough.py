"""Requests that generate nothing: to the engine and back, byte for byte."""

import logging

from tandem_contract.commandline import HostPort

from ..http.messages import Request, ResponseHead
from ..http.relay import EventChunks, Relay
from ..http.server import Client
from ..http.upstream import Call, Failure
from .exchange import Tools
from .machine import DRAINED
from .outbound import INTERNAL, engine_request, fresh_id, request_id
from .reply import refuse

log = logging.getLogger(__name__)


class Passthrough:
    """A request that is none of a hand-off's: to the engine and back as it is."""

    def __init__(self, tools: Tools, client: Client, request: Request) -> None:
        self.survives_half_close = request.method in (b"GET", b"HEAD")
        self.payload_only = request.http10
        self._tools = tools
        self._client = client
        self._request = request
        self._ident = request_id(request)
        self._relay = Relay(client, request)
        self._chunks: EventChunks | None = None
        self._call: Call | None = None

    def start(self, engine: HostPort, body: bytes) -> None:
        """Send `body` to `engine`."""
        self._tools.lifecycle.enter(self)
        self._tools.metrics.in_flight.inc()
        request = engine_request(self._request, engine, fresh_id(self._ident), body)
        self._call = self._tools.pool.send(engine, self._request.method, request, self)

    def client_left(self) -> None:
        self._abort()
        self._end()

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
        return {"request_id": self._ident, "phase": "passthrough"}

    def head(self, head: ResponseHead) -> None:
        self._chunks = EventChunks(head, wire=not self.payload_only)
        self._relay.begin(head, INTERNAL, b"", close=self._tools.lifecycle.draining)

    def body(self, data: bytes, last: bool) -> None:
        if self._chunks is not None:
            data = self._chunks.take(data)
        if last:
            self._end()
        self._relay.body(data, last=last)

    def failed(self, failure: Failure, detail: str) -> None:
        # Probes and scrapes ask several times a second: who asks is told, and that is enough.
        level = logging.DEBUG if self._request.method == b"GET" else logging.WARNING
        method = self._request.method.decode()
        log.log(level, "request %s: %s %s: %s", self._ident, method, self._path, detail)
        self._break(502, detail)

    @property
    def _path(self) -> str:
        return self._request.target.split(b"?", 1)[0].decode("latin-1")

    def _break(self, status: int, message: str) -> None:
        self._end()
        if self._relay.written:
            between = self._chunks is not None and self._chunks.between
            self._relay.cut(status, message, between_chunks=between)
        else:
            close = self._tools.lifecycle.draining
            refuse(self._client, self._request, status, message, b"", close=close)

    def _abort(self) -> None:
        if self._call is not None:
            self._call.abort()

    def _end(self) -> None:
        self._tools.lifecycle.leave(self)
        self._tools.metrics.in_flight.dec()
