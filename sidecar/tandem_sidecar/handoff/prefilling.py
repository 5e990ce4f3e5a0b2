"""The prefill side of one exchange: candidate after candidate, all within one deadline."""

import asyncio
import logging
import time
from functools import partial
from typing import Protocol

from tandem_contract.timing import Timing
from tandem_contract.transfer_params import ParamsUnusable

from ..connectors.handover import Attempt, Handover, Inquiry
from ..http.collect import Answer, Collector, NoAnswer
from ..http.messages import request_bytes
from ..http.upstream import Call
from ..observability.record import Leg, Phase, Result
from ..security.route import Candidate
from .classify import prefill_event, read_timing, result_of, result_of_failure
from .context import Generation, Tools
from .events_actions import (
    Cause,
    PrefillAnswered,
    PrefillEvent,
    PrefillFailed,
    PrefillSent,
    PrefillUnusable,
)
from .outbound import engine_request, fresh_id

log = logging.getLogger(__name__)


class Side(Protocol):
    """Who hears of the prefill."""

    def prefilled(self, event: PrefillEvent) -> None:
        """An attempt came to something."""

    def unwanted(self, attempt: Attempt, handover: Handover) -> None:
        """An aborted attempt had been answered already: its KV waits for nobody."""


class Prefills:
    """The attempts of one exchange."""

    def __init__(self, tools: Tools, gen: Generation, side: Side) -> None:
        self.tools = tools
        self.gen = gen
        self.side = side
        self.name = ""
        """The backend asked last."""
        self.leg: PrefillLeg | None = None
        self.answer: Answer | None = None
        """The newest whole one."""
        self.timing: Timing | None = None
        """What it said of itself."""
        self._loop = asyncio.get_running_loop()
        self.deadline: asyncio.TimerHandle | None = None
        """Of all attempts together; None: none is out, or they are settled."""

    def start(self, index: int, *, last: bool) -> PrefillEvent | None:
        """Ask candidate `index`, or say at once what comes of it.

        Making a connection may take its share of the time left.
        """
        gen, now = self.gen, self._loop.time()
        if self.deadline is None:
            self.deadline = self._loop.call_later(gen.settings.prefill_timeout, self._missed)
        candidate = gen.route.candidates[index]
        self.name = candidate.name
        wait = self.tools.breakers.wait(candidate.address, now)
        if wait > 0:
            leg = gen.record.leg(Phase.PREFILL, candidate.name, "", now)
            detail = f"prefill by {candidate.name}: left alone for {wait:.3g}s more"
            leg.end(Result.HELD, now, detail=detail)
            return PrefillFailed(Cause.HELD, detail, wait)
        left = self.deadline.when() - now
        self.leg = PrefillLeg(self, candidate, now)
        return self.leg.start(connect_timeout=left + 1 if last else left / 2)

    def abort(self) -> None:
        """Stop the attempt that is out, if one is."""
        if self.leg is not None:
            self.leg.abort()

    def settled(self) -> None:
        """No other attempt comes: the deadline is met."""
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _missed(self) -> None:
        timeout = self.gen.settings.prefill_timeout
        detail = f"{self.name}: no prefill within {timeout:.3g}s"
        if self.leg is not None:
            self.leg.fail(Result.DEADLINE, detail)
        self.side.prefilled(PrefillFailed(Cause.DEADLINE, detail))


