"""One stream as its client sees it, over all engines that serve it.

    kept = keep(client, request, kind, body)        None: no other engine can go on
    kept.asked                                      what the first engine is sent
    kept.read(payload, last=…) ─► kept.body(…)      its answer
    kept.move()                                     what the next engine is sent, after a failure
    kept.move_by_ids(rendered)                      likewise, without a failure

It takes the place of `Relay`: the client's head is sent once, and then whole events of whichever
engine serves the stream.
"""

from collections.abc import Mapping
from http import HTTPStatus
from time import monotonic
from typing import Final

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from tandem_contract.headers import RESUMED
from tandem_contract.request_kinds import RequestKind
from tandem_http1.answers import CutPoint, Relay, as_chunked
from tandem_http1.client import ClientConnection
from tandem_http1.framing import LAST_CHUNK, Sized, chunk
from tandem_http1.messages import Request, ResponseHead

from ..bodies.parse import Body
from ..observability.record import Move, MoveMethod, Record
from .continuation import (
    Splice,
    asks_for_ids,
    asks_for_usage,
    continued,
    usage_event,
    with_ids,
    without_ids,
)
from .errors import AnswerDiffers, StreamBroken
from .ledger import DONE, PARSED, Ledger
from .parsed_rest import NotContinued, ParsedRest, generation_request
from .rules import (
    count_choices,
    has_tools,
    is_greedy,
    obstacle,
    parsing_obstacle,
    repeat_obstacle,
    stop_strings,
)
from .seam import Seam
from .transcript import Transcript
from .whole_events import MALFORMED
from .whole_tokens import Vocabularies, WholeTokens

_UNCODED: Final = (b"", b"identity")
_RESUMED: Final = RESUMED.encode()
_CHUNK_USAGE: Final = b'"usage":{"prompt_tokens":'
_TYPED_USAGE: Final = b'"usage":{"input_tokens":'
_USAGE: Final[Mapping[RequestKind, bytes]] = {
    RequestKind.COMPLETIONS: _CHUNK_USAGE,
    RequestKind.CHAT: _CHUNK_USAGE,
    RequestKind.MESSAGES: _TYPED_USAGE,
    RequestKind.RESPONSES: _TYPED_USAGE,
}
"""How a usage begins, in vLLM's order. With its first member, since responses repeat the request's
tools, and a parameter of one may be called `usage`. Within a string of JSON quotes are escaped, so
it is never found in a text."""


