"""One request of a client: placed by the picker, then served by the sidecar's data path.

    handle ──► picker.place ──┬─ NotPlaced ──► an error, or a list of models
                              └─ Placement ───► placed.PlacedRequest: 1 or 2 engines

Everything runs in callbacks of the event loop. Only a body that the picker has to prepare (a large
one, or with a precise index) is waited for, by `PreparedRequest`.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from time import time
from typing import Final

from msgspec.structs import replace

from tandem_contract import endpoints, headers
from tandem_contract.api_keys import ApiKeys
from tandem_epp.exchange import NO_BACKEND, HttpRequest, NotPlaced, Reply
from tandem_epp.placement.placement import Placement
from tandem_http1.client import ActiveRequest, ClientConnection
from tandem_http1.messages import Request, response_bytes
from tandem_sidecar.bodies.kinds import kind_of
from tandem_sidecar.bodies.parse import BadBody, Body, parse_body
from tandem_sidecar.handoff.outbound import client_request_id
from tandem_sidecar.handoff.reply import new_record, refuse_generation, send_error
from tandem_sidecar.observability.record import PASSTHROUGH, Record

from .clients import REFUSED, client_of, without_keys
from .placed import Parts, PlacedRequest
from .waiting import WaitingRequest

log = logging.getLogger(__name__)

DRAINING: Final = "the router is shutting down: send the request again"
UNHEALTHY: Final = "no backend passes its health check"
_TRACEPARENT: Final = headers.TRACEPARENT
_INTERNAL: Final = frozenset(name.encode() for name in headers.INTERNAL)
_HEALTH: Final = endpoints.HEALTH.encode()

Prepare = Callable[[HttpRequest, bytes], AbstractAsyncContextManager[object] | None]
"""`tandem_epp.placement.preparer.Preparer.prepare`."""


class RoutedRequests:
    """The handler of every client request."""

    def __init__(
        self,
        parts: Parts,
        prepare: Prepare,
        is_healthy: Callable[[], bool],
        api_keys: ApiKeys | None = None,
    ) -> None:
        """`api_keys`: of the clients that are served; None: all are."""
        self._parts, self._prepare, self._is_healthy = parts, prepare, is_healthy
        self._api_keys = api_keys
        self._context = parts.context
        self.is_leaving = False
        """Whether each answer is the last one of its connection, because the process ends soon."""

    def check_head(self, request: Request) -> tuple[int, str] | None:
        """Refuse a request without an API key before its body is read: the memory for bodies is for
        those who have one."""
        if self._api_keys is None or client_of(request, self._api_keys) is not None:
            return None
        return 401, REFUSED

    def handle(self, request: Request, client: ClientConnection) -> ActiveRequest | None:
        """Serve `request`; None: it is already answered."""
        client_name: str | None = None
        if self._api_keys is not None:
            client_name = client_of(request, self._api_keys)
            # `check_head` let it pass, but the keys may have changed while its body came.
            if client_name is None:
                send_error(client, request, 401, REFUSED, self.refuse(request), close=False)
                return None
            request = without_keys(request)
        if request.target == _HEALTH and request.method in (b"GET", b"HEAD"):
            self._answer_health(request, client)
            return None
        if self._context.lifecycle.draining:
            send_error(client, request, 503, DRAINING, self.refuse(request), close=True)
            return None
        if self.is_leaving:
            request = replace(request, keep_alive=False)
        body: Body | None = None
        if kind_of(request.method, request.target) is not None:
            try:
                body = parse_body(request.body)
            except BadBody as err:
                send_error(client, request, 400, str(err), self.refuse(request), close=False)
                return None
        http = _http_request(request, client_name)
        preparing = self._prepare(http, request.body) if request.body else None
        if preparing is None:
            return self._serve(request, http, client, body)
        return PreparedRequest(
            client, preparing, http, lambda made: self._serve(request, made, client, body)
        )

    def refuse(self, request: Request) -> bytes:
        return refuse_generation(self._context.observer, request, decode="")

    def _serve(
        self, request: Request, http: HttpRequest, client: ClientConnection, body: Body | None
    ) -> ActiveRequest | None:
        unplaced = UnplacedRequest(self._parts, request, http, client, body)
        try:
            return unplaced.start()
        except NotPlaced as refusal:
            may_wait = body is not None and self._context.settings.resume_limits is not None
            if may_wait and refusal.reason == NO_BACKEND:
                unplaced.refusal = refusal
                return WaitingRequest(unplaced, self._parts.waiting)
            unplaced.refuse(refusal)
            return None

    def _answer_health(self, request: Request, client: ClientConnection) -> None:
        # While it is leaving, too: a load balancer in front learns by it to use others.
        if self.is_leaving or self._context.lifecycle.draining:
            send_error(client, request, 503, DRAINING, b"", close=True)
        elif not self._is_healthy():
            send_error(client, request, 503, UNHEALTHY, b"", close=False)
        else:
            close, head = not request.keep_alive, request.method == b"HEAD"
            client.write(response_bytes(200, b"", b'{"status": "ok"}', close=close, head=head))
            client.finish(keep=not close)


class UnplacedRequest:
    """A request that is to be placed; it may wait for a backend."""

    def __init__(
        self,
        parts: Parts,
        request: Request,
        http: HttpRequest,
        client: ClientConnection,
        body: Body | None,
    ) -> None:
        self._parts, self._request, self._http = parts, request, http
        self._client, self._body = client, body
        self._received = parts.context.loop.time()
        self._tried = 0
        """The version of the fleet's members when it was placed last."""
        self.refusal: NotPlaced
        """Why it was not, while it waits."""

    def start(self) -> ActiveRequest | None:
        """Place it, and send it to its engines; None: it is already answered. Raises NotPlaced."""
        parts, request, body = self._parts, self._request, self._body
        self._tried = parts.fleet.members_version
        placement = parts.picker.place(self._http, request.body, time())
        if body is not None and (changed := placement.take_body()) is not None:
            body = parse_body(changed)
        kind = kind_of(request.method, request.target)
        record = new_record(
            parts.context, request, placement.decision.request_id, kind or PASSTHROUGH
        )
        _trace_under_decision(record, placement)
        parts.placements.add(record, placement)
        placed = PlacedRequest(parts, request, self._client, self._http, body, record)
        return placed.start(placement)

    def refuse(self, refusal: NotPlaced) -> None:
        """Answer with the picker's own."""
        request_id, observer = self._http.headers[headers.REQUEST_ID], self._parts.context.observer
        lines = refuse_generation(observer, self._request, "", request_id)
        _send_reply(self._client, self._request, refusal.reply, lines)

    def try_start(self) -> bool:
        # Each try is a decision that is kept and counted.
        if self._tried == self._parts.fleet.members_version:
            return False
        try:
            active = self.start()
        except NotPlaced as refusal:
            self.refusal = refusal
            return False
        if active is not None:
            self._client.continue_with(active)
        return True

    def give_up(self) -> None:
        self.refuse(self.refusal)

    def abandon(self) -> None:
        """It is counted nowhere."""

    def describe(self) -> dict[str, object]:
        return {
            "request_id": self._http.headers[headers.REQUEST_ID],
            "path": None,
            "phase": "waiting",
            "age_seconds": round(self._parts.context.loop.time() - self._received, 3),
        }


