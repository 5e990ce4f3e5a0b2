"""The decode leg of one hand-off: its request to this pod's engine, and the answer to it."""

import asyncio
from typing import Final, Protocol

from tandem_contract import headers
from tandem_contract.commandline import HostPort
from tandem_contract.overlaps import Overlap
from tandem_contract.request_kinds import RequestKind
from tandem_contract.timing import UNKNOWN, Timing
from tandem_http1.answers import CutPoint, EditedAnswer, EventChunks
from tandem_http1.connection import Call, Failure
from tandem_http1.messages import ResponseHead

from ..bodies.usage import UsageCorrector
from ..observability.record import Leg, Result
from ..resume.errors import StreamBroken
from ..resume.kept_stream import KeptStream
from .classify import (
    AnswerStart,
    decode_event,
    result_of,
    result_of_break,
    result_of_failure,
)
from .context import SidecarContext
from .events_actions import (
    DecodeEnded,
    DecodeErrored,
    DecodeEvent,
    DecodeLost,
    DecodeRefused,
    DecodeStarted,
    SendError,
)
from .timing import EVENTS_SEARCHED, measure_leg, merge_timing, read_timing

_READS_STREAMS: Final = headers.READS_STREAMS.encode()
_KV_CONTRADICTED: Final = headers.KV_CONTRADICTED.encode()


class DecodeListener(Protocol):
    """Receives the events and the bytes of a decode leg: the driver."""

    def on_decode_event(self, event: DecodeEvent) -> None:
        """The leg caused `event`."""

    def write_answer(self, data: bytes, *, last: bool) -> None:
        """Send bytes of the answer to the client."""

    def try_take_over(self) -> bool:
        """Give the request to another engine, as the leg's seems to hang; returns whether one takes
        it. Then `on_taken_over` follows; if not, nothing has changed."""

    def on_taken_over(self, problem: str) -> None:
        """Another engine serves the request, because of `problem`. The leg is to be aborted."""


