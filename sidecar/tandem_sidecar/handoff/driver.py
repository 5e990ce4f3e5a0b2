"""Drives one hand-off through `machine` over real connections.

    HandoffDriver(context, client, generation, engine, decode_name).start()

Everything happens in callbacks of the event loop: each event goes to `machine.step`, and `_act`
alone performs the actions it returns.
"""

import logging
from functools import partial
from math import inf
from typing import Final

from tandem_contract.commandline import HostPort
from tandem_contract.paths import ErrorPhase
from tandem_contract.timing import UNKNOWN, Timing
from tandem_http1.answers import CutPoint, Relay
from tandem_http1.client import ClientConnection
from tandem_http1.messages import ResponseHead

from ..connectors.protocol import HandoffAttempt, KvHold
from ..observability.record import Outcome, Phase
from . import events_actions, machine
from .classify import FAILURES, failure_detail
from .context import GenerationRequest, SidecarContext
from .decoding import DecodeLeg
from .outbound import engine_request, new_attempt_id, release_kv
from .prefilling import PrefillAttempts
from .reply import ANSWER_DROPPED, NO_RETRY, ServedBy, not_sent, send_error

log = logging.getLogger(__name__)

_PREFILL_IN_PROGRESS: Final = frozenset({events_actions.Prefilling, events_actions.BothLegs})
_PHASES: Final = {
    events_actions.Prefilling: "prefilling",
    events_actions.BothLegs: "pairing",
    events_actions.Decoding: "decoding",
    events_actions.Answering: "answering",
    events_actions.Ended: "ended",
}
"""The states as `/state` names them."""


