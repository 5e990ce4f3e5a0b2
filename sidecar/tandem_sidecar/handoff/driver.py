"""Drives one hand-off through `machine` over real connections.

    Exchange(tools, client, generation, engine, decode_name).start()

Everything happens in callbacks of the event loop: an event goes to `machine.step`, whose actions
are performed in `_do` and nowhere else.
"""

import asyncio
import logging
from typing import Final

from tandem_contract.commandline import HostPort
from tandem_contract.timing import Timing

from ..connectors.handover import Attempt, Handover
from ..http.server import Client
from ..observability.record import Phase
from . import events_actions, machine
from .classify import joined_timing
from .context import Generation, Tools
from .decoding import DecodeLeg
from .outbound import engine_request, fresh_id
from .prefilling import Prefills
from .release import release
from .reply import Reply, Served

log = logging.getLogger(__name__)

_FAILURES: Final = frozenset(
    {
        events_actions.DecodeErrored,
        events_actions.DecodeLost,
        events_actions.PrefillFailed,
        events_actions.PrefillUnusable,
    }
)
_BEFORE_DECODE: Final = frozenset({machine.Prefilling, machine.Pairing})


class Exchange:
    """One generation to be split, from the request read to the response written."""

    survives_half_close = False

    def __init__(
        self,
        tools: Tools,
        client: Client,
        generation: Generation,
        engine: HostPort,
        decode_name: str,
    ) -> None:
        self._tools = tools
        self._gen = generation
        self._record = generation.record
        self._engine = engine
        self._decode_name = decode_name
        self._loop = asyncio.get_running_loop()
        self._state: machine.State
        self._reply = Reply(client, generation.request)
        self.answer_bytes = self._reply.body
        self._prefills = Prefills(tools, generation, self)
        self._decode: DecodeLeg | None = None
        self._decode_id = ""
        self._full = False

    def start(self) -> None:
        """Begin; the response is written to the client from callbacks."""
        self._tools.lifecycle.enter(self)
        self._tools.observer.on_request_start(self._record)
        route, settings = self._gen.route, self._gen.settings
        self._perform(machine.begin(len(route.candidates), settings.policy, 1 + settings.retries))

    # What the client's connection and the drain say.

    def client_left(self) -> None:
        self._event(events_actions.ClientLeft())

    def client_full(self) -> None:
        self._full = True
        if self._decode is not None:
            self._decode.pause()

    def client_ready(self) -> None:
        self._full = False
        if self._decode is not None:
            self._decode.resume()

    def drain_expired(self) -> None:
        self._event(events_actions.DrainExpired())

    def describe(self) -> dict[str, object]:
        return {
            "request_id": self._gen.request_id,
            "path": self._state.path.value,
            "phase": type(self._state).__name__.lower(),
            "age_seconds": round(self._loop.time() - self._record.received, 3),
        }

    # What the legs say.

    def prefilled(self, event: events_actions.PrefillEvent) -> None:
        if isinstance(event, events_actions.PrefillAnswered) and self._decode is not None:
            self._decode.cached = event.handover.cached_tokens
        self._event(event)

    def decoded(self, event: events_actions.DecodeEvent) -> None:
        self._event(event)

    def unwanted(self, attempt: Attempt, handover: Handover) -> None:
        """An aborted prefill had been answered already."""
        release(self._tools, self._gen, self._engine, attempt.engine_id, handover)

    # The machine.

    def _event(self, event: events_actions.Event) -> None:
        if type(self._state) is not machine.Ended:
            if type(event) in _FAILURES:
                self._log_failure(event)
            self._perform(machine.step(self._state, event))

    def _perform(self, step: machine.Step) -> None:
        """Act on a step, and on what its last action found at once."""
        found: events_actions.Event | None
        while True:
            self._state, actions = step
            if self._prefills.deadline and type(self._state) not in _BEFORE_DECODE:
                self._prefills.settled()
            found = None
            for action in actions:
                found = self._do(action)
            if found is None:
                break
            step = machine.step(self._state, found)
        if type(self._state) is machine.Ended:
            self._end(self._state)

    def _do(self, action: events_actions.Action) -> events_actions.Event | None:  # noqa: C901 - one line for each
        match action:
            case events_actions.PassDecode():
                return self._pass_decode()
            case events_actions.StartDecode(handover):
                self._start_decode(handover)
            case events_actions.StartPrefill(candidate, last):
                return self._prefills.start(candidate, last=last)
            case events_actions.PassPrefill():
                self._pass_prefill()
            case events_actions.AbortPrefill():
                self._prefills.abort()
            case events_actions.AbortDecode():
                if self._decode is not None:
                    self._decode.abort()
            case events_actions.Release(handover) if self._tools.connector.light_release:
                release(self._tools, self._gen, self._engine, self._attempt_id, handover)
            case events_actions.Fail(status, message, wait):
                self._told(status)
                self._reply.error(
                    status, message, self._served(), close=self._closing, retry_after=wait
                )
            case events_actions.Cut(status, message):
                between = self._decode is not None and self._decode.between_chunks
                self._reply.cut(status, message, between_chunks=between)
            case events_actions.CountError(phase):
                self._record.errors += (phase,)
        return None

    @property
    def _attempt_id(self) -> str:
        leg = self._prefills.leg
        return leg.attempt.engine_id if leg is not None else ""

    def _start_decode(self, handover: Handover | None) -> None:
        gen, record = self._gen, self._record
        if handover is None:
            engine_id, body = fresh_id(gen.request_id), gen.body.data
            self._prefills.timing = None
            cached, recode = None, False
        else:
            engine_id, connector = self._attempt_id, self._tools.connector
            body = connector.decode(gen.kind, gen.body, handover)
            cached = handover.cached_tokens
            recode = cached is not None or connector.together
        self._decode_id = engine_id
        seen = record.leg(Phase.DECODE, self._decode_name, engine_id, self._loop.time())
        self._decode = DecodeLeg(
            self._tools,
            self,
            gen.kind,
            self._engine,
            seen,
            http10=gen.request.http10,
            recode=recode,
        )
        self._decode.cached = cached
        request = engine_request(gen.request, self._engine, seen, body)
        reads_kv = handover is not None
        waits = reads_kv and self._tools.connector.waits_without_end
        patience = gen.settings.push_timeout if waits else None
        self._decode.send(gen.request.method, request, reads_kv=reads_kv, patience=patience)
        if self._full:
            self._decode.pause()

    # The answer.

    def _pass_decode(self) -> events_actions.Event | None:
        """Pass the answer on; the event is its end, when that was held already."""
        leg = self._decode
        head = leg.pass_on() if leg is not None else None
        if leg is None or head is None:
            return None
        self._told(head.status)
        timing = joined_timing(self._prefills.timing, leg.timing)
        self._reply.begin(head, self._served(timing), close=self._closing)
        if leg.give_held():
            return events_actions.DecodeEnded()
        if not self._full:
            leg.resume()
        return None

    def _pass_prefill(self) -> None:
        answer = self._prefills.answer
        if answer is not None:
            self._told(answer.head.status)
            self._reply.whole(answer, self._served(), close=self._closing)

    def _told(self, status: int) -> None:
        self._record.status, self._record.first_byte = status, self._loop.time()

    @property
    def _closing(self) -> bool:
        return self._tools.lifecycle.draining

    def _served(self, timing: Timing | None = None) -> Served:
        return Served(
            request_id=self._gen.request_id,
            path=self._state.path,
            decode=self._decode_name,
            prefill=self._prefills.name,
            timing=timing if self._gen.route.routed else None,
        )

    def _log_failure(self, event: events_actions.Event) -> None:
        """One line for each failed attempt."""
        if isinstance(event, events_actions.DecodeErrored):
            answer = self._decode.answer if self._decode is not None else None
            status = answer.status if answer is not None else 0
            detail = f"decode by {self._engine}: answered with an error ({status})"
            self._warn(self._decode_id, detail)
        elif isinstance(event, events_actions.DecodeLost):
            self._warn(self._decode_id, event.detail)
        elif isinstance(event, events_actions.PrefillFailed | events_actions.PrefillUnusable):
            self._warn(self._attempt_id, event.detail)

    def _warn(self, engine_id: str, what: str) -> None:
        ids = {"request_id": self._gen.request_id, "engine_id": engine_id}
        log.warning("%s", what, extra=ids)

    def _end(self, state: machine.Ended) -> None:
        record = self._record
        record.path, record.outcome, record.ended = state.path, state.outcome, self._loop.time()
        self._tools.lifecycle.leave(self)
        self._tools.observer.on_request_end(record)
        # The parts know one another: only the collector would free them, and the bodies with them.
        self._decode = self._prefills.leg = None
        del self._prefills
