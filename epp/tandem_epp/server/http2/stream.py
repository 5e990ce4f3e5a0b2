"""A stream's state, the windows of streams and connections in both directions (RFC 9113, 5.2 and
6.9), and the events that a connection reports about streams.
"""

from collections import deque

from .errors import ErrorCode
from .headers import RequestHead
from .limits import LARGEST_WINDOW


class SendWindow:
    """Bytes that the peer still takes. Negative after the peer has made its windows smaller."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size

    def grow(self, increment: int) -> bool:
        """Add `increment`, which may be negative; False: the window would exceed its maximum."""
        if self.size + increment > LARGEST_WINDOW:
            return False
        self.size += increment
        return True


class ReceiveWindow:
    """Bytes that the peer may still send, and those that are consumed but not yet given back."""

    __slots__ = ("_consumed", "_least", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._consumed = 0
        # An update for half of the window: an update per frame would cost both sides a frame, and
        # one for the whole window would stop the sender.
        self._least = max(1, size // 2)

    def take(self, size: int) -> bool:
        """Count `size` received bytes; False: the peer exceeded the window."""
        self.size -= size
        return self.size >= 0

    def consume(self, size: int) -> int:
        """Count `size` bytes as consumed; returns the increment to announce, 0 for none yet."""
        self._consumed += size
        if self._consumed < self._least:
            return 0
        increment, self._consumed = self._consumed, 0
        self.size += increment
        return increment


class Stream:
    """An open or half-closed stream (RFC 9113, 5.1)."""

    __slots__ = (
        "call",
        "expected",
        "has_answer",
        "id",
        "is_ending",
        "is_lasting",
        "is_local_open",
        "is_paused",
        "is_remote_open",
        "queue",
        "receive_window",
        "send_window",
        "trailers",
        "unsent",
        "withheld",
    )

    def __init__(self, stream_id: int, send_window: int, receive_window: int) -> None:
        self.id = stream_id
        self.send_window = SendWindow(send_window)
        self.receive_window = ReceiveWindow(receive_window)
        self.is_remote_open = True
        """Whether the peer may still send DATA or trailers."""
        self.is_local_open = True
        """Whether this side may still send."""
        self.has_answer = False
        """Whether response headers were sent."""
        self.is_lasting = False
        """Whether it is no request, but lasts as long as its connection, as an access log does."""
        self.expected: int | None = None
        """Bytes of DATA still to come, if the client gave content-length."""
        self.queue: deque[bytes | memoryview] | None = None
        """DATA that waits for a window; while there is any, `trailers` and the end wait too. None:
        none ever waited, as on most streams, whose deque would cost more than their DATA."""
        self.unsent = 0
        """Bytes in `queue`."""
        self.trailers: bytes | None = None
        """The block of trailers that follows `queue`."""
        self.is_ending = False
        """Whether nothing follows `queue` and `trailers`."""
        self.is_paused = False
        """Whether the session wants no more of the stream for now."""
        self.withheld = 0
        """Consumed bytes that are not given back to the peer while the stream is not read."""
        self.call: object = None
        """Owned by the session."""

    def fits(self, size: int, is_end: bool) -> bool:
        """Count `size` bytes of DATA, the last ones if `is_end`, against content-length."""
        if self.expected is None:
            return True
        self.expected -= size
        return self.expected >= 0 and not (is_end and self.expected)


class Event:
    """What happened on a stream. Plain classes, which are made and read fastest once compiled."""

    __slots__ = ("stream",)

    def __init__(self, stream: Stream) -> None:
        self.stream = stream


class RequestReceived(Event):
    """A stream was opened."""

    __slots__ = ("head", "is_end")

    def __init__(self, stream: Stream, head: RequestHead, is_end: bool) -> None:
        """`is_end`: it has no body."""
        self.stream, self.head, self.is_end = stream, head, is_end


class DataReceived(Event):
    """Bytes of a stream, possibly none."""

    __slots__ = ("data", "is_end")

    def __init__(self, stream: Stream, data: bytes, is_end: bool) -> None:
        """`is_end`: they are its last ones."""
        self.stream, self.data, self.is_end = stream, data, is_end


class StreamEnded(Event):
    """A stream is over before its answer was complete: reset by either side, or lost with the
    connection."""

    __slots__ = ("code",)

    def __init__(self, stream: Stream, code: ErrorCode | int) -> None:
        self.stream, self.code = stream, code
