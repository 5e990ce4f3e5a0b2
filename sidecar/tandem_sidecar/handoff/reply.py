"""Responses of the sidecar: the headers that it adds to answers, and its own errors."""

import time
from functools import lru_cache
from http import HTTPStatus
from typing import Final

import msgspec

from tandem_contract import headers
from tandem_contract.api_grammar import error_body
from tandem_contract.paths import RoutingPath
from tandem_contract.timing import Timing
from tandem_http1.client import ClientConnection
from tandem_http1.messages import Request, response_bytes

from ..bodies.kinds import kind_of
from ..observability.record import MAX_TEXT, Record
from .context import RecordObserver, SidecarContext
from .outbound import INTERNAL, REQUEST_ID, client_request_id

ANSWER_DROPPED: Final = INTERNAL | {
    REQUEST_ID,
    headers.READS_STREAMS.encode(),
    headers.KV_CONTRADICTED.encode(),
}
"""Headers of an engine's answer that the sidecar writes itself."""
_TRACEPARENT: Final = headers.TRACEPARENT.encode()
_ALTERNATE: Final = headers.ALTERNATE_ENDPOINT.encode()


class ServedBy(msgspec.Struct, frozen=True, gc=False):
    """Which backends served a generation, as the answer's headers report it."""

    request_id: str
    path: RoutingPath
    decode: str
    """Empty if none was chosen."""
    prefill: str = ""
    """Empty if no prefill pod was sent the request."""
    timing: Timing | None = None
    """For the router, which removes it from the answer; None without a router."""

    def encode(self) -> bytes:
        """The header lines on the wire."""
        lines = f"{_routing_lines(self.path, self.prefill, self.decode)}{self.request_id}\r\n"
        if self.timing is not None:
            lines += f"{headers.TIMING}: {self.timing.encode()}\r\n"
        return lines.encode()


@lru_cache(maxsize=1024)
def _routing_lines(path: RoutingPath, prefill: str, decode: str) -> str:
    """The lines that are the same for many requests, up to the name of the request id's line."""
    lines = f"{headers.ROUTING_PATH}: {path}\r\n"
    if path is RoutingPath.PREFILL_THEN_DECODE and prefill:
        lines += f"{headers.PREFILL_BACKEND}: {prefill}\r\n"
    if decode:
        lines += f"{headers.DECODE_BACKEND}: {decode}\r\n"
    return f"{lines}{headers.REQUEST_ID}: "


def encode_headers(pairs: dict[str, str]) -> bytes:
    """Encode header lines; a pair with an empty value is left out."""
    return b"".join(b"%b: %b\r\n" % (k.encode(), v.encode()) for k, v in pairs.items() if v)


NO_RETRY: Final = encode_headers({headers.SHOULD_RETRY: "false"})
"""The header line of an error for a request that may hang any engine."""
_NOT_SENT: Final = encode_headers({headers.NOT_SENT: "1"})


def not_sent(request: Request) -> bytes:
    """The header line of an error for a request of which the engine got nothing, if Envoy knows
    another pod for it."""
    return _NOT_SENT if _ALTERNATE in request.values else b""


def new_record(context: SidecarContext, request: Request, request_id: str, kind: str) -> Record:
    """The record of a request that was just read."""
    record = Record(request_id, kind, context.loop.time(), time.time())
    if request.method != b"POST":
        record.method = request.method.decode("latin-1")
    record.target = request.target.partition(b"?")[0][:MAX_TEXT].decode("latin-1")
    # The history keeps it: of a later version than today's, which may be longer, the first four
    # fields count.
    record.traceparent = request.values.get(_TRACEPARENT, b"")[:MAX_TEXT].decode("latin-1")
    return record


def refuse_generation(
    observer: RecordObserver, request: Request, decode: str, request_id: str | None = None
) -> bytes:
    """Count the refusal of a request that would generate; returns the header lines of its error.

    `decode`: name of the backend that would have decoded; empty: none was chosen. `request_id`:
    None takes the client's.
    """
    if kind_of(request.method, request.target) is None:
        return b""
    observer.on_refusal()
    request_id = request_id or client_request_id(request)
    return ServedBy(request_id, RoutingPath.UNIFIED, decode).encode()


def send_error(
    client: ClientConnection,
    request: Request,
    status: int,
    message: str,
    lines: bytes,
    *,
    close: bool,
    retry_after: int = 1,
) -> None:
    """Send an error of the sidecar with header `lines`.

    A 503 tells the client in how many seconds to retry: `retry_after`.
    """
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        lines += encode_headers({headers.RETRY_AFTER: str(retry_after)})
    close = close or not request.keep_alive
    body = error_body(request.target.decode("latin-1"), status, message)
    head = request.method == b"HEAD"
    client.write(response_bytes(status, lines, body, close=close, head=head))
    client.finish(keep=not close)
