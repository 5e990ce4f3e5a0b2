"""The prefill attempts of one hand-off: candidate after candidate, all within one deadline."""

import asyncio
import logging
import time
from functools import partial
from typing import Protocol

from tandem_contract.commandline import HostPort
from tandem_contract.overlaps import Overlap
from tandem_contract.timing import Timing
from tandem_contract.transfer_params import ParamsUnusable
from tandem_http1.answers import Answer, Collector, NoAnswer
from tandem_http1.connection import Call
from tandem_http1.messages import request_bytes

from ..connectors.protocol import HandoffAttempt, KvHold, PeerQuery
from ..observability.record import Leg, Phase, Result
from ..security.route import Candidate
from .classify import prefill_event, result_of, result_of_failure
from .context import GenerationRequest, SidecarContext
from .events_actions import (
    Cause,
    PrefillAnswered,
    PrefillEvent,
    PrefillFailed,
    PrefillRejected,
    PrefillSent,
    PrefillUnusable,
)
from .outbound import engine_request, new_attempt_id
from .proven_prefill import prefill_proof
from .timing import measure_prefill, read_timing

log = logging.getLogger(__name__)


class PrefillListener(Protocol):
    """Receives the events of the prefill attempts: the driver."""

    def on_prefill_event(self, event: PrefillEvent) -> None:
        """The newest attempt caused `event`."""

    def release_unused_kv(self, attempt: HandoffAttempt, kv_hold: KvHold) -> None:
        """An aborted attempt was answered nevertheless: release the KV, which has no reader."""


class PrefillAttempts:
    """The attempts of one hand-off."""

    def __init__(
        self,
        context: SidecarContext,
        generation: GenerationRequest,
        listener: PrefillListener,
        decode_engine: HostPort,
    ) -> None:
        self.context = context
        self.stream_source = partial(context.stream_source, generation.settings, decode_engine)
        self.generation = generation
        self.listener = listener
        self.backend = ""
        """Name of the newest attempt's prefill pod."""
        self.leg: PrefillLeg | None = None
        self.timing: Timing | None = None
        """The timing of the newest complete answer's leg."""
        self._loop = context.loop
        self.deadline: asyncio.TimerHandle | None = None
        """Of all attempts together; None: no attempt was made, or no further one will be."""
        self._left_deadline: asyncio.TimerHandle | None = None
        """Of the attempt at the pod that the stream left; None: there is none."""

    def start(self, index: int, *, last: bool) -> PrefillEvent | None:
        """Send the prefill to candidate `index`; return an event that this causes at once.

        The attempt may use half of the remaining time to connect, and the `last` one all of it.
        """
        generation, now = self.generation, self._loop.time()
        # One timer, started with the first attempt: a retry must not extend the client's wait.
        if self.deadline is None:
            seconds = generation.prefill_timeout
            self.deadline = self._loop.call_later(seconds, self._expire, seconds)
        self._cancel_left_deadline()
        candidates = generation.route.candidates
        candidate = candidates[index]
        if candidate is generation.route.left and len(candidates) > 1:
            # The others get the other half.
            seconds = generation.prefill_timeout / 2
            self._left_deadline = self._loop.call_later(seconds, self._expire, seconds)
        self.backend = candidate.name
        # It may be the probe of a half-open circuit: each end of the leg reports, or cancels.
        wait = self.context.breakers.admit(candidate.address, now)
        if wait > 0:
            leg = generation.record.leg(Phase.PREFILL, candidate.name, "", now)
            detail = f"prefill by {candidate.name}: no requests for {wait:.3g}s (circuit breaker)"
            leg.end(Result.CIRCUIT_OPEN, now, detail=detail)
            return PrefillFailed(Cause.CIRCUIT_OPEN, detail, wait)
        remaining = self.deadline.when() - now
        self.leg = PrefillLeg(self, candidate, now)
        # The last attempt is bounded by the deadline itself, so its connection gets a second more.
        return self.leg.start(connect_timeout=remaining + 1 if last else remaining / 2)

    def abort(self) -> None:
        """Abort the attempt in flight, if there is one."""
        if self.leg is not None:
            self.leg.abort()

    def _cancel_left_deadline(self) -> None:
        if self._left_deadline is not None:
            self._left_deadline.cancel()
            self._left_deadline = None

    def cancel_deadline(self) -> None:
        self._cancel_left_deadline()
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _expire(self, seconds: float) -> None:
        detail = f"{self.backend}: no prefill within {seconds:.3g}s"
        if self.leg is not None:
            self.leg.fail(Result.DEADLINE, detail)
        event = PrefillFailed(Cause.DEADLINE, detail, may_exhaust=self.generation.may_exhaust())
        self.listener.on_prefill_event(event)