class PrefillLeg:
    """One attempt."""

    def __init__(self, prefills: Prefills, candidate: Candidate, now: float) -> None:
        gen = prefills.gen
        self.attempt = Attempt(fresh_id(gen.request_id), candidate.address)
        self._prefills = prefills
        self._tools = prefills.tools
        self._loop = asyncio.get_running_loop()
        self._name = candidate.name
        self._seen: Leg = gen.record.leg(Phase.PREFILL, self._name, self.attempt.engine_id, now)
        self._call: Call | None = None
        self._inquiring = False
        self._left = False
        self._judged = False
        self._farewell: asyncio.TimerHandle | None = None
        self._pulse = self._tools.vigil.watch(candidate.address, self)

    def start(self, *, connect_timeout: float) -> PrefillEvent | None:
        """Send it, or first what the connector has to ask."""
        inquiry = self._tools.connector.inquiry(self.attempt)
        if inquiry is None:
            return self._send(connect_timeout)
        self._ask(inquiry, connect_timeout)
        return None

    def silent(self, detail: str) -> None:
        """The pod hangs."""
        detail = f"prefill by {self._name}: {detail}"
        self.fail(Result.SILENT, detail)
        self._prefills.side.prefilled(PrefillFailed(Cause.SILENT, detail))

    def fail(self, result: Result, detail: str) -> None:
        """Hold against the pod that no answer came; the leg stays out."""
        now = self._loop.time()
        self._judged = True
        self._seen.end(result, now, detail=detail)
        self._hold_against(now, hung=result is Result.SILENT)

    def abort(self) -> None:
        """Nobody waits for it any more: it ends within its grace, or is told to stop.

        vLLM has no answer for who closes, not even one that was ready: its blocks would wait for
        their lease. What comes within the grace is released for certain. There is none in a drain,
        and none for more at once than clients may be connected.
        """
        if self._call is None or self._left:
            return
        self._pulse.leave(self)
        self._seen.end(Result.ABORTED, self._loop.time())
        if not self._judged:
            self._tools.breakers.dropped(self.attempt.prefill)
        # Legs that run together are released by the attempt, whatever the answer.
        if self._inquiring or self._tools.connector.together or not self._call.settle():
            self._call.abort()
            self._call = None
            return
        self._left = True
        lifecycle, settings = self._tools.lifecycle, self._prefills.gen.settings
        crowded = len(lifecycle.work) >= settings.limits.connections
        hurried = lifecycle.draining or crowded or not self._tools.connector.light_release
        lifecycle.enter(self)
        grace = 0.0 if hurried else settings.prefill_grace
        self._farewell = self._loop.call_later(grace, self._part)

    def _part(self) -> None:
        """It takes long: have it stopped. An answer that crosses that is still taken."""
        if self._call is None or not self._call.part():
            self.drain_expired()
            return
        timeout = self._prefills.gen.settings.kv_transfer_timeout
        self._farewell = self._loop.call_later(timeout, self.drain_expired)

    def drain_expired(self) -> None:
        """Wait no longer for what an aborted attempt may still say."""
        if self._call is not None:
            self._call.abort()
        self._gone()

    def describe(self) -> dict[str, object]:
        return {"request_id": self._prefills.gen.request_id, "phase": "aborting"}

    def _ask(self, inquiry: Inquiry, connect_timeout: float) -> None:
        self._inquiring = True
        host = [(b"host", str(inquiry.address).encode())]
        self._call = self._tools.pool.send(
            inquiry.address,
            b"GET",
            request_bytes(b"GET", inquiry.target, host, b""),
            Collector(partial(self._learn, connect_timeout)),
            connect_timeout=connect_timeout,
            plain=True,
        )

    def _learn(self, connect_timeout: float, answer: Answer | NoAnswer) -> None:
        self._inquiring, self._call = False, None
        event: PrefillEvent | None
        try:
            if isinstance(answer, NoAnswer):
                raise ParamsUnusable(answer.detail)
            if not 200 <= answer.head.status < 300:
                raise ParamsUnusable(f"answered {answer.head.status}")
            self._tools.connector.learned(self.attempt, answer.body)
        except ParamsUnusable as err:
            detail = f"inquiry at {self._name}: {err}"
            self._pulse.leave(self)
            self.fail(Result.UNREACHABLE, detail)
            event = PrefillFailed(Cause.UNREACHABLE, detail)
        else:
            event = self._send(connect_timeout)
        if event is not None:
            self._prefills.side.prefilled(event)

    def _send(self, connect_timeout: float) -> PrefillEvent | None:
        gen, connector, attempt = self._prefills.gen, self._tools.connector, self.attempt
        body = connector.prefill(gen.kind, gen.body, attempt)
        address = attempt.prefill
        self._call = self._tools.pool.send(
            address,
            gen.request.method,
            engine_request(gen.request, address, self._seen, body, prefill=True),
            Collector(self._done),
            connect_timeout=connect_timeout,
        )
        return PrefillSent(connector.expected(attempt)) if connector.together else None

    def _done(self, answer: Answer | NoAnswer) -> None:
        self._call = None
        handover = partial(self._tools.connector.handover, self.attempt)
        event = prefill_event(answer, handover, self._name, time.time())
        if self._left:
            self._gone()
            if isinstance(event, PrefillAnswered):
                self._prefills.side.unwanted(self.attempt, event.handover)
            return
        self._pulse.leave(self)
        self._judge(answer, event)
        if isinstance(answer, Answer):
            self._pulse.alive = True
            self._seen.timing = read_timing(answer.head)
            self._prefills.answer, self._prefills.timing = answer, self._seen.timing
        self._prefills.side.prefilled(event)

    def _judge(self, answer: Answer | NoAnswer, event: PrefillEvent) -> None:
        """What the answer says of the pod."""
        now, detail = self._loop.time(), getattr(event, "detail", "")
        if isinstance(answer, NoAnswer):
            self.fail(result_of_failure(answer.failure), detail)
            return
        status, address = answer.head.status, self.attempt.prefill
        result = Result.UNUSABLE if isinstance(event, PrefillUnusable) else result_of(status)
        self._judged = True
        self._seen.end(result, now, status=status, detail=detail)
        breakers = self._tools.breakers
        match event:
            case PrefillFailed(Cause.BUSY, _, wait):
                breakers.busy(address, now, wait)
            case PrefillFailed():
                self._hold_against(now)
            case _:
                breakers.answered(address, now)

    def _hold_against(self, now: float, *, hung: bool = False) -> None:
        address = self.attempt.prefill
        wait = self._tools.breakers.failed(address, now, hung=hung)
        self._tools.connector.forget(address)
        if wait > 0:
            log.warning("prefill pod %s (%s): left alone for %.3gs", self._name, address, wait)

    def _gone(self) -> None:
        self._call = None
        if self._farewell is not None:
            self._farewell.cancel()
        self._tools.lifecycle.leave(self)
