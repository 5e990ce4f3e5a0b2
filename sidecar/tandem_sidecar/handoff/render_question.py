"""Asks an engine, before it gets the rest of a chat that is parsed, whether it can go on with it.

A drain would otherwise close the call to an engine that still sends, for one that may refuse. The
stream runs on meanwhile, so that only the answer to `/v1/chat/completions/render` is kept, and the
rest is made once it is known where the stream is left.
"""

from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from msgspec.structs import replace

from tandem_contract.commandline import HostPort
from tandem_http1.answers import Answer, Collector, NoAnswer
from tandem_http1.connection import Call
from tandem_http1.messages import Request

from ..observability.record import Record
from .context import SidecarContext
from .outbound import engine_request
from .parsed_call import RENDER

_SECONDS: Final = 5.0
"""For an answer that takes milliseconds: the chat's template and its tokenizer."""


class RenderQuestion:
    """One question to one engine."""

    def __init__(
        self,
        context: SidecarContext,
        engine: HostPort,
        request: Request,
        record: Record,
        *,
        chat: bytes,
        answered: Callable[[bytes | None], None],
    ) -> None:
        """`chat`: as the engine would get it again. `answered` is called once, with what the engine
        makes of it; None: it does not say so, in time, or the request has ended."""
        self._record, self._answered = record, answered
        self._is_over = False
        self._deadline = context.loop.call_later(_SECONDS, self._give_up)
        made = engine_request(
            replace(request, target=RENDER),
            engine,
            record.legs[-1],
            chat,
            context.authorization(engine),
            prefill=True,
        )
        self._call: Call = context.pool.send(engine, b"POST", made, Collector(self._take))

    def _take(self, answer: Answer | NoAnswer) -> None:
        match answer:
            case Answer(head, body) if head.status == HTTPStatus.OK:
                self._end(body)
            case _:
                self._end(None)

    def _give_up(self) -> None:
        self._call.abort()
        self._end(None)

    def _end(self, rendered: bytes | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._deadline.cancel()
        self._answered(None if self._record.ended is not None else rendered)
