"""The decode side of one exchange: a leg to this pod's engine, and what comes back on it."""

import asyncio
from typing import Protocol

from tandem_contract.commandline import HostPort
from tandem_contract.timing import UNKNOWN

from ..bodies.kinds import Kind
from ..http.messages import ResponseHead
from ..http.relay import EventChunks
from ..http.upstream import Call, Failure
from ..observability.record import Leg, Result
from .classify import decode_event, read_timing, result_of, result_of_failure, tells_of_failure
from .context import Tools
from .events_actions import DecodeEnded, DecodeErrored, DecodeEvent, DecodeLost, DecodeStarted
from .recode import Recoder


class Side(Protocol):
    """Who hears of the decode leg."""

    def decoded(self, event: DecodeEvent) -> None:
        """Something happened to it."""

    def answer_bytes(self, data: bytes, *, last: bool) -> None:
        """Bytes of an answer that is being passed on."""


class DecodeLeg:
    """One decode leg; once `pass_on` was called its bytes are the client's."""

    def __init__(
        self,
        tools: Tools,
        side: Side,
        kind: Kind,
        engine: HostPort,
        seen: Leg,
        *,
        http10: bool,
        recode: bool,
    ) -> None:
        """`http10`: the client knows no chunks; `recode`: the answer's usage may be wrong."""
        self.payload_only = http10 or recode
        self.cached: int | None = None
        """The right count of cached tokens, known before the answer is passed on; None: leave it.
        """
        self.answer: ResponseHead | None = None
        self.timing = UNKNOWN
        self._tools = tools
        self._side = side
        self._seen = seen
        self._kind = kind
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._http10 = http10
        self._recode = recode
        self._recoder: Recoder | None = None
        self._chunks: EventChunks | None = None
        self._reads_kv = False
        self._passing = False
        self._dropped = False
        self._held: tuple[bytes, bool] | None = None
        """First bytes that may not go out yet, and whether they are the last."""
        self._call: Call | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._pulse = tools.vigil.watch(engine, self)

    def send(
        self, method: bytes, request: bytes, *, reads_kv: bool, patience: float | None
    ) -> None:
        """Begin. A leg that reads KV goes out once: its blocks may be another prompt's by then.

        `patience`: seconds until its first bytes, of an engine that may wait for ever.
        """
        if patience is not None:
            self._patience = self._loop.call_later(patience, self._waited, patience)
        self._reads_kv = reads_kv
        self._call = self._tools.pool.send(self._engine, method, request, self, once=reads_kv)

    def pause(self) -> None:
        """Take no more from the engine for now."""
        if self._call is not None:
            self._call.pause()

    def resume(self) -> None:
        """Take more again, unless what came is still held."""
        if self._call is not None and self._held is None:
            self._call.resume()

    def abort(self) -> None:
        """Close the connection; hand on nothing more, not even from the callback under way."""
        self._dropped = True
        status = self._seen.status
        result = Result.ABORTED if status is None or status < 500 else result_of(status)
        self._seen.end(result, self._loop.time(), status=status)
        self._pulse.leave(self)
        self._wait_no_more()
        if self._call is not None:
            self._call.abort()
            self._call = None

    def pass_on(self) -> ResponseHead | None:
        """Have bytes go to the side from now on. The head that they belong to, if one came."""
        self._passing = True
        if self._recode and self.answer is not None:
            self._recoder = Recoder(self.answer, self.cached, chunks=not self._http10)
            return self._recoder.head
        return self.answer

    def give_held(self) -> bool:
        """Hand on what was held before `pass_on`. Whether that was all of it."""
        held, self._held = self._held, None
        if held is None:
            return False
        self._hand_on(*held)
        return held[1]

    @property
    def between_chunks(self) -> bool:
        """Whether an error event may follow what was passed on."""
        if self._recode:
            return not self._http10
        return self._chunks is not None and self._chunks.between

    def silent(self, detail: str) -> None:
        """The engine hangs."""
        self._seen.end(Result.SILENT, self._loop.time(), detail=detail)
        self.abort()
        self._side.decoded(DecodeLost(f"decode failed: {detail}"))

    # What the engine says.

    def head(self, head: ResponseHead) -> None:
        self.answer = head
        self.timing = read_timing(head)
        seen = self._seen
        seen.first_byte, seen.status, seen.timing = self._loop.time(), head.status, self.timing
        if head.event_stream:
            self._chunks = EventChunks(head, wire=not self.payload_only)
        self._pulse.alive = True
        # Admission matters to KV that waits for it.
        if self._reads_kv or head.status >= 500:
            self._side.decoded(decode_event(self._kind, head.status))

    def body(self, data: bytes, last: bool) -> None:
        self._pulse.alive = True
        if self._chunks is not None:
            data = self._chunks.take(data)
        if last:
            self._pulse.leave(self)
            self._call = None
        if self._passing:
            if last or self._recoder is not None:
                self._pass(data, last)
            elif data and not self._dropped:
                self._side.answer_bytes(data, last=False)
        elif self._held is not None:
            self._held = self._held[0] + data, last
        elif (data or last) and not self._dropped:
            self._begin(data, last)

    def failed(self, failure: Failure, detail: str) -> None:
        status = self._seen.status
        self._seen.end(result_of_failure(failure), self._loop.time(), status=status, detail=detail)
        self._pulse.leave(self)
        self._wait_no_more()
        self._call = None
        self._side.decoded(DecodeLost(f"decode failed: {detail}", failure is Failure.STALE))

    def _waited(self, seconds: float) -> None:
        """The KV does not come, though the engine lives."""
        detail = f"{self._engine}: no first byte within {seconds:.3g}s of a pushed hand-off"
        self._seen.end(Result.DEADLINE, self._loop.time(), detail=detail)
        self.abort()
        self._side.decoded(DecodeLost(f"decode failed: {detail}", again=True))

    def _wait_no_more(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _begin(self, data: bytes, last: bool) -> None:
        self._wait_no_more()
        if self.answer is not None and tells_of_failure(self.answer, data):
            detail = "a stream that begins with an error"
            self._seen.end(Result.ERROR, self._loop.time(), status=200, detail=detail)
            self._side.decoded(DecodeErrored())
        else:
            self._side.decoded(DecodeStarted())
        if self._dropped:
            return
        if self._passing:
            self._pass(data, last)
            return
        self._held = data, last
        if not last:
            self.pause()

    def _pass(self, data: bytes, last: bool) -> None:
        self._hand_on(data, last)
        if last and not self._dropped:
            self._side.decoded(DecodeEnded())

    def _hand_on(self, data: bytes, last: bool) -> None:
        if self._dropped:
            return
        if last:
            status = self._seen.status or 0
            self._seen.end(result_of(status), self._loop.time(), status=status)
        if self._recoder is not None:
            data = self._recoder.take(data, last=last)
            if not data and not last:
                return
        self._side.answer_bytes(data, last=last)
