"""Flow control (RFC 9113, 5.2 and 6.9): windows of a connection or a stream, in both directions."""

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
