"""Starts requests whose engine is chosen: `proxy` chooses its pod's, the router any."""

import asyncio
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from tandem_contract import endpoints
from tandem_contract.commandline import HostPort
from tandem_contract.paths import ErrorPhase, RoutingPath
from tandem_contract.prompt_length import LONGEST_TOKEN, listed_length, over_length
from tandem_contract.request_kinds import RequestKind

from ..bodies.kinds import single_engine_reason
from ..bodies.parse import Body, clean_passthrough
from ..http.answers import Answer, Collector, NoAnswer
from ..http.messages import Request, request_bytes
from ..http.server import ActiveRequest, ClientConnection
from ..http.upstream import Call
from ..observability.record import Record
from ..security.route import Route
from .context import Failover, GenerationRequest, SidecarContext
from .driver import HandoffDriver
from .forward import SingleEngineGeneration
from .machine import DRAIN_EXPIRED_MESSAGE
from .outbound import authorization
from .passthrough import Passthrough
from .reply import refuse_generation, send_error

LIST_TIMEOUT: Final = 1.0
"""Seconds to wait for an engine's list of models. Too short: a busy engine tokenizes what its model
cannot take. Too long: long prompts wait for an engine that does not answer."""


def start_generation(
    context: SidecarContext,
    client: ClientConnection,
    generation: GenerationRequest,
    engine: HostPort,
    decode_name: str,
    *,
    drop: Callable[[], None] = lambda: None,
) -> ActiveRequest:
    """Serve `generation` as its route says, decoding on `engine`, whose name is `decode_name`.

    `drop` is called if no engine is to get it: its text cannot fit the model's length, or the
    client left before that was known.
    """
    # A request that was placed anew was checked before.
    characters = 0 if generation.record.legs else generation.long_text()
    active, start = _served(context, client, generation, engine, decode_name)
    if not characters:
        start()
        return active

    def go() -> None:
        # Before the start, which may answer and so end the request.
        client.continue_with(active)
        start()
        if check.is_paused:
            active.pause_sending()

    check = LengthCheck(context, client, generation, engine, decode_name, characters)
    check.start(go, drop)
    return check


def _served(
    context: SidecarContext,
    client: ClientConnection,
    generation: GenerationRequest,
    engine: HostPort,
    decode_name: str,
) -> tuple[ActiveRequest, Callable[[], None]]:
    """What serves `generation`, and the function that starts it."""
    record, chosen = generation.record, generation.route
    record.path, record.reason, record.ignored = chosen.path, chosen.reason, chosen.ignored
    if chosen.error is not None:
        record.errors = (ErrorPhase.ORCHESTRATION,)
    if chosen.path is RoutingPath.PREFILL_THEN_DECODE:
        driver = HandoffDriver(context, client, generation, engine, decode_name)
        return driver, driver.start
    forward = SingleEngineGeneration(
        context,
        client,
        generation.request,
        record,
        generation.failover,
        kind=generation.kind,
        routed=chosen.routed,
        may_exhaust=generation.may_exhaust,
    )
    body, rank = generation.body.data, chosen.decode_rank
    return forward, lambda: forward.start(engine, decode_name, body, rank=rank)


def start_passthrough(
    context: SidecarContext,
    client: ClientConnection,
    request: Request,
    engine: HostPort,
    backend: str,
    *,
    record: Record | None = None,
    failover: Failover | None = None,
) -> ActiveRequest | None:
    """Forward `request`, which generates nothing, to `engine`, whose name is `backend`; None: it is
    already answered. `record`: None makes one."""
    try:
        content_type = request.single(b"content-type") or b""
        body = clean_passthrough(request.body, content_type)
    except ValueError as err:
        send_error(client, request, 400, str(err), b"", close=False)
        return None
    forward = Passthrough(context, client, request, record=record, failover=failover)
    forward.start(engine, backend, body)
    return forward


def apply_single_engine_rules(chosen: Route, kind: RequestKind, body: Body) -> Route:
    """The route, without a split if one engine must serve the request alone. Raises BadBody."""
    if chosen.path is not RoutingPath.PREFILL_THEN_DECODE:
        return chosen
    reason = single_engine_reason(kind, body)
    if reason is None:
        return chosen
    return replace(chosen, path=RoutingPath.UNIFIED, reason=reason, candidates=())


class LengthCheck:
    """Serves a generation whose text few models take, until its engine said whether its model does.

        check.start(go, drop)     calls `go` if it may fit, else answers the client and calls `drop`

    The engine is asked for each such text: nothing is kept that may be out of date, and all other
    requests pay a comparison of their length. Where it does not tell within `LIST_TIMEOUT`, nothing
    is refused.
    """

    survives_half_close = False

    def __init__(  # noqa: PLR0917 - the request's parts, in their order
        self,
        context: SidecarContext,
        client: ClientConnection,
        generation: GenerationRequest,
        engine: HostPort,
        decode_name: str,
        characters: int,
    ) -> None:
        """`characters`: of the text that the model has to take, for certain."""
        self._context, self._client, self._generation = context, client, generation
        self._engine, self._decode_name, self._characters = engine, decode_name, characters
        self.is_paused = False
        """Whether the client takes no data now: it has not read the answer before."""
        self._go: Callable[[], None]
        self._drop: Callable[[], None]
        self._timer: asyncio.TimerHandle
        self._call: Call | None = None

    def start(self, go: Callable[[], None], drop: Callable[[], None]) -> None:
        """Ask the engine. `go` sends the request on; `drop`: it is not sent to any engine."""
        self._go, self._drop = go, drop
        context, engine = self._context, self._engine
        lines = [
            (b"host", str(engine).encode()),
            *authorization(context, engine, self._generation.request),
        ]
        context.lifecycle.add(self)
        self._timer = asyncio.get_running_loop().call_later(LIST_TIMEOUT, self._finish, None)
        request = request_bytes(b"GET", endpoints.MODELS.encode(), lines, b"")
        self._call = context.pool.send(engine, b"GET", request, Collector(self._take_answer))

    def client_disconnected(self) -> None:
        self._stop()
        self._drop()

    def pause_sending(self) -> None:
        self.is_paused = True

    def resume_sending(self) -> None:
        self.is_paused = False

    def drain_expired(self) -> None:
        self._stop()
        self._refuse(503, DRAIN_EXPIRED_MESSAGE)

    def describe(self) -> dict[str, object]:
        return {"request_id": self._generation.request_id, "phase": "checking_length"}

    def _take_answer(self, answer: Answer | NoAnswer) -> None:
        self._call = None
        if isinstance(answer, Answer) and answer.head.status == 200:
            model = self._generation.body.members.get("model")
            self._finish(listed_length(answer.body, model))
        else:
            self._finish(None)

    def _finish(self, length: int | None) -> None:
        """`length`: tokens that the model takes; None: not known."""
        self._stop()
        problem = None
        if length is not None:
            problem = over_length(self._characters, length, LONGEST_TOKEN)
        if problem is None:
            self._go()
        else:
            self._refuse(400, problem)

    def _refuse(self, status: int, message: str) -> None:
        self._drop()
        request, request_id = self._generation.request, self._generation.request_id
        lines = refuse_generation(self._context.observer, request, self._decode_name, request_id)
        send_error(self._client, request, status, message, lines, close=False)

    def _stop(self) -> None:
        self._timer.cancel()
        if self._call is not None:
            self._call.abort()
            self._call = None
        self._context.lifecycle.remove(self)
