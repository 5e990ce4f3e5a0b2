"""What happens to each request: refused, handed off, or passed through.

`Proxy.handle` is called by the HTTP server with every request, and returns at once.
"""

import logging
import time

from msgspec.structs import replace

from tandem_contract.commandline import HostPort
from tandem_contract.paths import ErrorPhase, RoutingPath

from ..bodies.kinds import Kind, kind_of
from ..bodies.parse import BadBody, Body, clean_passthrough, parse_body
from ..bodies.rules import unified_reason
from ..http import server
from ..http.messages import Request
from ..http.server import Client
from ..security.credentials import PlanKeys
from ..security.route import Route, route
from .alone import Alone
from .context import Generation, Tools
from .driver import Exchange
from .outbound import new_record, request_id
from .passthrough import Passthrough
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
        if self._tools.lifecycle.draining:
            refuse(client, request, 503, DRAINING, self._lines(ident, engine), close=True)
            return None
        try:
            body = parse_body(request.body)
            chosen = _ruled(self._route(request, ident), kind, body)
        except BadBody as err:
            refuse(client, request, 400, str(err), self._lines(ident, engine), close=False)
            return None
        record = new_record(request, ident, kind)
        record.path, record.reason, record.ignored = chosen.path, chosen.reason, chosen.ignored
        if chosen.error is not None:
            record.errors = (ErrorPhase.ORCHESTRATION,)
        settings = self._tools.settings
        decode = settings.pod_name or chosen.decode_name or str(engine)
        if chosen.path is not RoutingPath.PREFILL_THEN_DECODE:
            alone = Alone(self._tools, client, request, record, routed=chosen.routed)
            alone.start(engine, decode, body.data)
            return alone
        generation = Generation(request, ident, kind, body, chosen, record, settings)
        exchange = Exchange(self._tools, client, generation, engine, decode)
        exchange.start()
        return exchange

    def _lines(self, ident: str, engine: HostPort) -> bytes:
        """Headers of a generation that is refused."""
        decode = self._tools.settings.pod_name or str(engine)
        return Served(ident, RoutingPath.UNIFIED, decode).lines()

    def _route(self, request: Request, ident: str) -> Route:
        allow = self._tools.settings.allow
        chosen = route(request, ident, self._keys.current, allow, time.time())
        if chosen.error is not None:
            log.warning("%s", chosen.error, extra={"request_id": ident})
        return chosen

    def _pass_through(
        self, request: Request, client: Client, engine: HostPort
    ) -> server.Exchange | None:
        try:
            content_type = request.one(b"content-type") or b""
            body = clean_passthrough(request.body, content_type)
        except ValueError as err:
            refuse(client, request, 400, str(err), b"", close=False)
            return None
        exchange = Passthrough(self._tools, client, request)
        exchange.start(engine, str(engine), body)
        return exchange


def _ruled(chosen: Route, kind: Kind, body: Body) -> Route:
    """The route, without the split where one engine must serve the request. Raises BadBody."""
    if chosen.path is not RoutingPath.PREFILL_THEN_DECODE:
        return chosen
    reason = unified_reason(kind, body)
    if reason is None:
        return chosen
    return replace(chosen, path=RoutingPath.UNIFIED, reason=reason, candidates=())
