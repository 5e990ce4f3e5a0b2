"""One stream as its client sees it, over all engines that serve it.

    kept = keep(client, request, kind, body)        None: no other engine could go on
    kept.asked                                      what the first engine is sent
    kept.read(payload, last=…) ─► kept.body(…)      its answer
    kept.move()                                     what the next engine is sent, after a failure

It takes the place of `Relay`: the client's head is sent once, and then whole events of whichever
engine serves the stream.
"""

from http import HTTPStatus
from typing import Final

from msgspec import Raw

from tandem_contract.request_kinds import RequestKind
from tandem_http1.answers import CutPoint, Relay, as_chunked
from tandem_http1.client import ClientConnection
from tandem_http1.framing import LAST_CHUNK, Sized, chunk
from tandem_http1.messages import Request, ResponseHead

from ..bodies.parse import Body
from ..observability.record import Record
from .continuation import (
    Splice,
    asks_for_ids,
    asks_for_usage,
    continued,
    usage_event,
    with_ids,
)
from .errors import StreamBroken
from .ledger import DONE, Ledger
from .rules import is_greedy, obstacle, stop_strings
from .seam import Seam
from .whole_tokens import Vocabularies, WholeTokens

_UNCODED: Final = (b"", b"identity")


class KeptStream(Relay):
    """A stream that another engine can continue."""

    def __init__(
        self,
        client: ClientConnection,
        request: Request,
        kind: RequestKind,
        body: Body,
        *,
        record: Record,
        tokens: WholeTokens,
    ) -> None:
        super().__init__(client, request)
        self._record = record
        self.asked = with_ids(body)
        """The request as the first engine gets it."""
        self._kind, self._tokens = kind, tokens
        self._keeps_ids = asks_for_ids(body.members)
        self._ledger = self._new_ledger()
        self._begun = False
        self._is_stream = True
        """Whether the answer is the stream that was asked for, and can be read: no error."""
        self._is_chunked = True

    def begin(
        self, head: ResponseHead, drop: frozenset[bytes], extra: bytes, *, close: bool
    ) -> None:
        if self._begun:
            return
        self._begun = True
        is_readable = head.event_stream and head.value(b"content-encoding") in _UNCODED
        self._is_stream = head.status == HTTPStatus.OK and is_readable
        self._is_chunked = self._is_stream or not isinstance(head.framing, Sized)
        head = as_chunked(head) if self._is_chunked else head
        super().begin(head, drop, extra, close=close)

    def read(self, payload: bytes, *, last: bool) -> bytes:
        """The bytes that the client may have now. Raises StreamBroken for a stream that breaks off,
        whatever its framing says; the caller first writes what it has `before`."""
        if not self._is_stream:
            return payload
        out = self._ledger.take(payload)
        if last and not self._ledger.is_done:
            raise StreamBroken("the stream ended before its last event", out)
        return out

    def body(self, data: bytes, *, last: bool) -> None:
        if self._is_chunked:
            data = (chunk(data) if data else b"") + (LAST_CHUNK if last else b"")
        super().body(data, last=last)

    def cut(self, status: int, message: str, at: CutPoint) -> None:
        # Of a stream only whole events were sent, each in a chunk.
        at = CutPoint.BETWEEN_CHUNKS if self._is_stream else CutPoint.WITHIN_EVENT
        super().cut(status, message, at)

    def move(self) -> Body | None:
        """The request with which another engine goes on; None: none can."""
        ledger = self._ledger
        if not self.written:
            self._ledger = self._new_ledger()
            self._begun = False
            return self.asked
        if why := self._obstacle():
            self._record.not_resumed = why
            return None
        ledger.begin_again()
        ledger.editor = Splice(ledger)
        rest = continued(self._kind, self.asked, ledger)
        if rest is None:
            self._record.not_resumed = "all tokens were sent"
        else:
            self._record.moves += 1
        return rest

    def _obstacle(self) -> str:
        """Why no other engine can go on from here; empty: one can."""
        ledger = self._ledger
        if not self._is_stream:
            return "the answer is no stream of events"
        if ledger.is_finished:
            return "the stream is finished"
        if ledger.obstacle or not ledger.prompt_ids:
            return ledger.obstacle or "the engine sent no token ids"
        if ledger.seam.start < ledger.delivered and not is_greedy(self.asked.members):
            # Drawn again, these tokens would be others.
            return "tokens would have to be drawn again, and temperature is not 0"
        return ""

    def _new_ledger(self) -> Ledger:
        stops, included = stop_strings(self.asked.members)
        seam = Seam(stops, included=included)
        return Ledger(self._kind, seam, self._tokens, keeps_ids=self._keeps_ids)

    def missing_end(self) -> bytes | None:
        """What completes a stream that its engine has finished, when only the events after the
        last token were lost; None: more is missing."""
        ledger = self._ledger
        if not self._is_stream or not ledger.is_finished or not ledger.prompt_ids:
            return None
        if ledger.obstacle or ledger.is_done:
            return None
        lacks_usage = asks_for_usage(self.asked.members) and not ledger.has_usage
        return (usage_event(ledger) if lacks_usage else b"") + DONE


def keep(
    client: ClientConnection,
    request: Request,
    kind: RequestKind,
    body: Body,
    *,
    record: Record,
    vocabularies: Vocabularies,
) -> KeptStream | None:
    """The stream that `body` asks for, if another engine can continue it exactly; otherwise the
    record gets the reason."""
    members = body.members
    if request.http10 or bytes(members.get("stream", Raw(b"false"))) != b"true":
        return None
    if why := obstacle(kind, members):
        record.not_resumed = why
        return None
    tokens = vocabularies.of(bytes(members.get("model", b"")))
    return KeptStream(client, request, kind, body, record=record, tokens=tokens)