class HandoffDriver:
    """One generation that two engines serve, from the request read to the response written."""

    __deletable__ = ("_attempts",)
    """Of the attributes of a compiled class, only these can be deleted."""
    survives_half_close = False

    def __init__(
        self,
        context: SidecarContext,
        client: ClientConnection,
        generation: GenerationRequest,
        engine: HostPort,
        decode_name: str,
    ) -> None:
        self._context = context
        self._generation = generation
        self._record = generation.record
        self._engine = engine
        self._decode_name = decode_name
        self._loop = context.loop
        self._state: events_actions.State
        self._client = client
        kept = generation.kept
        self._relay = Relay(client, generation.request) if kept is None else kept
        # The relay's own method, bound once, because every piece of the answer passes through it.
        self.write_answer = self._relay.body
        self._attempts = PrefillAttempts(context, generation, self, engine)
        self._decode: DecodeLeg | None = None
        self._decode_id = ""
        # Whether the client reads too slowly. A decode leg that starts meanwhile begins paused.
        self._client_is_slow = False
        self._taken_over = False
        self._is_completed = False
        """Whether the end of an answer that broke off was made up."""

    def start(self) -> None:
        """Begin the hand-off; callbacks write the response to the client."""
        self._context.lifecycle.add(self)
        # Before the first leg: tracing decides here which `traceparent` the legs get.
        self._context.observer.on_request_start(self._record)
        route, settings = self._generation.route, self._generation.settings
        count, attempts = len(route.candidates), 1 + settings.retries
        has_left = route.left is not None
        self._perform(machine.begin(count, settings.policy, attempts, has_left=has_left))

    # From the client's connection and the drain.

    def client_disconnected(self) -> None:
        self._handle(events_actions.ClientDisconnected())

    def pause_sending(self) -> None:
        self._client_is_slow = True
        if self._decode is not None:
            self._decode.pause()

    def resume_sending(self) -> None:
        self._client_is_slow = False
        if self._decode is not None:
            self._decode.resume()

    def drain_expired(self) -> None:
        self._handle(events_actions.DrainExpired())

    def engine_drains(self, engine: HostPort | None) -> None:
        generation = self._generation
        if generation.kept is None or engine not in (None, self._engine):
            return
        again = partial(self.engine_drains, engine)
        if generation.failover is not None and generation.failover.try_move(again):
            self._taken_over = True
            self._handle(events_actions.DecodeTakenOver())

    def serves_stream(self, plan: str) -> bool:
        """As of `generation.OwnGeneration`."""
        generation = self._generation
        is_stream = type(self._state) is events_actions.Answering and generation.kept is None
        return is_stream and generation.route.plan == plan

    def free_engine(self) -> None:
        """As of `generation.OwnGeneration`."""
        self._abort_decode()
        self._decode = None

    def describe(self) -> dict[str, object]:
        return {
            "request_id": self._generation.request_id,
            "path": self._state.path.value,
            "phase": _PHASES[type(self._state)],
            "age_seconds": round(self._loop.time() - self._record.received, 3),
        }

    # From the legs.

    def on_prefill_event(self, event: events_actions.PrefillEvent) -> None:
        # Concurrent legs: the decode leg was sent before the prefill knew its cached tokens.
        if isinstance(event, events_actions.PrefillAnswered) and self._decode is not None:
            self._decode.cached = event.kv_hold.cached_tokens
            self._decode.created = event.kv_hold.created_tokens
            if self._reads_stream:
                self._decode.prefill_answered = self._loop.time()
                # Only from now on the transfer is all that the decode engine waits for.
                self._decode.limit_transfer(self._generation.kv_transfer_timeout)
        self._handle(event)

    def on_decode_event(self, event: events_actions.DecodeEvent) -> None:
        self._handle(event)

    def try_take_over(self) -> bool:
        generation = self._generation
        may_move = generation.kept is not None or not self._relay.written
        return may_move and not generation.may_exhaust() and self._try_take_over()

    def on_taken_over(self, problem: str) -> None:
        self._record.errors += (ErrorPhase.DECODE,)
        self._note_failure(events_actions.DecodeLost(problem))
        self._handle(events_actions.DecodeTakenOver())

    def release_unused_kv(self, attempt: HandoffAttempt, kv_hold: KvHold) -> None:
        release_kv(self._context, self._generation, self._engine, attempt.attempt_id, kv_hold)

    # The machine.

    def _handle(self, event: events_actions.Event) -> None:
        # `_end` has dropped the legs, so an event that comes later has nothing to act on.
        if type(self._state) is not events_actions.Ended:
            # By type, because a failing isinstance check of a Struct is slow.
            if type(event) in FAILURES:
                self._note_failure(event)
            self._perform(machine.step(self._state, event))

    def _note_failure(self, event: events_actions.Event) -> None:
        self._log_failure(event)
        if self._reads_stream and self._attempts.leg is not None:
            self._context.forget_source(self._attempts.leg.attempt.prefill)

    def _perform(self, step: machine.Step) -> None:
        """Perform the actions of a step, and of the steps that its last action causes at once."""
        next_event: events_actions.Event | None
        while True:
            self._state, actions = step
            # The deadline bounds the prefill alone: if its timer fired later, the machine would
            # raise IllegalStep.
            if self._attempts.deadline and type(self._state) not in _PREFILL_IN_PROGRESS:
                self._attempts.cancel_deadline()
            # Only the last action of a step starts something that can fail at once.
            next_event = None
            for action in actions:
                next_event = self._act(action)
            if next_event is None:
                break
            step = machine.step(self._state, next_event)
        if type(self._state) is events_actions.Ended:
            self._end(self._state)

    def _act(self, action: events_actions.Action) -> events_actions.Event | None:  # noqa: C901 - one line for each
        match action:
            case events_actions.ForwardDecodeAnswer(decode_failed):
                return self._forward_decode_answer(decode_failed=decode_failed)
            case events_actions.StartDecode(kv_hold):
                self._start_decode(kv_hold)
            case events_actions.StartPrefill(candidate, last):
                return self._attempts.start(candidate, last=last)
            case events_actions.AbortPrefill():
                self._attempts.abort()
            case events_actions.AbortDecode():
                self._abort_decode()
            case events_actions.ReleaseKv(kv_hold):
                # A release that an engine runs would register a second time under the id of a
                # decode leg that was sent; see `connectors.nixl_push`.
                if self._context.connector.core.release_is_notification:
                    attempt_id = self._attempt_id
                    release_kv(self._context, self._generation, self._engine, attempt_id, kv_hold)
            case events_actions.SendError() as error:
                self._send_error(error)
            case events_actions.CutAnswer() as cut:
                self._cut_answer(cut)
            case events_actions.CountError(phase):
                self._record.errors += (phase,)
        return None

    def _cut_answer(self, cut: events_actions.CutAnswer) -> None:
        """End an answer that breaks off, unless all of it was there but the end, or its engine
        failed and another one goes on with it."""
        kept, decode = self._generation.kept, self._decode
        if kept is not None and (rest := kept.missing_end()) is not None:
            self._is_completed = True
            kept.body(rest, last=True)
        elif self._may_take_over(cut) and self._try_go_on(cut.message):
            self._abort_decode()
        else:
            at = CutPoint.WITHIN_EVENT if decode is None else decode.cut_point()
            self._relay.cut(cut.status, self._record.cut_message(cut.message), at)

    def _may_take_over(self, cut: events_actions.CutAnswer) -> bool:
        """Whether another engine may go on with the answer."""
        return cut.decode_failed and self._generation.kept is not None and not self._has_exhausted

    @property
    def _has_exhausted(self) -> bool:
        """Whether the prompt may be what hung the decode engine, and would hang another."""
        has_hung = self._decode is not None and self._decode.is_hung
        return has_hung and self._generation.may_exhaust()

    def _abort_decode(self) -> None:
        if self._decode is not None:
            self._decode.abort()

    @property
    def _attempt_id(self) -> str:
        leg = self._attempts.leg
        return leg.attempt.attempt_id if leg is not None else ""

    def _start_decode(self, kv_hold: KvHold | None) -> None:
        generation, record = self._generation, self._record
        connector = self._context.connector
        if kv_hold is None:
            # The prefill, if there was one, had no part in this answer: drop its timing.
            attempt_id, body = new_attempt_id(generation.request_id), generation.body.data
            self._attempts.timing = None
            cached, created, rewrite_usage = None, None, False
        else:
            # Both legs have the attempt's id: vLLM's connectors match them by it.
            attempt_id = self._attempt_id
            body = connector.core.decode_body(generation.kind, generation.body, kv_hold)
            cached, created = kv_hold.cached_tokens, kv_hold.created_tokens
            # With concurrent legs only the prefill's answer, which comes later, tells the counts.
            is_concurrent = type(self._state) is events_actions.BothLegs
            rewrite_usage = is_concurrent or cached is not None or created is not None
        self._decode_id = attempt_id
        leg = record.leg(Phase.DECODE, self._decode_name, attempt_id, self._loop.time())
        leg.streamed = self._reads_stream
        self._decode = DecodeLeg(
            self._context,
            self,
            generation.kind,
            self._engine,
            leg,
            http10=generation.request.http10,
            rewrite_usage=rewrite_usage,
            kept=generation.kept,
            is_movable=generation.failover is not None and generation.failover.resumes,
        )
        self._decode.cached, self._decode.created = cached, created
        rank = generation.route.decode_rank
        added = self._context.authorization(self._engine)
        request = engine_request(generation.request, self._engine, leg, body, added, rank=rank)
        reads_kv = kv_hold is not None
        may_wait = reads_kv and connector.core.decode_may_wait_forever
        timeout = generation.settings.push_timeout if may_wait else None
        self._decode.send(
            generation.request.method,
            request,
            reads_kv=reads_kv,
            rank=rank,
            output_timeout=timeout,
            transfer_timeout=self._transfer_timeout if reads_kv else None,
        )
        if self._client_is_slow:
            self._decode.pause()

    @property
    def _reads_stream(self) -> bool:
        """Whether the decode engine reads KV that the prefill engine computes meanwhile."""
        leg, both = self._attempts.leg, type(self._state) is events_actions.BothLegs
        return both and leg is not None and leg.attempt.source is not None

    @property
    def _transfer_timeout(self) -> float | None:
        """Seconds that the KV of a decode leg which is being sent may take to arrive."""
        if type(self._state) is not events_actions.BothLegs:
            return self._generation.kv_transfer_timeout
        # The KV does not exist before the prefill has ended. Only of a stream the engine counts it
        # among that which is being loaded.
        return inf if self._reads_stream else None

    # The answer.

    def _forward_decode_answer(self, *, decode_failed: bool) -> events_actions.Event | None:
        """Forward the answer; returns its end as an event if it has arrived completely."""
        if decode_failed and self._try_take_over():
            return events_actions.DecodeTakenOver()
        leg = self._decode
        head = leg.start_forwarding() if leg is not None else None
        if leg is None or head is None:
            return None
        timing = self._timing(leg)
        if self._relay.written:
            if head.status != 200 or not head.event_stream:
                # The rest of a stream can only be a stream.
                return events_actions.DecodeLost(
                    f"decode failed: answered with an error ({head.status})"
                )
            self._context.observer.on_rest(self._record, head)
        else:
            self._record_response(head.status, head)
        lines = self._served_by(timing).encode()
        self._relay.begin(head, ANSWER_DROPPED, lines, close=self._closing)
        # The whole answer was there. Its end is returned and not handled here, because the step
        # whose action this is has not ended yet.
        if (ended := leg.flush_early_bytes()) is not None:
            return ended
        # The leg paused its engine when it held back the first bytes.
        if not self._client_is_slow:
            leg.resume()
        return None

    def _timing(self, leg: DecodeLeg) -> Timing:
        """What the answer's head tells the router. A decode engine that computed the prompt itself
        is measured like one that serves alone."""
        prefill = self._attempts.timing
        timing = leg.measure() if prefill is None else leg.merge(prefill)
        self._record.timing = timing
        return timing

    def _send_error(self, error: events_actions.SendError) -> None:
        may_exhaust = error.may_exhaust or (error.decode_failed and self._has_exhausted)
        if error.decode_failed and not may_exhaust and self._try_go_on(error.message):
            return
        if self._relay.written:
            message = self._record.cut_message(error.message)
            self._relay.cut(error.status, message, CutPoint.BETWEEN_CHUNKS)
            return
        # With the times of a prefill the router knows that the decode engine failed.
        timing = self._record.timing = self._attempts.timing
        lines = self._served_by(timing or UNKNOWN).encode() + (NO_RETRY if may_exhaust else b"")
        if error.decode_failed and self._is_unsent:
            lines += not_sent(self._generation.request)
        self._record_response(error.status)
        send_error(
            self._client,
            self._generation.request,
            error.status,
            error.message,
            lines,
            close=self._closing,
            retry_after=error.retry_after,
        )

    @property
    def _is_unsent(self) -> bool:
        """Whether the decode engine got nothing of the request, by any of its legs."""
        legs = [leg for leg in self._record.legs if leg.phase is Phase.DECODE]
        return len(legs) == 1 and self._decode is not None and self._decode.is_unsent

    def _record_response(self, status: int, head: ResponseHead | None = None) -> None:
        record = self._record
        record.path = self._state.path
        record.status, record.first_byte = status, self._loop.time()
        self._context.observer.on_answer(record, head)

    @property
    def _closing(self) -> bool:
        return self._context.lifecycle.draining

    def _served_by(self, timing: Timing = UNKNOWN) -> ServedBy:
        return ServedBy(
            request_id=self._generation.request_id,
            path=self._state.path,
            decode=self._decode_name,
            prefill=self._attempts.backend,
            timing=timing if self._generation.route.routed else None,
        )

    def _log_failure(self, event: events_actions.Event) -> None:
        """Log one line for each failed attempt."""
        leg, attempt_id = self._decode, self._attempt_id
        if isinstance(event, events_actions.DecodeErrored | events_actions.DecodeLost):
            attempt_id = self._decode_id
        detail = failure_detail(event, self._engine, leg.answer if leg is not None else None)
        ids = {"request_id": self._generation.request_id, "engine_id": attempt_id}
        log.warning("%s", detail, extra=ids)

    def _try_take_over(self) -> bool:
        """Hand the request and its record to another engine; returns whether one takes them."""
        failover = self._generation.failover
        self._taken_over = failover is not None and failover.try_take_over()
        return self._taken_over

    def _try_go_on(self, problem: str) -> bool:
        """Likewise, now or once there is another engine; this one failed because of `problem`."""
        failover = self._generation.failover
        if not self._try_take_over():
            self._taken_over = failover is not None and failover.try_wait(problem)
        return self._taken_over

    def _end(self, state: events_actions.Ended) -> None:
        record = self._record
        self._context.lifecycle.remove(self)
        if not self._taken_over:
            outcome = Outcome.ANSWERED if self._is_completed else state.outcome
            record.path, record.outcome, record.ended = state.path, outcome, self._loop.time()
            self._context.observer.on_request_end(record)
        # Break the reference cycles between the driver and its legs. Otherwise only the cycle
        # collector would free the request and its bodies.
        self._decode = self._attempts.leg = None
        del self._attempts
