"""Drives one generation request through `machine` over real connections.

    Exchange(tools, client, generation, engine).start()

Everything happens in callbacks of the event loop: an event goes to `machine.step`, whose actions
are performed in `_do` and nowhere else.
"""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from tandem_contract.commandline import HostPort
from tandem_contract.paths import RoutingPath
from tandem_contract.timing import Timing

from ..bodies.parse import Body, Kind
from ..connectors.handover import Attempt, Handover, Outgoing
from ..http.collect import Answer, Collector, NoAnswer
from ..http.messages import Request, ResponseHead
from ..http.server import Client
from ..http.upstream import Call, Pool
from ..seeing.metrics import Metrics
from ..settings import Settings
from ..trust.route import Route
from . import machine, moves
from .legs import DecodeLeg, joined_timing, prefill_event, read_timing
from .lifecycle import Lifecycle
from .outbound import AUTHORIZATION, engine_request, fresh_id
from .release import Release
from .reply import Reply, Served

log = logging.getLogger(__name__)


class Connector(Protocol):
    """How the two legs of a hand-off are written."""

    def prefill(self, kind: Kind, body: Body, attempt: Attempt) -> bytes:
        """Body of the prefill leg."""

    def handover(self, attempt: Attempt, answer: bytes) -> Handover:
        """What the prefill answer hands over. Raises ParamsUnusable."""

    def decode(self, kind: Kind, body: Body, handover: Handover) -> bytes:
        """Body of the decode leg."""

    def release(self, kind: Kind, body: Body, handover: Handover) -> Outgoing:
        """The request that has the prefill pod free what nobody will read."""


@dataclass(slots=True)
class Tools:
    """What every exchange of a process shares."""

    settings: Settings
    """Replaced by a reload: a request keeps those it began with."""
    pool: Pool
    connector: Connector
    metrics: Metrics
    lifecycle: Lifecycle


@dataclass(frozen=True, slots=True)
class Generation:
    """A request that generates, understood."""

    request: Request
    request_id: str
    kind: Kind
    body: Body
    route: Route


