"""Forwards one request to this pod's engine and its answer back, without a hand-off.

Forward ─┬─ SingleEngineGeneration        see `single_engine`
         └─ Passthrough                   see `passthrough`
               └─ ProvenPrefill           see `proven_prefill`
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec.structs import replace

from tandem_contract import headers
from tandem_contract.commandline import HostPort
from tandem_contract.overlaps import Overlap
from tandem_contract.prompt_length import EXHAUSTING
from tandem_contract.request_kinds import RequestKind
from tandem_http1.answers import CutPoint, EventChunks, Relay
from tandem_http1.client import ClientConnection
from tandem_http1.connection import Call, Failure
from tandem_http1.messages import Headers, Request, ResponseHead

from ..observability.record import Leg, Outcome, Phase, Record, Result
from ..resume.errors import StreamBroken
from ..resume.kept_stream import KeptStream
from .classify import AnswerStart, result_of, result_of_break, result_of_failure
from .context import Failover, SidecarContext
from .engine_liveness import LegLiveness
from .machine import DRAIN_EXPIRED_MESSAGE
from .outbound import engine_request, new_attempt_id
from .parsed_call import ParsedCall
from .reply import ANSWER_DROPPED, NO_RETRY, not_sent, send_error
from .timing import EVENTS_SEARCHED

log = logging.getLogger(__name__)

_SHOULD_RETRY: Final = headers.SHOULD_RETRY.encode()


class Forward(ABC):
    """A forwarded request, and the receiver of its answer.

    Until the answer begins, a stream with its first token, nothing of it is written, and an error
    of the sidecar can replace it. From then on it ends completely or is cut.
    """

    survives_half_close = False
    phase = Phase.DECODE
    computes_prompt = False
    """Whether the engine computes a prompt, which is counted among those under way there."""
    is_split = False
    """Whether another engine computes the prompt, behind the sidecar that the request is sent to:
    then nothing is learned from how long that takes."""
    kind: RequestKind | None = None
    """None: the request generates nothing."""
    leg: Leg
    _engine: HostPort
    _head: ResponseHead
    _start: AnswerStart
    """The bytes that begin the answer."""
    _call: Call | ParsedCall | None = None
    _overlap: Overlap | None = None
    _has_exhausted = False  # Whether the request may have hung its engine, and would hang another.
    _is_unsent = False  # Whether no connection to the engine was made, so that it got nothing.
    _liveness: LegLiveness
    _rank: int | None = None

    def __init__(
        self,
        context: SidecarContext,
        client: ClientConnection,
        request: Request,
        record: Record,
        failover: Failover | None = None,
        *,
        kept: KeptStream | None = None,
    ) -> None:
        """`failover`: None: no other engine may serve the request. `kept`: the stream that this
        engine begins or continues; None: it ends with this engine."""
        self._failover = failover
        self._kept = kept
        self.payload_only = request.http10 or kept is not None
        self.context = context
        self.record = record
        self._loop = context.loop
        self._client = client
        self._request = request
        self._relay = Relay(client, request) if kept is None else kept
        self._has_begun = False
        """Whether this engine's answer is being written."""
        self._chunks: EventChunks | None = None
        self._recent: tuple[bytes, bytes] = b"", b""
        """The two newest pieces of the answer: its end may come in three."""

    def start(
        self, engine: HostPort, backend: str, body: bytes, *, rank: int | None = None
    ) -> None:
        """Send `body` to `engine`, whose name is `backend`; callbacks write the response. `rank`:
        the data-parallel rank that is to serve it; None: the engine chooses."""
        context, record = self.context, self.record
        self._engine = engine
        if self.computes_prompt:
            self._overlap = context.overlaps.begin((engine, rank))
        context.lifecycle.add(self)
        # Before the leg: tracing decides here which `traceparent` the leg gets.
        context.observer.on_request_start(record)
        self.leg = record.leg(self.phase, backend, self.attempt_id(), record.received)
        if self.computes_prompt and self._failover is not None and self._failover.resumes:
            self._liveness = context.liveness.watch_movable(engine, self)
            if self._kept is not None and self._kept.is_read_by_ids and not self.is_split:
                self._liveness.prompt_bytes = len(body)
        else:
            self._liveness = context.liveness.watch(engine, self)
        self._rank = rank
        if self._kept is None or self._kept.rest is None:
            self._send(body)
            return
        call = ParsedCall(context.pool, engine, self._kept.rest, self, self._own_request)
        self._call = call
        call.start(body)

    def _send(self, body: bytes) -> None:
        request, added = self._request, self.added_headers(self._engine)
        self._call = self.context.pool.send(
            self._engine,
            request.method,
            engine_request(request, self._engine, self.leg, body, added, rank=self._rank),
            self,
            switching=bool(request.upgrade),
        )

    def _own_request(self, target: bytes, body: bytes, *, generates: bool) -> bytes:
        """One of the requests that the rest of a parsed stream takes."""
        engine = self._engine
        added = self.added_headers(engine) if generates else self.context.authorization(engine)
        request = replace(self._request, target=target)
        return engine_request(request, engine, self.leg, body, added, rank=self._rank, prefill=True)

    def rest_refused(self, why: str) -> None:
        """The engine cannot continue a parsed stream; it may generate the answer again."""
        rest = None if self._kept is None else self._kept.refuse_rest(why)
        if rest is not None:
            self._send(rest.data)
            return
        self.end_leg(Result.ERROR, why)
        self._break_off(502, self.report_loss(why))

    # For subclasses.

    def attempt_id(self) -> str:
        """The request id that the engine sees."""
        return new_attempt_id(self.record.request_id)

    def added_headers(self, engine: HostPort) -> Headers:
        """Headers for the engine, which replace the client's."""
        return self.context.authorization(engine)

    @abstractmethod
    def header_lines(self) -> bytes:
        """The sidecar's header lines; `leg` holds what the engine's head said, if it came."""

    @abstractmethod
    def inspect_first_bytes(self, head: ResponseHead, data: bytes) -> None:
        """The answer begins with `data`."""

    @abstractmethod
    def inspect_last_bytes(self, data: bytes) -> None:
        """The answer ends with `data`."""

    @abstractmethod
    def report_loss(self, detail: str) -> str:
        """The answer is lost; return the error message for the client."""

    def may_exhaust(self) -> bool:
        """Whether the request is so long that it may hang an engine."""
        return len(self._request.body) > EXHAUSTING

    # From the client's connection and the drain.

    def client_disconnected(self) -> None:
        self._abort()
        self.end(Outcome.ABANDONED)

    def pause_sending(self) -> None:
        self._liveness.pause()
        if self._call is not None:
            self._call.pause()

    def resume_sending(self) -> None:
        self._liveness.resume()
        if self._call is not None:
            self._call.resume()

    def drain_expired(self) -> None:
        self._abort()
        self._break_off(503, DRAIN_EXPIRED_MESSAGE)

    def engine_drains(self, engine: HostPort | None) -> None:
        if self._kept is None or engine not in (None, self._engine):
            return
        if self._try_move(partial(self.engine_drains, engine)):
            self._abort()
            self.leave()

    def _try_move(self, again: Callable[[], None]) -> bool:
        return self._failover is not None and self._failover.try_move(again)

    def describe(self) -> dict[str, object]:
        return {
            "request_id": self.record.request_id,
            "path": self.record.path,
            "phase": "answering" if self._relay.written else "decoding",
            "age_seconds": round(self._loop.time() - self.record.received, 3),
        }

    # Receiver of the engine's answer.

    def head(self, head: ResponseHead) -> None:
        self.leg.status = head.status
        self._head = head
        self._start = AnswerStart(self.kind, head)
        self._liveness.alive = True
        if head.event_stream:
            self._chunks = EventChunks(head, wire=not self.payload_only)

    def body(self, data: bytes, last: bool) -> None:
        self._liveness.alive = True
        if self._chunks is not None:
            data = self._chunks.take(data)
        if not (data or last):
            return
        if not self._has_begun:
            if not self._start.take(data, self._loop.time(), last=last):
                return
            data, self._start.data = self._start.data, b""
            if not self._begins(data):
                return
        if self._kept is not None:
            kept = self._read_kept(self._kept, data, last=last)
            if kept is None or not (kept or last):
                return
            data = kept
        # The end is recorded before the last bytes are written, which may start the client's next
        # request within this call (pipelining).
        if last:
            self.inspect_last_bytes(self._end_with(data))
            self.end_leg(result_of(self.leg.status or 0))
            self.end(Outcome.ANSWERED)
        self._recent = self._recent[1], data
        self._relay.body(data, last=last)

    def _end_with(self, data: bytes) -> bytes:
        """The end of an answer whose last piece is `data`: of a stream, as much as its last events
        may be long."""
        if self._chunks is None:
            return b"".join((*self._recent, data))
        for piece in reversed(self._recent):
            if len(data) < EVENTS_SEARCHED:
                data = piece[-EVENTS_SEARCHED:] + data
        return data[-EVENTS_SEARCHED:]

    def _read_kept(self, kept: KeptStream, data: bytes, *, last: bool) -> bytes | None:
        """What the client may have now of a kept stream; None: it broke off."""
        try:
            return kept.read(data, last=last)
        except StreamBroken as err:
            if err.before:
                self._relay.body(err.before, last=False)
            self._abort_call()
            self._fail(result_of_break(err), str(err))
            return None

    def failed(self, failure: Failure, detail: str) -> None:
        self._is_unsent = self._call is not None and self._call.sent is None
        self._fail(result_of_failure(failure), detail)

    @property
    def has_begun(self) -> bool:
        return self._has_begun

    @property
    def awaits_token(self) -> bool:
        return self._has_begun and self._kept is not None and self._kept.has_token_events

    def try_leave(self, detail: str) -> bool:
        kept = self._kept
        if kept is not None and kept.missing_end() is not None:
            # It needs no other engine.
            self.engine_hung(detail)
            return True
        may_move = kept is not None or not self._relay.written
        if not may_move or self.may_exhaust() or not self._try_take_over(Result.SILENT, detail):
            return False
        self.report_loss(detail)
        return True

    def engine_hung(self, detail: str) -> None:
        self._abort_call()
        self._has_exhausted = self.may_exhaust()
        self._fail(Result.SILENT, detail)

    # The end.

    def end_leg(self, result: Result, detail: str = "") -> None:
        """Record the end of the leg."""
        self._liveness.unwatch()
        self.leg.end(result, self._loop.time(), status=self.leg.status, detail=detail)

    def end(self, outcome: Outcome) -> None:
        """Record the end of the request."""
        self._end_overlap()
        self.record.outcome, self.record.ended = outcome, self._loop.time()
        # Break the reference cycle with the call. Otherwise only the cycle collector would free
        # the request and its bodies.
        self._call = None
        self.context.lifecycle.remove(self)
        self.context.observer.on_request_end(self.record)

    def _begins(self, data: bytes) -> bool:
        """Whether the answer that begins with `data` is written; else another engine serves the
        request, or it ended with an error."""
        if self._is_failure():
            # A sidecar that this process sent the request to may know that no other is to get it.
            if self._head.value(_SHOULD_RETRY) == b"false":
                self._has_exhausted = True
            moved = self._try_take_over(result_of(self.leg.status or 0))
            # An answer that is forwarded is counted as it begins.
            if moved or self._relay.written:
                message = self.report_loss(f"answered with an error ({self._head.status})")
                if not moved:
                    self._abort()
                    # What an engine refuses, it will refuse again.
                    if self._head.status < 500 or not self._try_wait(message):
                        self._break_off(502, message)
                return False
        if self._start.is_error and self.kind is not None:
            self._report_error(data)
            return False
        self._has_begun = True
        self._begin(data)
        return True

    def _begin(self, data: bytes) -> None:
        record, head = self.record, self._head
        self.leg.first_byte = self._loop.time()
        if self._relay.written:
            self.context.observer.on_rest(record, head)
            return
        record.status, record.first_byte = head.status, self.leg.first_byte
        self.inspect_first_bytes(head, data)
        self.context.observer.on_answer(record, head)
        closing = self.context.lifecycle.draining
        self._relay.begin(head, ANSWER_DROPPED, self.header_lines(), close=closing)

    def _report_error(self, data: bytes) -> None:
        """Answer with the error that begins the stream `data`, as a status, which routers count."""
        self.inspect_first_bytes(self._head, data)
        self._abort()
        self._break_off(*self._start.error)

    def _fail(self, result: Result, detail: str) -> None:
        self.end_leg(result, detail)
        message = self.report_loss(detail)
        kept = self._kept
        # A stream that lacks only its end needs no other engine.
        may_move = not self._relay.written if kept is None else kept.missing_end() is None
        if not may_move or not (self._try_take_over(result) or self._try_wait(message)):
            self._break_off(502, message)

    def _is_failure(self) -> bool:
        """Whether the answer that begins is an engine's failure, which another engine may mend."""
        if self._relay.written:
            # The rest of a stream can only be a stream.
            head = self._head
            return head.status != 200 or not head.event_stream or self._start.is_error
        return self._head.status >= 500 or (self._start.is_error and self._start.error[0] >= 500)

    def _try_take_over(self, result: Result, detail: str = "") -> bool:
        """Hand the request and its record to another engine; returns whether one takes them. The
        leg ended with `result`."""
        if self._failover is None or self._has_exhausted or not self._failover.try_take_over():
            return False
        self.end_leg(result if result is not Result.ANSWERED else Result.ERROR, detail)
        self._abort_call()
        self.leave()
        return True

    def _try_wait(self, problem: str) -> bool:
        """Have the request and its record wait for an engine, as its own failed because of
        `problem`; returns whether they do."""
        if self._failover is None or self._has_exhausted or not self._failover.try_wait(problem):
            return False
        self.leave()
        return True

    def leave(self) -> None:
        """This object no longer serves the request."""
        self._end_overlap()
        self._call = None
        self.context.lifecycle.remove(self)

    def _end_overlap(self) -> None:
        """The engine computes no prompt for this request any more."""
        if self._overlap is not None:
            self._overlap.end()

    def _abort(self) -> None:
        status = self.leg.status
        # An answer with a 5xx had failed before this abort.
        self.end_leg(Result.ABORTED if status is None or status < 500 else result_of(status))
        self._abort_call()

    def _abort_call(self) -> None:
        if self._call is not None:
            self._call.abort()

    def _break_off(self, status: int, message: str) -> None:
        """Cut an answer that was started; otherwise send an error instead."""
        kept = self._kept
        if kept is not None and kept.written and (rest := kept.missing_end()) is not None:
            self.end(Outcome.ANSWERED)
            kept.body(rest, last=True)
        elif self._relay.written:
            # As in `body`: the request ends before the write that may start the client's next one.
            self.end(Outcome.CUT)
            at = CutPoint.WITHIN_EVENT if self._chunks is None else self._chunks.cut_point()
            self._relay.cut(status, self.record.cut_message(message), at)
        else:
            self.record.status, self.record.first_byte = status, self._loop.time()
            self.context.observer.on_answer(self.record, None)
            self.end(Outcome.FAILED)
            closing = self.context.lifecycle.draining
            lines = self.header_lines() + (NO_RETRY if self._has_exhausted else b"")
            if self._is_unsent:
                lines += not_sent(self._request)
            send_error(self._client, self._request, status, message, lines, close=closing)