class PreparedRequest:
    """A request whose body the picker prepares before it is placed."""

    survives_half_close = False

    def __init__(
        self,
        client: ClientConnection,
        preparing: AbstractAsyncContextManager[object],
        http: HttpRequest,
        serve: Callable[[HttpRequest], ActiveRequest | None],
    ) -> None:
        """`serve` places the request, which now has its preparation, and starts it."""
        self._client = client
        self._task = asyncio.get_running_loop().create_task(self._run(preparing, http, serve))

    def client_disconnected(self) -> None:
        self._task.cancel()

    def pause_sending(self) -> None:
        """Nothing is sent yet; `ClientConnection.continue_with` tells the request that follows."""

    def resume_sending(self) -> None:
        """As above."""

    async def _run(
        self,
        preparing: AbstractAsyncContextManager[object],
        http: HttpRequest,
        serve: Callable[[HttpRequest], ActiveRequest | None],
    ) -> None:
        try:
            async with preparing as preparation:
                active = serve(replace(http, preparation=preparation))
        except Exception:
            # The top of this task: nothing else would tell the client.
            log.exception("a request was not served because of a bug")
            self._client.abort()
            return
        if active is not None:
            self._client.continue_with(active)


def _http_request(request: Request, client_name: str | None) -> HttpRequest:
    """The request as the picker reads it, without what a client may not set; `client_name`: whose
    API key it has."""
    values = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in request.values.items()
        if name not in _INTERNAL
    }
    if client_name is not None:
        values[headers.CLIENT] = client_name
    # A refusal, which has no placement, names the same id as the decision.
    values[headers.REQUEST_ID] = client_request_id(request)
    return HttpRequest(request.method.decode("latin-1"), request.target.decode("latin-1"), values)


def _trace_under_decision(record: Record, placement: Placement) -> None:
    """Make the spans of the legs children of the decision's span, if there is one."""
    for name, value in placement.mutation.set:
        if name == _TRACEPARENT:
            record.traceparent = value


def _send_reply(client: ClientConnection, request: Request, reply: Reply, lines: bytes) -> None:
    """Send the picker's own answer with header `lines`."""
    lines += b"".join(
        b"%b: %b\r\n" % (name.encode(), value.encode())
        for name, value in reply.headers
        if name != "content-type"
    )
    close, head = not request.keep_alive, request.method == b"HEAD"
    client.write(response_bytes(reply.status, lines, reply.body, close=close, head=head))
    client.finish(keep=not close)
