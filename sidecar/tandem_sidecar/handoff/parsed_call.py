"""Continues a chat whose answer is parsed, by three kinds of requests to one engine.

    /v1/chat/completions/render      once: what it makes of the chat, which tells whether it can go
                                     on by ids
    /inference/v1/generate           once: the tokens that are left
    /v1/chat/completions/derender    for each group of tokens: what the client gets of them

`ParsedCall` takes the place of the one call to an engine: its receiver gets the events of a chat.
vLLM serves these paths with `--enable-scale-out` only.
"""

from collections.abc import Callable
from http import HTTPStatus
from typing import Final, Protocol

from tandem_contract.commandline import HostPort
from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_http1.answers import Answer, Collector, NoAnswer
from tandem_http1.connection import Call, Failure, Receiver
from tandem_http1.messages import ResponseHead
from tandem_http1.upstream import Pool

from ..resume.errors import StreamBroken
from ..resume.parsed_rest import NotContinued, ParsedRest
from ..resume.whole_events import MALFORMED

RENDER: Final = b"/v1/chat/completions/render"
_DERENDER: Final = b"/v1/chat/completions/derender"
_GENERATE: Final = PATHS[RequestKind.GENERATE].encode()
_POST: Final = b"POST"
_NOT_SERVED: Final = HTTPStatus.NOT_IMPLEMENTED
"""The one status above 500 that says nothing of the engine's health."""


class RestReceiver(Receiver, Protocol):
    """Takes the events of the stream."""

    def rest_refused(self, why: str) -> None:
        """The engine cannot go on by ids; nothing follows."""


class RequestMaker(Protocol):
    """Encodes a request to the engine."""

    def __call__(self, target: bytes, body: bytes, *, generates: bool) -> bytes:
        """`generates`: it is the one that the engine computes."""


class ParsedCall:
    """One continued stream at one engine."""

    payload_only = True

    def __init__(
        self,
        pool: Pool,
        engine: HostPort,
        rest: ParsedRest,
        receiver: RestReceiver,
        make_request: RequestMaker,
    ) -> None:
        self._pool, self._engine, self._rest = pool, engine, rest
        self._receiver, self._make_request = receiver, make_request
        self._tokens: Call | None = None
        """The call that generates."""
        self._other: Call | None = None
        """The call that renders or parses."""
        self._is_stream = False
        """Whether the engine generates; else its answer is an error."""
        self._is_paused = self._is_over = False
        self.sent: float | None = None
        """As of a `Call`; not known, and asked for only of a request whose client has nothing."""

    def start(self, chat: bytes) -> None:
        """Ask the engine what it makes of the chat, unless it has said so."""
        if self._rest.prepared is None:
            self._ask(RENDER, chat, self._rendered)
        else:
            self._generate(self._rest.prepared)

    def pause(self) -> None:
        """Send nothing more to the receiver until `resume`."""
        self._is_paused = True
        if self._tokens is not None:
            self._tokens.pause()

    def resume(self) -> None:
        """Go on."""
        self._is_paused = False
        if self._tokens is not None:
            self._tokens.resume()
        self._go_on()

    def abort(self) -> None:
        """End all calls; nothing follows."""
        self._is_over = True
        for call in (self._tokens, self._other):
            if call is not None:
                call.abort()

    # Receiver of the tokens.

    def head(self, head: ResponseHead) -> None:
        self._is_stream = head.status == 200 and head.event_stream
        self._receiver.head(head)

    def body(self, data: bytes, last: bool) -> None:
        if not self._is_stream:
            self._receiver.body(data, last)
            return
        try:
            self._rest.take(data)
        except StreamBroken as err:
            self._lost(str(err))
            return
        self._go_on()
        if last and not self._rest.is_whole:
            self._lost("the stream ended before its last event")

    def failed(self, failure: Failure, detail: str) -> None:
        self.abort()
        self._receiver.failed(failure, detail)

    def _ask(self, path: bytes, body: bytes, read: Callable[[Answer], None]) -> None:
        def done(answer: Answer | NoAnswer) -> None:
            if self._is_over:
                return
            match answer:
                case NoAnswer(failure, detail):
                    # Aborts this request, too: an answer above the limit goes on arriving.
                    self.failed(failure, detail)
                case Answer(head) if head.status >= 500 and head.status != _NOT_SERVED:
                    self._lost(f"answered with an error ({head.status} for {path.decode()})")
                case Answer():
                    self._other = None
                    read(answer)

        request = self._make_request(path, body, generates=False)
        self._other = self._pool.send(self._engine, _POST, request, Collector(done))

    def _rendered(self, answer: Answer) -> None:
        if answer.head.status != HTTPStatus.OK:
            path = RENDER.decode()
            self._refuse(f"the engine does not parse tokens ({answer.head.status} for {path})")
            return
        try:
            body = self._rest.generation(answer.body)
        except NotContinued as err:
            self._refuse(str(err))
        except MALFORMED as err:
            self._refuse(f"what the engine makes of it cannot be read ({type(err).__name__})")
        else:
            self._generate(body)

    def _generate(self, body: bytes) -> None:
        request = self._make_request(_GENERATE, body, generates=True)
        self._tokens = self._pool.send(self._engine, _POST, request, self)
        if self._is_paused:
            self._tokens.pause()

    def _refuse(self, why: str) -> None:
        self._is_over = True
        self._receiver.rest_refused(why)

    def _go_on(self) -> None:
        """Have the new tokens parsed, or end the stream after the last."""
        if self._is_paused or self._is_over or self._other is not None:
            return
        if (body := self._rest.next_parse()) is not None:
            self._ask(_DERENDER, body, self._parsed)
        elif (end := self._rest.end()) is not None:
            self._is_over = True
            self._receiver.body(end, True)

    def _parsed(self, answer: Answer) -> None:
        if answer.head.status != HTTPStatus.OK:
            self._lost(f"the engine does not parse tokens ({answer.head.status})")
            return
        try:
            event = self._rest.events(answer.body)
        except MALFORMED as err:
            self._lost(f"parsed tokens cannot be read ({type(err).__name__})")
            return
        self._receiver.body(event, False)
        self._go_on()

    def _lost(self, problem: str) -> None:
        self.failed(Failure.LOST, problem)