class Exchange:
    """One generation, from the request read to the response written."""

    survives_half_close = False

    def __init__(
        self, tools: Tools, client: Client, generation: Generation, engine: HostPort
    ) -> None:
        self._tools = tools
        self._settings = tools.settings
        self._gen = generation
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._state: machine.State
        self._reply = Reply(client, generation.request)
        self._prefill: Call | None = None
        self._decode: Call | None = None
        self._leg: DecodeLeg | None = None
        self._leg_started = 0.0
        self._attempt_id = ""
        self._attempt: Attempt
        self._prefiller = ""
        self._prefill_answer: Answer | None = None
        self._prefill_timing: Timing | None = None
        self._timing = Timing()
        self._timer: asyncio.TimerHandle | None = None
        self._full = False

    def start(self) -> None:
        """Begin; the response is written to the client from callbacks."""
        self._tools.lifecycle.enter(self)
        self._tools.metrics.in_flight.inc()
        route = self._gen.route
        attempts = min(len(route.candidates), 1 + self._settings.retries)
        self._perform(machine.begin(route.path, attempts, self._settings.policy))

    # What the client's connection and the drain say.

    def client_left(self) -> None:
        self._event(moves.ClientLeft())

    def client_full(self) -> None:
        self._full = True
        if self._decode is not None:
            self._decode.pause()

    def client_ready(self) -> None:
        self._full = False
        if self._decode is not None:
            self._decode.resume()

    def drain_expired(self) -> None:
        self._event(moves.DrainExpired())

    def describe(self) -> dict[str, object]:
        return {
            "request_id": self._gen.request_id,
            "path": self._state.path.value,
            "phase": type(self._state).__name__.lower(),
            "age_seconds": round(self._loop.time() - self._started, 3),
        }

    # What the decode leg says.

    def decode_head(self, head: ResponseHead) -> None:
        """The engine took the request, or failed at it."""
        timing = read_timing(head)
        if timing.transfer is not None:
            self._tools.metrics.transfer.observe(timing.transfer)
        self._timing = joined_timing(self._prefill_timing, timing)
        self._event(moves.DecodeErrored() if head.status >= 500 else moves.DecodeAdmitted())

    def decode_first(self, *, error: bool) -> None:
        """The first bytes to pass on are there; `error`: a stream that begins with one."""
        self._event(moves.DecodeErrored() if error else moves.DecodeStarted())

    def decode_body(self, data: bytes, *, last: bool) -> None:
        """Bytes of the answer being passed on."""
        if last:
            seconds = self._loop.time() - self._leg_started
            self._tools.metrics.decode(self._decode_name, seconds)
        self._reply.body(data, last=last)
        if last:
            self._event(moves.DecodeEnded())

    def decode_lost(self, detail: str) -> None:
        self._event(moves.DecodeLost(f"decode failed: {detail}"))

    # The machine.

    def _event(self, event: moves.Event) -> None:
        if not isinstance(self._state, machine.Ended):
            self._log_failure(event)
            self._perform(machine.step(self._state, event))

    def _perform(self, step: machine.Step) -> None:
        self._state, actions = step
        if self._timer is not None and not isinstance(self._state, machine.Prefilling):
            self._timer.cancel()
            self._timer = None
        for action in actions:
            self._do(action)
        if isinstance(self._state, machine.Ended):
            self._end(self._state)

    def _do(self, action: moves.Action) -> None:  # noqa: C901 - one line for each action
        match action:
            case moves.StartPrefill(candidate, last):
                self._start_prefill(candidate, last=last)
            case moves.StartDecode(handover):
                self._start_decode(handover)
            case moves.AbortPrefill():
                if self._prefill is not None:
                    self._prefill.abort()
            case moves.AbortDecode():
                self._abort_decode()
            case moves.Release(handover):
                self._release(handover)
            case moves.PassPrefill():
                self._pass_prefill()
            case moves.PassDecode():
                self._pass_decode()
            case moves.Fail(status, message):
                self._reply.error(status, message, self._served(), close=self._closing)
            case moves.Cut(status, message):
                between = self._leg is not None and self._leg.between_chunks
                self._reply.cut(status, message, between_chunks=between)
            case moves.CountError(phase):
                self._tools.metrics.errors[phase].inc()
            case moves.CountRetry():
                self._tools.metrics.retries.inc()

    def _start_prefill(self, index: int, *, last: bool) -> None:
        """Ask candidate `index`; making a connection may take its share of the time left."""
        settings, gen = self._settings, self._gen
        now = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(settings.prefill_timeout, self._deadline)
        left = self._timer.when() - now
        candidate = gen.route.candidates[index]
        self._attempt_id = fresh_id(gen.request_id)
        self._prefiller, self._leg_started = candidate.name, now
        self._attempt = Attempt(self._attempt_id, candidate.address)
        body = self._tools.connector.prefill(gen.kind, gen.body, self._attempt)
        self._prefill = self._tools.pool.send(
            candidate.address,
            gen.request.method,
            engine_request(gen.request, candidate.address, self._attempt_id, body, prefill=True),
            Collector(self._prefill_done),
            connect_timeout=left + 1 if last else left / 2,
        )

    def _deadline(self) -> None:
        timeout = self._settings.prefill_timeout
        detail = f"{self._prefiller}: no prefill within {timeout:.3g}s"
        self._event(moves.PrefillFailed(moves.Cause.DEADLINE, detail))

    def _prefill_done(self, answer: Answer | NoAnswer) -> None:
        self._prefill = None
        handover = partial(self._tools.connector.handover, self._attempt)
        event = prefill_event(answer, handover, self._prefiller)
        if isinstance(answer, Answer):
            self._prefill_answer = answer
        if isinstance(event, moves.PrefillAnswered) and self._prefill_answer is not None:
            self._prefill_timing = read_timing(self._prefill_answer.head)
            self._tools.metrics.prefill(self._prefiller, self._loop.time() - self._leg_started)
        self._event(event)

    def _start_decode(self, handover: Handover | None) -> None:
        gen = self._gen
        if handover is None:
            self._attempt_id = fresh_id(gen.request_id)
            self._prefill_timing = None
            body = gen.body.data
        else:
            body = self._tools.connector.decode(gen.kind, gen.body, handover)
        self._leg_started = self._loop.time()
        self._leg = DecodeLeg(self, payload_only=gen.request.http10)
        request = engine_request(gen.request, self._engine, self._attempt_id, body)
        self._decode = self._tools.pool.send(self._engine, gen.request.method, request, self._leg)
        if self._full:
            self._decode.pause()

    def _abort_decode(self) -> None:
        if self._leg is not None:
            self._leg.drop()
        if self._decode is not None:
            self._decode.abort()

    def _release(self, handover: Handover) -> None:
        settings, gen = self._settings, self._gen
        sent = [pair for pair in gen.request.headers if pair[0] == AUTHORIZATION]
        Release(self._tools.lifecycle, gen.request_id, settings.kv_transfer_timeout).send(
            self._tools.pool,
            self._engine,
            sent,
            self._tools.connector.release(gen.kind, gen.body, handover),
        )

    # The answer.

    def _pass_decode(self) -> None:
        if self._leg is not None and self._leg.answer is not None:
            self._leg.passing = True
            self._reply.begin(self._leg.answer, self._served(self._timing), close=self._closing)

    def _pass_prefill(self) -> None:
        if self._prefill_answer is not None:
            self._reply.whole(self._prefill_answer, self._served(), close=self._closing)

    @property
    def _closing(self) -> bool:
        return self._tools.lifecycle.draining

    @property
    def _decode_name(self) -> str:
        return self._settings.pod_name or self._gen.route.decode_name or str(self._engine)

    def _served(self, timing: Timing | None = None) -> Served:
        return Served(
            request_id=self._gen.request_id,
            path=self._state.path,
            decode=self._decode_name,
            prefill=self._prefiller,
            timing=timing if self._gen.route.routed else None,
        )

    def _log_failure(self, event: moves.Event) -> None:
        """One line for each failed attempt."""
        if isinstance(event, moves.DecodeErrored):
            status = self._leg.answer.status if self._leg and self._leg.answer else 0
            self._warn(f"decode by {self._engine}: answered with an error ({status})")
        elif isinstance(event, moves.PrefillFailed | moves.PrefillUnusable | moves.DecodeLost):
            self._warn(event.detail)

    def _warn(self, what: str) -> None:
        log.warning("request %s (engine id %s): %s", self._gen.request_id, self._attempt_id, what)

    def _end(self, state: machine.Ended) -> None:
        metrics = self._tools.metrics
        self._tools.lifecycle.leave(self)
        metrics.in_flight.dec()
        metrics.requests[state.path].inc()
        if state.path is RoutingPath.FALLBACK:
            metrics.fallbacks.inc()