class DecodeLeg:
    """One decode leg, and the receiver of its answer.

    Until its first token a stream is held back, and from then on until `start_forwarding` the
    engine is paused, so that the answer can still be replaced. Afterwards all bytes are the
    client's. After `abort` nothing reaches the listener any more, not even from a callback that is
    still running.
    """

    def __init__(
        self,
        context: SidecarContext,
        listener: DecodeListener,
        kind: RequestKind,
        engine: HostPort,
        leg: Leg,
        *,
        http10: bool,
        rewrite_usage: bool,
        kept: KeptStream | None,
        is_movable: bool,
    ) -> None:
        """`http10`: the client cannot read chunks; `rewrite_usage`: the usage may be wrong; `kept`:
        the stream that this engine begins or continues, which makes its own chunks; `is_movable`:
        another engine may take the request while this one may only be slow."""
        self.payload_only = http10 or rewrite_usage or kept is not None
        self.cached: int | None = None
        """The right count of cached tokens, set before `start_forwarding`; None: leave the count.
        """
        self.created: int | None = None
        """The same of tokens written to the cache."""
        self.is_hung = False
        """Whether the engine was given up as silent."""
        self.is_unsent = False
        """Whether no connection to the engine was made, so that it got nothing."""
        self.prefill_answered: float | None = None
        """When the prefill of a streamed hand-off answered (loop time)."""
        self.answer: ResponseHead | None = None
        self.timing = UNKNOWN
        """What the engine reports of this leg."""
        self._context = context
        self._listener = listener
        self._leg = leg
        self._kind = kind
        self._engine = engine
        self._loop = context.loop
        self._http10 = http10
        self._rewrite_usage = rewrite_usage
        self._kept = kept
        self._edited: EditedAnswer | None = None
        self._chunks: EventChunks | None = None
        self._reads_kv = False
        self._overlap: Overlap | None = None
        """The prompt that the engine computes; None: it reads the KV."""
        self._forwarding = False
        self._aborted = False
        self._has_begun = False
        self._start: AnswerStart
        """The bytes that begin the answer; set with its head, empty once they are handled."""
        self._early_bytes: tuple[bytes, bool] | None = None
        """First bytes of the answer that may not be sent yet, and whether they are the last."""
        self._call: Call | None = None
        self._output_timer: asyncio.TimerHandle | None = None
        if is_movable:
            self._liveness = context.liveness.watch_movable(engine, self)
        else:
            self._liveness = context.liveness.watch(engine, self)

    def send(
        self,
        method: bytes,
        request: bytes,
        *,
        reads_kv: bool,
        rank: int | None,
        output_timeout: float | None,
        transfer_timeout: float | None,
    ) -> None:
        """Send the leg. One that reads KV is sent only once: a second read could come after the
        producer freed the blocks and gave them to another prompt.

        `rank`: the data-parallel rank that `request` names. `output_timeout`: seconds, for an
        engine that might wait for KV without limit. `transfer_timeout`: seconds for its KV to
        arrive, where the engine tells that it has not.
        """
        if not reads_kv:
            self._overlap = self._context.overlaps.begin((self._engine, rank))
        if output_timeout is not None:
            self._output_timer = self._loop.call_later(output_timeout, self._expire, output_timeout)
        if transfer_timeout is not None:
            self._context.transfers.watch(self._engine, self, transfer_timeout)
        self._reads_kv = reads_kv
        self._call = self._context.pool.send(self._engine, method, request, self, once=reads_kv)

    def limit_transfer(self, timeout: float) -> None:
        """Give the KV `timeout` seconds from now to arrive, unless the answer has begun."""
        if self._call is not None and not self._has_begun:
            self._context.transfers.watch(self._engine, self, timeout)

    def pause(self) -> None:
        """Stop reading from the engine."""
        self._liveness.pause()
        if self._call is not None:
            self._call.pause()

    def resume(self) -> None:
        """Read from the engine again, unless its first bytes are still held."""
        if self._call is not None and self._early_bytes is None:
            self._liveness.resume()
            self._call.resume()

    def abort(self) -> None:
        """Close the connection, so that the engine aborts the request."""
        # First, because a callback of this leg may be running: it checks this before it writes.
        self._aborted = True
        status = self._leg.status
        # A leg that was answered with a 5xx had failed before this abort.
        result = Result.ABORTED if status is None or status < 500 else result_of(status)
        self._leg.end(result, self._loop.time(), status=status)
        self._liveness.unwatch()
        self._stop_waiting_for_kv()
        self._end_overlap()
        if self._call is not None:
            self._call.abort()
            self._call = None

    def start_forwarding(self) -> ResponseHead | None:
        """Send bytes to the listener from now on. Returns the answer's head, if it has arrived."""
        self._forwarding = True
        self._end_overlap()
        if self._rewrite_usage and self.answer is not None:
            # Created only now: with concurrent legs the prefill's answer, which has the count, may
            # come after this leg's head.
            answer, cached, created, corrector = self.answer, self.cached, self.created, None
            # A stream's unfinished events are held back even if its count is left.
            if answer.event_stream or cached is not None or created is not None:
                corrector = UsageCorrector(cached, created, stream=answer.event_stream)
            chunked = not self._http10 and self._kept is None
            self._edited = EditedAnswer(answer, corrector, chunked=chunked)
            return self._edited.head
        return self.answer

    def measure(self) -> Timing:
        """The timing of a leg that computed the prompt itself; called when the answer begins."""
        status = self._leg.status or 0
        failed = status >= 400 or self._leg.result is Result.ERROR
        seconds = None if failed else self._start.seconds_since(self._leg.started)
        inflight = None if self._overlap is None else self._overlap.others
        whole = self._chunks is None
        data = self._start.data if whole else self._start.data[:EVENTS_SEARCHED]
        return measure_leg(self.timing, seconds, data, inflight=inflight, whole=whole)

    def merge(self, prefill: Timing) -> Timing:
        """The timing of a hand-off whose prefill leg reported `prefill`."""
        answered = self.prefill_answered
        head_start = None if answered is None else answered - self._leg.started
        streamed = self._leg.streamed
        return merge_timing(prefill, self.timing, streamed=streamed, head_start=head_start)

    def flush_early_bytes(self) -> DecodeEvent | None:
        """Send the held bytes. Returns the event if they end the answer."""
        early, self._early_bytes = self._early_bytes, None
        return None if early is None else self._write(*early)

    def cut_point(self) -> CutPoint:
        """Where the bytes end that were sent; call it once, after the leg ended."""
        if self._rewrite_usage:
            edited = self._edited
            return CutPoint.WITHIN_EVENT if edited is None else edited.cut_point()
        return CutPoint.WITHIN_EVENT if self._chunks is None else self._chunks.cut_point()

    @property
    def has_begun(self) -> bool:
        return self._forwarding

    @property
    def awaits_token(self) -> bool:
        return self._forwarding and self._kept is not None and self._kept.has_token_events

    def try_leave(self, detail: str) -> bool:
        if self._kept is not None and self._kept.missing_end() is not None:
            # It needs no other engine.
            self.engine_hung(detail)
            return True
        if not self._listener.try_take_over():
            return False
        # Before the abort: the first result counts.
        self._leg.end(Result.SILENT, self._loop.time(), detail=detail)
        self._listener.on_taken_over(f"decode failed: {detail}")
        return True

    def engine_hung(self, detail: str) -> None:
        self.is_hung = True
        self._leg.end(Result.SILENT, self._loop.time(), detail=detail)
        self.abort()
        self._listener.on_decode_event(DecodeLost(f"decode failed: {detail}"))

    # Receiver of the engine's answer.

    def head(self, head: ResponseHead) -> None:
        self.answer = head
        if head.status < 300:
            readers = self._context.stream_readers
            (readers.add if head.value(_READS_STREAMS) else readers.discard)(self._engine)
        self.timing = read_timing(head)
        leg = self._leg
        leg.status, leg.timing = head.status, self.timing
        if head.event_stream:
            self._chunks = EventChunks(head, wire=not self.payload_only)
        self._start = AnswerStart(self._kind, head)
        self._liveness.alive = True
        # The head is an event only if KV depends on it (it tells that the engine admitted the
        # request) or if it is an error. Otherwise the beginning of the answer is the first event.
        if self._reads_kv or head.status >= 400:
            event = decode_event(self._kind, head.status)
            if isinstance(event, DecodeRefused) and head.value(_KV_CONTRADICTED):
                # The KV is the sidecar's choice, not the client's: without it the request is right.
                event = DecodeErrored()
            self._listener.on_decode_event(event)

    def body(self, data: bytes, last: bool) -> None:
        # Runs for every read from the engine: the frequent case, forwarding a stream, comes first.
        self._liveness.alive = True
        if self._chunks is not None:
            data = self._chunks.take(data)
        if last:
            self._liveness.unwatch()
            self._call = None
        if self._forwarding:
            # The last bytes end the leg and an editor may hold bytes back, so both go through
            # `_forward`; all other bytes go straight to the client.
            if last or self._edited is not None or self._kept is not None:
                self._forward(data, last)
            elif data and not self._aborted:
                self._listener.write_answer(data, last=False)
        elif self._early_bytes is not None:
            # The engine is paused, but a read that was already under way can still arrive.
            self._early_bytes = self._early_bytes[0] + data, last
        elif (data or last) and not self._aborted:
            self._start_answer(data, last)

    def failed(self, failure: Failure, detail: str) -> None:
        status = self._leg.status
        # vLLM breaks a stream of responses off when it cannot load the KV.
        broke_off = self._reads_kv and self.answer is not None and bool(self._start.data)
        result = Result.ERROR if broke_off else result_of_failure(failure)
        self._leg.end(result, self._loop.time(), status=status, detail=detail)
        self._liveness.unwatch()
        self._stop_waiting_for_kv()
        self._end_overlap()
        self.is_unsent = self._call is not None and self._call.sent is None
        self._call = None
        may_be_healthy = failure is Failure.STALE or broke_off
        lost = DecodeLost(f"decode failed: {detail}", may_be_healthy)
        self._listener.on_decode_event(lost)

    def kv_did_not_arrive(self, seconds: float) -> None:
        self._give_up(f"{self._engine}: the KV did not arrive within {seconds:.3g}s")

    def _expire(self, seconds: float) -> None:
        self._give_up(f"{self._engine}: no output within {seconds:.3g}s of a pushed hand-off")

    def _give_up(self, detail: str) -> None:
        """The KV does not arrive, though the engine lives."""
        # Ended before `abort`, which would record the leg as aborted: the first result counts.
        self._leg.end(Result.DEADLINE, self._loop.time(), detail=detail)
        self.abort()
        lost = DecodeLost(f"decode failed: {detail}", engine_may_be_healthy=True)
        self._listener.on_decode_event(lost)

    def _end_overlap(self) -> None:
        """The engine computes this prompt no longer."""
        if self._overlap is not None:
            self._overlap.end()

    def _stop_waiting_for_kv(self) -> None:
        self._context.transfers.unwatch(self._engine, self)
        self._cancel_output_timer()

    def _cancel_output_timer(self) -> None:
        if self._output_timer is not None:
            self._output_timer.cancel()
            self._output_timer = None

    def _start_answer(self, data: bytes, last: bool) -> None:
        """Hold the bytes back until the answer begins, then report it; within the call the listener
        forwards, waits or aborts."""
        start = self._start
        has_begun = start.take(data, self._loop.time(), last=last)
        if start.is_computed:
            self._cancel_output_timer()
        if not has_begun:
            return
        self._has_begun = True
        self._stop_waiting_for_kv()
        if start.is_error:
            detail = "a stream that begins with an error"
            self._leg.end(Result.ERROR, self._loop.time(), status=200, detail=detail)
            status, message = start.error
            # Another engine would refuse the client's fault as well.
            error = SendError(status, message, decode_failed=status >= 500)
            self._listener.on_decode_event(DecodeErrored(error=error))
        else:
            self._leg.first_byte = self._loop.time()
            self._listener.on_decode_event(DecodeStarted())
        data, start.data = start.data, b""
        if self._aborted:
            return
        if self._forwarding:
            self._forward(data, last)
            return
        # The prefill of concurrent legs has not answered yet: hold the bytes, pause the engine.
        self._early_bytes = data, last
        if not last:
            self.pause()

    def _forward(self, data: bytes, last: bool) -> None:
        event = self._write(data, last)
        if event is not None and not self._aborted:
            self._listener.on_decode_event(event)

    def _write(self, data: bytes, last: bool) -> DecodeEvent | None:
        """Send bytes of the answer; returns the event if they end it."""
        if self._aborted:
            return None
        if self._edited is not None:
            data = self._edited.take(data, last=last)
        if self._kept is not None:
            try:
                data = self._kept.read(data, last=last)
            except StreamBroken as err:
                if err.before:
                    self._listener.write_answer(err.before, last=False)
                result = result_of_break(err)
                self._leg.end(result, self._loop.time(), status=200, detail=str(err))
                return DecodeLost(f"decode failed: {err}")
        if last:
            status = self._leg.status or 0
            self._leg.end(result_of(status), self._loop.time(), status=status)
        if data or last:
            self._listener.write_answer(data, last=last)
        return DecodeEnded() if last else None