class KeptStream(Relay):
    """A stream that another engine can continue."""

    def __init__(
        self,
        client: ClientConnection,
        request: Request,
        kind: RequestKind,
        asked: Body,
        *,
        record: Record,
        tokens: WholeTokens | None,
        keeps_ids: bool,
        max_regeneration: float | None,
    ) -> None:
        """`tokens`: what is known of the model's; None: the stream is not continued by ids.
        `keeps_ids`: the client asked for the ids itself. `max_regeneration`: seconds for which
        another engine may generate what was delivered; None: it generates nothing again."""
        super().__init__(client, request)
        self._record = record
        self.request, self.asked = request, asked
        """The request as the first engine gets it."""
        self._kind, self._tokens = kind, tokens
        self._max_regeneration = max_regeneration
        self._keeps_ids = keeps_ids
        self._reader = self._new_reader()
        self.rest: ParsedRest | None = None
        """What the next engine is to generate and parse in separate requests; None: its answer to
        what it is sent is the rest."""
        self._unparsed = ""
        """Why no engine is asked to do that; empty: none refused."""
        self._difference = ""
        """Why no further engine is tried; empty: none generated another answer."""
        self._begun = False
        self._sent: float | None = None
        """When the client got the newest bytes."""
        self._move: Move | None = None
        """The move to the engine that serves the stream, until the client gets something of it."""
        self._is_stream = True
        """Whether the answer is the stream that was asked for, and can be read: no error."""
        self._is_chunked = True
        self._tells_moves = _RESUMED in request.values
        """Whether the client asked how often another engine went on."""

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
        try:
            out = self._reader.take(payload)
        except AnswerDiffers as err:
            self._difference = str(err)
            raise
        if last and not self._reader.is_done:
            raise StreamBroken("the stream ended before its last event", out)
        return out

    def body(self, data: bytes, *, last: bool) -> None:
        if data:
            self._sent = monotonic()
            if self._move is not None:
                self._move.resumed, self._move = self._sent, None
            if self._tells_moves and self._is_stream:
                data = self._with_moves(data)
        if self._is_chunked:
            data = (chunk(data) if data else b"") + (LAST_CHUNK if last else b"")
        super().body(data, last=last)

    def _with_moves(self, data: bytes) -> bytes:
        """Whole events, whose usages say how often another engine went on with the stream."""
        count = sum(move.resumed is not None for move in self._record.moves)
        usage = _USAGE[self._kind]
        begin = len(b'"usage":{')
        told = b'%b"tandem_resumed":%d,%b' % (usage[:begin], count, usage[begin:])
        return data.replace(usage, told)

    def cut(self, status: int, message: str, at: CutPoint) -> None:
        # Of a stream only whole events were sent, each in a chunk.
        at = CutPoint.BETWEEN_CHUNKS if self._is_stream else CutPoint.WITHIN_EVENT
        super().cut(status, message, at)

    def move(self) -> Body | None:
        """The request with which another engine goes on; None: none can."""
        self.rest = None
        if not self.written:
            return self._start_again()
        reader = self._reader
        if self._difference:
            why, rest = self._difference, None
        elif not self._is_stream:
            why, rest = "the answer is no stream of events", None
        elif isinstance(reader, Transcript):
            why, rest = self._begin_again(reader)
        elif self._is_rest_parsed(reader):
            why, rest = "", self._continue_parsed(reader)
        elif reader.transcript is not None and (reader.obstacle or not reader.delivered):
            why, rest = self._begin_again(reader.transcript)
        else:
            why, rest = self._continue(reader)
        return self._noted(why, rest)

    @property
    def needs_question(self) -> bool:
        """Whether an engine is to say what it makes of the chat, before the stream leaves another
        that still sends it: it may not parse the rest."""
        reader, begun = self._reader, bool(self.written) and self._is_stream
        return begun and isinstance(reader, Ledger) and self._may_parse_rest(reader)

    def move_by_ids(self, rendered: bytes | None = None) -> Body | None:
        """Likewise of a stream that its engine still sends; None: it is left as it is. Not by
        generating the answer again: that takes longer and can end the stream. `rendered`: what the
        next engine makes of the chat, if the stream `needs_question`."""
        self.rest = None
        if not self.written:
            return self._start_again()
        reader = self._reader
        if not self._is_stream:
            why, rest = "the answer is no stream of events", None
        elif isinstance(reader, Transcript):
            why, rest = "it is not continued by token ids", None
        elif self._is_parsed(reader):
            why, rest = self._continue_rendered(reader, rendered)
        else:
            why, rest = self._continue(reader)
        return self._noted(why, rest)

    def _start_again(self) -> Body:
        """The request of a stream of which nothing was delivered."""
        self._reader = self._new_reader()
        self._begun = False
        self._begin_move(MoveMethod.BEGUN_AGAIN)
        return self.asked

    def _noted(self, why: str, rest: Body | None) -> Body | None:
        """Record why no engine gets the rest, if none does."""
        if rest is None:
            self._record.not_resumed = why
        return rest

    def _begin_move(
        self, method: MoveMethod, delivered: int = 0, seam: int = 0, prompt: int = 0
    ) -> None:
        # It may say why a drain left the stream where it was.
        self._record.not_resumed = ""
        self._move = self._record.begin_move(
            method, delivered=delivered, seam=seam, prompt=prompt, last_byte=self._sent
        )

    def _continue(self, ledger: Ledger) -> tuple[str, Body | None]:
        """The request that continues the stream by ids, or why none does."""
        if ledger.is_finished:
            return "the stream is finished", None
        parsing = self._parsing_obstacle(ledger) if self._is_parsed(ledger) else ledger.obstacle
        if parsing or not ledger.prompt_ids:
            return parsing or "the engine sent no token ids", None
        if ledger.seam.start < ledger.delivered and not is_greedy(self.asked.members):
            # Drawn again, these tokens would be others.
            return "tokens would have to be drawn again, and temperature is not 0", None
        rest = continued(self._kind, self.asked, ledger)
        if rest is None:
            return "all tokens were sent", None
        try:
            editor = Splice(ledger)
        except MALFORMED as err:
            # Without what it says, which may be of the answer.
            return f"an event cannot be read ({type(err).__name__})", None
        ledger.begin_again()
        ledger.editor = editor
        seam, prompt = ledger.seam.start, len(ledger.prompt_ids)
        self._begin_move(MoveMethod.CONTINUED, ledger.delivered, seam, prompt)
        return "", rest

    def _is_parsed(self, ledger: Ledger) -> bool:
        """Whether the engine reads more than text from the answer, or may."""
        may_be = not ledger.obstacle and has_tools(self.asked.members)
        return may_be or ledger.obstacle == PARSED

    def _is_rest_parsed(self, ledger: Ledger) -> bool:
        """Whether the tokens that are left are to be parsed by themselves. If none was delivered,
        it is simpler to generate them again."""
        is_simpler = ledger.transcript is not None and not ledger.delivered
        return not is_simpler and self._may_parse_rest(ledger)

    def _parsing_obstacle(self, ledger: Ledger) -> str:
        """Why the tokens that are left of a parsed stream are not parsed by themselves; empty: they
        are."""
        if self._unparsed or ledger.is_finished:
            return self._unparsed or "the stream is finished"
        if not ledger.prompt_ids:
            return "the engine sent no token ids"
        return parsing_obstacle(self.asked.members) or ""

    def _may_parse_rest(self, ledger: Ledger) -> bool:
        return self._is_parsed(ledger) and not self._parsing_obstacle(ledger)

    def _continue_rendered(self, ledger: Ledger, rendered: bytes | None) -> tuple[str, Body | None]:
        """The chat whose rest the next engine is to parse, which made `rendered` of it; or why it
        is not to."""
        if obstacle := self._parsing_obstacle(ledger):
            return obstacle, None
        if rendered is None:
            return "no other engine parses its tokens", None
        prompt, done = ledger.prompt_ids.tolist(), ledger.ids[: ledger.delivered].tolist()
        try:
            # Before what the engine sent beyond that is forgotten.
            prepared = generation_request(rendered, prompt, done)
        except NotContinued as err:
            return str(err), None
        except MALFORMED as err:
            return f"what an engine makes of it cannot be read ({type(err).__name__})", None
        rest = self._continue_parsed(ledger, prepared)
        return "", rest

    def _continue_parsed(self, ledger: Ledger, prepared: bytes | None = None) -> Body:
        ledger.begin_parsed()
        options = msgspec.json.decode(self.asked.members.get("stream_options", Raw(b"null"))) or {}
        self.rest = ParsedRest(
            self.asked,
            ledger,
            usage=options.get("include_usage") is True,
            continuous=options.get("continuous_usage_stats") is True,
        )
        self.rest.prepared = prepared
        count, prompt = ledger.delivered, len(ledger.prompt_ids)
        self._begin_move(MoveMethod.CONTINUED, count, count, prompt)
        return self.asked

    @property
    def is_continued(self) -> bool:
        """Whether the engine that gets the stream is to continue it by ids."""
        return self._move is not None and self._move.method is MoveMethod.CONTINUED

    def refuse_rest(self, why: str) -> Body | None:
        """The engine that got the stream last cannot do what `rest` says, because of `why`; returns
        the request with which it generates the answer again; None: it cannot do that, either."""
        self._unparsed = why
        *before, refused = self._record.moves
        self._record.moves = tuple(before)
        rest = self.move()
        if rest is None:
            self._record.moves = (*before, refused)
        else:
            # The leg is the one that has begun.
            self._record.moves[-1].legs = refused.legs
        return rest

    def _begin_again(self, transcript: Transcript) -> tuple[str, Body | None]:
        """The request with which the answer is generated again, or why it is not."""
        most = self._max_regeneration
        if most is None or transcript.obstacle:
            return transcript.obstacle, None
        if transcript.seconds > most:
            taken = f"{transcript.seconds:.1f} s, more than {most:g} s"
            return f"to generate again what was sent would take {taken}", None
        transcript.begin_again()
        self._reader = transcript
        self._begin_move(MoveMethod.AGAIN, transcript.delivered)
        by_client = self._keeps_ids or self._tokens is None
        return "", self.asked if by_client else without_ids(self.asked)

    @property
    def is_read_by_ids(self) -> bool:
        """Whether the engine is asked for token ids, which it then sends in an event for each."""
        return isinstance(self._reader, Ledger)

    @property
    def has_token_events(self) -> bool:
        """Whether the engine sends an event for each token, also for one without text: it does if
        it sends the ids that it was asked for."""
        reader = self._reader
        return isinstance(reader, Ledger) and bool(reader.prompt_ids) and not reader.is_done

    def _new_reader(self) -> Ledger | Transcript:
        if self._tokens is None:
            return self._new_transcript()
        stops, included = stop_strings(self.asked.members)
        return Ledger(
            self._kind,
            Seam(stops, included=included),
            self._tokens,
            keeps_ids=self._keeps_ids,
            transcript=self._new_transcript() if self._max_regeneration is not None else None,
        )

    def _new_transcript(self) -> Transcript:
        return Transcript(self._kind, count_choices(self._kind, self.asked.members))

    def missing_end(self) -> bytes | None:
        """What completes a stream that its engine has finished, when only the events after the
        last token were lost; None: more is missing."""
        reader, asks = self._reader, asks_for_usage(self.asked.members)
        if not self._is_stream or not reader.is_finished or reader.is_done:
            return None
        lacks_usage = asks and not reader.has_usage
        if isinstance(reader, Transcript):
            return None if lacks_usage else DONE
        if reader.obstacle:
            return None if lacks_usage else DONE
        if not reader.prompt_ids:
            return None
        return (usage_event(reader) if lacks_usage else b"") + DONE


