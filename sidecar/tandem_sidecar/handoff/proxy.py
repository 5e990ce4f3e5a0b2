"""What happens to each request: refused, handed off, or passed through.

`Proxy.handle` is called by the HTTP server with every request, and returns at once.
"""

import logging
import time
from dataclasses import replace

from tandem_contract.commandline import HostPort
from tandem_contract.paths import ErrorPhase, RoutingPath

from ..bodies.parse import BadBody, Kind, clean_passthrough, kind_of, parse_body, unified_reason
from ..http import server
from ..http.messages import Request, ResponseHead
from ..http.relay import EventChunks, Relay
from ..http.server import Client
from ..http.upstream import Call, Failure
from ..trust.plan_keys import PlanKeys
from ..trust.route import Route, route
from .exchange import Exchange, Generation, Tools
from .machine import DRAINED
from .outbound import INTERNAL, engine_request, fresh_id, request_id
from .reply import Served, refuse

log = logging.getLogger(__name__)

DRAINING = "the pod is shutting down: ask another"


class Proxy:
    """The handler of every client request; its decode engine is given for each."""

    def __init__(self, tools: Tools, keys: PlanKeys) -> None:
        self._tools = tools
        self._keys = keys

    def handle(self, request: Request, client: Client) -> server.Exchange | None:
        """Serve `request` with this pod's engine."""
        return self.serve(request, client, self._tools.settings.engine)

    def serve(self, request: Request, client: Client, engine: HostPort) -> server.Exchange | None:
        """Serve `request`, decoding on `engine`."""
        kind = kind_of(request.method, request.target)
        if kind is not None:
            return self._generate(kind, request, client, engine)
        if self._tools.lifecycle.draining:
            refuse(client, request, 503, DRAINING, b"", close=True)
            return None
        return self._pass_through(request, client, engine)

    def _generate(
        self, kind: Kind, request: Request, client: Client, engine: HostPort
    ) -> server.Exchange | None:
        ident = request_id(request)
        decode = self._tools.settings.pod_name or str(engine)
        served = Served(ident, RoutingPath.UNIFIED, decode)
        if self._tools.lifecycle.draining:
            refuse(client, request, 503, DRAINING, served.lines(), close=True)
            return None
        try:
            body = parse_body(request.body)
            reason = unified_reason(kind, body)
        except BadBody as err:
            refuse(client, request, 400, str(err), served.lines(), close=False)
            return None
        chosen = self._route(request, ident)
        if chosen.path is RoutingPath.PREFILL_THEN_DECODE and reason is not None:
            chosen = replace(chosen, path=RoutingPath.UNIFIED, reason=reason, candidates=())
        if chosen.path is RoutingPath.UNIFIED:
            self._tools.metrics.unified(chosen.reason)
        exchange = Exchange(
            self._tools, client, Generation(request, ident, kind, body, chosen), engine
        )
        exchange.start()
        return exchange

    def _route(self, request: Request, ident: str) -> Route:
        allow = self._tools.settings.allow
        chosen = route(request, ident, self._keys.current, allow, time.time())
        if chosen.error is not None:
            log.warning("request %s: %s", ident, chosen.error)
            self._tools.metrics.errors[ErrorPhase.ORCHESTRATION].inc()
            self._tools.metrics.ignored_candidates.inc(chosen.ignored)
        return chosen

    def _pass_through(
        self, request: Request, client: Client, engine: HostPort
    ) -> server.Exchange | None:
        try:
            content_type = request.one("content-type") or b""
            body = clean_passthrough(request.body, content_type)
        except ValueError as err:
            refuse(client, request, 400, str(err), b"", close=False)
            return None
        exchange = Passthrough(self._tools, client, request)
        exchange.start(engine, body)
        return exchange


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
