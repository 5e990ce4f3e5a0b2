"""What a client of a generation gets: an engine's answer or an error, under Tandem's headers."""

from functools import lru_cache
from http import HTTPStatus

import msgspec

from tandem_contract import headers
from tandem_contract.openai_errors import error_body
from tandem_contract.paths import RoutingPath
from tandem_contract.timing import Timing

from ..http.collect import Answer
from ..http.messages import Request, ResponseHead, response_bytes
from ..http.relay import Relay
from ..http.server import Client
from .outbound import ANSWER_DROPPED, header_lines


class Served(msgspec.Struct, frozen=True, gc=False):
    """By whom, as the headers tell it."""

    request_id: str
    path: RoutingPath
    decode: str
    prefill: str = ""
    """Empty when none was asked."""
    timing: Timing | None = None
    """For the router, which takes it off; None without one."""

    def lines(self) -> bytes:
        """The headers on the wire."""
        lines = f"{_by(self.path, self.prefill, self.decode)}{self.request_id}\r\n"
        if timing := self.timing.encode() if self.timing is not None else "":
            lines += f"{headers.TIMING}: {timing}\r\n"
        return lines.encode()


@lru_cache(maxsize=1024)
def _by(path: RoutingPath, prefill: str, decode: str) -> str:
    """The lines before the request's own, the last of them begun."""
    lines = f"{headers.ROUTING_PATH}: {path}\r\n"
    if path is RoutingPath.PREFILL_THEN_DECODE and prefill:
        lines += f"{headers.PREFILL_BACKEND}: {prefill}\r\n"
    return f"{lines}{headers.DECODE_BACKEND}: {decode}\r\n{headers.REQUEST_ID}: "


class Reply:
    """The one response to one request."""

    def __init__(self, client: Client, request: Request) -> None:
        self._client = client
        self._request = request
        self._relay = Relay(client, request)
        self.body = self._relay.body
        """Pass on bytes of the answer begun; `last` ends it."""

    def begin(self, head: ResponseHead, served: Served, *, close: bool) -> None:
        """Pass an engine's answer on from here; `close` the connection after it."""
        self._relay.begin(head, ANSWER_DROPPED, served.lines(), close=close)

    def cut(self, status: int, message: str, *, between_chunks: bool) -> None:
        """End the answer begun so that nobody takes it for whole."""
        self._relay.cut(status, message, between_chunks=between_chunks)

    def whole(self, answer: Answer, served: Served, *, close: bool) -> None:
        """Give an engine's collected answer."""
        close = close or not self._request.keep_alive
        drop = ANSWER_DROPPED | {b"content-length"}
        extra = served.lines() + b"content-length: %d\r\n" % len(answer.body)
        self._client.write(answer.head.encode(drop, extra, close=close, plain=True) + answer.body)
        self._client.finish(keep=not close)

    def error(
        self, status: int, message: str, served: Served, *, close: bool, retry_after: int = 1
    ) -> None:
        """Give an error of ours; see `refuse`."""
        lines = served.lines()
        refuse(
            self._client,
            self._request,
            status,
            message,
            lines,
            close=close,
            retry_after=retry_after,
        )


def refuse(
    client: Client,
    request: Request,
    status: int,
    message: str,
    lines: bytes,
    *,
    close: bool,
    retry_after: int = 1,
) -> None:
    """Answer with an error of ours and `lines` of headers.

    A 503 tells the client when to come back: after `retry_after` seconds.
    """
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        lines += header_lines({headers.RETRY_AFTER: str(retry_after)})
    close = close or not request.keep_alive
    body = error_body(status, message)
    head = request.method == b"HEAD"
    client.write(response_bytes(status, lines, body, close=close, head=head))
    client.finish(keep=not close)
