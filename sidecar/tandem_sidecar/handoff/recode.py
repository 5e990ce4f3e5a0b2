"""An answer whose count of cached tokens has to be set right, framed anew for the client."""

from ..bodies.usage import Corrector
from ..http.framing import LAST_CHUNK, chunk
from ..http.messages import ResponseHead

_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class Recoder:
    """Takes an answer's payload, gives what goes out: in chunks, for its length may change."""

    def __init__(self, head: ResponseHead, cached: int | None, *, chunks: bool) -> None:
        """`cached`: None leaves the count; `chunks`: false for a client that knows none."""
        self.head = _chunked(head)
        """The engine's, for a chunked answer."""
        self._chunks = chunks
        self._corrector = (
            Corrector(cached, stream=head.event_stream) if cached is not None else None
        )

    def take(self, payload: bytes, *, last: bool) -> bytes:
        """What goes out now; nothing while it has to be held."""
        if self._corrector is not None:
            payload = self._corrector.take(payload, last=last)
        if not self._chunks:
            return payload
        out = chunk(payload) if payload else b""
        return out + LAST_CHUNK if last else out


def _chunked(head: ResponseHead) -> ResponseHead:
    lines = [b"%b: %b" % pair for pair in head.headers if pair[0] not in _FRAMING]
    block = b"\r\n".join([head.status_line, *lines, b"transfer-encoding: chunked"])
    return ResponseHead(block, b"POST")
