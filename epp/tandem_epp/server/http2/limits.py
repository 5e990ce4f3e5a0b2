"""Every bound of a connection, with its unit and reason; budgets of frames that cost work."""

from dataclasses import dataclass
from typing import Final

DEFAULT_WINDOW: Final = 65_535
"""Bytes of each window before SETTINGS change it (RFC 9113, 6.9.2)."""
DEFAULT_FRAME: Final = 16_384
"""Bytes of the largest frame before SETTINGS change it."""
LARGEST_FRAME: Final = (1 << 24) - 1
"""Bytes: no peer may announce more."""
LARGEST_WINDOW: Final = (1 << 31) - 1
"""Bytes of the largest window."""
LAST_STREAM: Final = (1 << 31) - 1
"""The largest stream id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what one peer may make this server do; sizes in bytes."""

    connections: int = 1024
    """Connections at a time; a further one gets the place of one that waits for its client, or is
    closed (`tandem_contract.connections`). An Envoy worker opens one or two."""
    streams: int = 4096
    """Streams at a time on a connection. An ext_proc stream lasts as long as its request; a gateway
    with more opens another connection. A stream beyond it is refused, which is safe to retry."""
    frame: int = 64 * 1024
    """Largest frame that is read. Larger ones save little and hold more memory per connection."""
    message: int = 4 << 20
    """Largest gRPC message; a larger one gets RESOURCE_EXHAUSTED before its bytes are collected."""
    header_block: int = 64 * 1024
    """Encoded header section, over all its frames. Envoy sends at most 60 KiB by default."""
    header_list: int = 64 * 1024
    """Decoded header section, 32 bytes added per field: a small block can decode to a huge one."""
    continuations: int = 16
    """CONTINUATION frames of a header section: without it, empty ones could follow for ever."""
    settings: int = 32
    """Entries in a SETTINGS frame; the protocol knows fewer than ten."""
    stream_window: int = 1 << 20
    """Bytes that a peer may send on a stream before this server has consumed them."""
    connection_window: int = 16 << 20
    """The same for all streams of a connection together."""
    stream_unsent: int = 256 * 1024
    """Answers that wait for a stream's window; with more, the stream is not read until the peer
    takes some. It may be exceeded by the answers to what the stream's window let in."""
    connection_unsent: int = 256 << 20
    """Answers that wait for windows on a connection; with more, a peer that does not read is
    disconnected. It must be well above the largest request body, which is sent back."""
    frames_burst: float = 2000
    """Frames with little or no content that may come at once: PING, and DATA below `SMALL_FRAME`. A
    larger frame, and each message that is complete, allows more (`FRAMES_PER_CONTENT`)."""
    frames_per_second: float = 200
    """How fast that allowance recovers."""
    resets_burst: float = 8192
    """Streams that may be reset at once before they had any answer, or by this server because of
    what the peer sent (CVE-2025-8671): twice `streams`, because the clients of a gateway may leave
    all at the same moment."""
    resets_per_second: float = 1000
    """How fast that allowance recovers. At this rate the resets cost a few percent of a core."""
    preface_seconds: float = 10.0
    """Seconds from a connection to its first SETTINGS frame, or to the end of a request by
    HTTP/1.1."""
    idle_seconds: float = 3660.0
    """Seconds without a byte, after which a connection is ended that has no request; it may have an
    access log. Above Envoy's idle timeout of an hour, so that Envoy closes first."""
    request_seconds: float = 300.0
    """Seconds without a byte, after which a connection is ended whose streams all wait for the rest
    of their requests. Above the time that a body has (`--body-timeout`)."""
    stall_seconds: float = 60.0
    """Seconds without a byte taken by a peer whose connection is full, after which it is cut."""


FRAMES_PER_CONTENT: Final = 2.0
"""Frames without content that a frame with content pays for: grpc clients send up to two window
updates for each message."""
FRAMES_PER_MESSAGE: Final = 1 + FRAMES_PER_CONTENT
"""The same for a complete message: a small one comes in a frame that has cost an allowance."""
SMALL_FRAME: Final = 1024
"""Bytes of content below which a frame costs an allowance: a message in frames of one byte would
keep a core busy. Gateways send each message in one frame, or in pieces that fill windows."""


class Budget:
    """A token bucket: `burst` at first, refilled by time and by `earn`."""

    __slots__ = ("_at", "_burst", "_left", "_rate")

    def __init__(self, burst: float, rate: float) -> None:
        """`rate` is in tokens per second."""
        self._burst = self._left = burst
        self._rate = rate
        self._at: float | None = None

    def earn(self, tokens: float) -> None:
        """Add tokens, up to the burst."""
        if self._left < self._burst:
            self._left = min(self._burst, self._left + tokens)

    def spend(self, tokens: float, now: float) -> bool:
        """Whether `tokens` were left at `now` (seconds of any clock); they are taken."""
        if self._at is not None:
            self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        self._left -= tokens
        return self._left >= 0