def keep(
    client: ClientConnection,
    request: Request,
    kind: RequestKind,
    body: Body,
    *,
    record: Record,
    vocabularies: Vocabularies,
    max_regeneration: float,
) -> KeptStream | None:
    """The stream that `body` asks for, if another engine can go on with it; otherwise the record
    gets the reason. `max_regeneration`: see `Settings.resume_max_regeneration`."""
    members = body.members
    if request.http10 or bytes(members.get("stream", Raw(b"false"))) != b"true":
        return None
    by_ids, again = obstacle(kind, members), repeat_obstacle(kind, members)
    if not max_regeneration:
        again = "nothing is generated again"
    if by_ids is not None and again is not None:
        record.not_resumed = f"{by_ids}, and {again}"
        return None
    tokens, keeps_ids = None, asks_for_ids(members)
    if by_ids is None:
        tokens = vocabularies.of(bytes(members.get("model", b"")))
        if not keeps_ids:
            # The only copy of a long prompt: the client's bytes are not needed any more.
            body = with_ids(body)
            request = replace(request, body=body.data)
    return KeptStream(
        client,
        request,
        kind,
        body,
        record=record,
        tokens=tokens,
        keeps_ids=keeps_ids,
        max_regeneration=max_regeneration if again is None else None,
    )