class PrefillLeg:
    """One attempt: an optional peer query, then the prefill leg.

    The attempt reports at most one result to the circuit breaker (`_reported`), whichever comes
    first of its answer, its failure and its abort. After `abort` it may outlive the hand-off to
    wait for an answer whose KV has to be released; it is then part of the running work
    (`_aborting`).
    """

    def __init__(self, attempts: PrefillAttempts, candidate: Candidate, now: float) -> None:
        generation = attempts.generation
        attempt_id = new_attempt_id(generation.request_id)
        source, timeout = attempts.stream_source(candidate), generation.kv_transfer_timeout
        self.attempt = HandoffAttempt(attempt_id, candidate.address, source, timeout)
        self.is_concurrent = False  # Whether the decode leg does not wait for the answer.
        self._attempts = attempts
        self._context = attempts.context
        self._loop = self._context.loop
        self._backend = candidate.name
        self._candidate = candidate
        self._leg_record: Leg = generation.record.leg(
            Phase.PREFILL, candidate.name, attempt_id, now
        )
        self._call: Call | None = None
        self._overlap: Overlap | None = None
        """The prompt that the pod computes; None before the leg is sent."""
        self._querying = False
        self._aborting = False
        self._reported = False
        self._abort_timer: asyncio.TimerHandle | None = None
        self._liveness = self._context.liveness.watch(candidate.address, self)

    def start(self, *, connect_timeout: float) -> PrefillEvent | None:
        """Send the leg, or first the peer query if the connector needs one."""
        discovery = self._context.connector.discovery
        query = discovery.peer_query(self.attempt) if discovery is not None else None
        if query is None:
            return self._send(connect_timeout)
        self._send_query(query, connect_timeout)
        return None

    def engine_hung(self, detail: str) -> None:
        detail = f"prefill by {self._backend}: {detail}"
        self.fail(Result.SILENT, detail)
        exhausts = self._attempts.generation.may_exhaust()
        self._attempts.listener.on_prefill_event(PrefillFailed(Cause.SILENT, detail, 0.0, exhausts))

    def fail(self, result: Result, detail: str) -> None:
        """Count a missing answer as a failure of the pod.

        The connection stays open; the record of the leg ends.
        """
        now = self._loop.time()
        # Set before the driver aborts the leg, which would otherwise cancel what is reported here.
        self._reported = True
        self._leg_record.end(result, now, detail=detail)
        self._report_failure(now, hung=result is Result.SILENT)

    def abort(self) -> None:
        """End the attempt, but give its answer `prefill_grace` seconds to arrive.

        vLLM sends no answer to a client that closed, even if the answer was ready, and only the
        answer names the KV. The blocks would then wait for the end of their lease. An answer that
        arrives within the grace is released at once. There is no grace in a drain, for connectors
        whose release is a request that an engine runs, or while as many requests run as clients
        may be connected.
        """
        if self._call is None or self._aborting:
            return
        # The record and the breaker are settled now; what follows concerns the KV only.
        self._liveness.unwatch()
        self._leg_record.end(Result.ABORTED, self._loop.time())
        if not self._reported:
            self._context.breakers.cancel(self.attempt.prefill)
        # A peer query and a request that was not sent make no KV; the driver has released that of
        # concurrent legs.
        connector = self._context.connector
        if self._querying or self.is_concurrent or not self._call.forbid_resend():
            self._call.abort()
            self._call = None
            self._end_overlap()
            return
        self._aborting = True
        lifecycle, settings = self._context.lifecycle, self._attempts.generation.settings
        crowded = len(lifecycle.work) >= settings.limits.connections
        no_grace = lifecycle.draining or crowded or not connector.core.release_is_notification
        lifecycle.add(self)
        grace = 0.0 if no_grace else settings.prefill_grace
        self._abort_timer = self._loop.call_later(grace, self._close_sending_side)

    def _close_sending_side(self) -> None:
        """The grace is over: make the engine abort, but take an answer that is already on its way.

        Over TLS one direction cannot be closed alone, so the connection is closed.
        """
        if self._call is None or not self._call.half_close():
            self.stop_waiting()
            return
        timeout = self._attempts.generation.kv_transfer_timeout
        self._abort_timer = self._loop.call_later(timeout, self.stop_waiting)

    def drain_expired(self) -> None:
        self.stop_waiting()

    def engine_drains(self, engine: HostPort | None) -> None:
        """The attempt is aborted already."""

    def stop_waiting(self) -> None:
        """Stop waiting for the answer to an aborted attempt."""
        if self._call is not None:
            self._call.abort()
        self._finish_abort()

    def describe(self) -> dict[str, object]:
        return {"request_id": self._attempts.generation.request_id, "phase": "aborting"}

    def _send_query(self, query: PeerQuery, connect_timeout: float) -> None:
        self._querying = True
        host = [(b"host", str(query.address).encode())]
        self._call = self._context.pool.send(
            query.address,
            b"GET",
            request_bytes(b"GET", query.target, host, b""),
            Collector(partial(self._take_query_answer, connect_timeout)),
            connect_timeout=connect_timeout,
            # The connector's bootstrap server speaks plain HTTP, also where engines use TLS.
            plain=True,
        )

    def _take_query_answer(self, connect_timeout: float, answer: Answer | NoAnswer) -> None:
        self._querying, self._call = False, None
        discovery = self._context.connector.discovery
        event: PrefillEvent | None
        try:
            if isinstance(answer, NoAnswer):
                raise ParamsUnusable(answer.detail)
            if not 200 <= answer.head.status < 300:
                raise ParamsUnusable(f"answered {answer.head.status}")
            if discovery is not None:
                discovery.record_peer(self.attempt, answer.body)
        except ParamsUnusable as err:
            # The attempt ends here, and the machine does not abort an attempt that ended by itself.
            detail = f"peer query at {self._backend}: {err}"
            self._liveness.unwatch()
            self.fail(Result.UNREACHABLE, detail)
            event = PrefillFailed(Cause.UNREACHABLE, detail)
        else:
            event = self._send(connect_timeout)
        if event is not None:
            self._attempts.listener.on_prefill_event(event)

    def _send(self, connect_timeout: float) -> PrefillEvent | None:
        generation, connector = self._attempts.generation, self._context.connector
        address, leg, rank = self.attempt.prefill, self._leg_record, self._candidate.rank
        body = connector.core.prefill_body(generation.kind, generation.body, self.attempt)
        added = prefill_proof(generation, self._candidate, self.attempt.attempt_id)
        added += self._context.authorization(address)
        self._overlap = self._context.overlaps.begin((address, rank))
        self._call = self._context.pool.send(
            address,
            generation.request.method,
            engine_request(generation.request, address, leg, body, added, rank=rank, prefill=True),
            Collector(self._take_answer),
            connect_timeout=connect_timeout,
            # A second prefill would hold KV that has been read already, for its whole lease.
            once=self.attempt.source is not None,
        )
        # Else only the prefill's answer names the KV, so the decode leg waits for it.
        paired = connector.concurrent
        kv_hold = None if paired is None else paired.expected_kv_hold(self.attempt)
        self.is_concurrent = kv_hold is not None
        return PrefillSent(kv_hold) if kv_hold is not None else None

    def _take_answer(self, answer: Answer | NoAnswer) -> None:
        self._call = None
        inflight = self._end_overlap()
        read_kv_hold = partial(self._context.connector.core.kv_hold, self.attempt)
        event = prefill_event(answer, read_kv_hold, self._backend, time.time())
        # `abort` has settled record and breaker. All that is left is KV that this answer names.
        if self._aborting:
            self._finish_abort()
            if isinstance(event, PrefillAnswered):
                self._attempts.listener.release_unused_kv(self.attempt, event.kv_hold)
            return
        self._liveness.alive = isinstance(answer, Answer)
        self._liveness.unwatch()
        self._record_result(answer, event)
        if isinstance(answer, Answer):
            self._leg_record.timing = engine = read_timing(answer.head)
            self._attempts.timing = measure_prefill(self._leg_record, engine, answer, inflight)
        self._attempts.listener.on_prefill_event(event)

    def _end_overlap(self) -> int | None:
        """The pod computes no longer; returns how many other prompts it was given meanwhile."""
        if self._overlap is None:
            return None
        self._overlap.end()
        return self._overlap.others

    def _record_result(self, answer: Answer | NoAnswer, event: PrefillEvent) -> None:
        """Record the result of the leg, and report it to the pod's circuit breaker."""
        now, detail = self._loop.time(), ""
        if isinstance(event, PrefillUnusable | PrefillRejected | PrefillFailed):
            detail = event.detail
        if isinstance(answer, NoAnswer):
            self.fail(result_of_failure(answer.failure), detail)
            return
        status, address = answer.head.status, self.attempt.prefill
        result = Result.UNUSABLE if isinstance(event, PrefillUnusable) else result_of(status)
        self._reported = True
        self._leg_record.end(result, now, status=status, detail=detail)
        breakers = self._context.breakers
        match event:
            case PrefillFailed(Cause.BUSY, _, wait):
                breakers.record_busy(address, now, wait)
            case PrefillFailed():
                self._report_failure(now)
            # It may be the pod's own refusal: it proves neither that it works nor that it fails.
            case PrefillRejected():
                breakers.cancel(address)
            case _:
                breakers.record_success(address, now)

    def _report_failure(self, now: float, *, hung: bool = False) -> None:
        address = self.attempt.prefill
        wait = self._context.breakers.record_failure(address, now, hung=hung)
        discovery = self._context.connector.discovery
        if discovery is not None:
            discovery.forget_peer(address)
        self._context.forget_source(address)
        if wait > 0:
            log.warning(
                "prefill pod %s (%s): no requests for %.3gs (circuit breaker)",
                self._backend,
                address,
                wait,
            )

    def _finish_abort(self) -> None:
        self._call = None
        self._end_overlap()
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        self._context.lifecycle.remove(self)
