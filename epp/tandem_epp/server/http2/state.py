"""What a connection knows of its streams and of what its peer may still cost. Pure.

`control` changes it with the frames other than DATA, and `connection` with all else.
"""

from collections import OrderedDict
from typing import Final

from tandem_contract.held_bytes import STREAM_BYTES, HeldBytes

from .errors import ConnectionFault, ErrorCode
from .frames import goaway, rst_stream, window_update
from .limits import Budget, Limits
from .sending import Sender
from .stream import Event, Stream

_REMEMBERED: Final = 1024
"""Ids of closed streams that are kept. Frames for an older one are an error, although they may have
been under way when it was closed: a peer with that many resets under way is not a gateway."""
DRAIN_PING: Final = b"tandem-d"
"""Opaque data of the PING whose answer ends the first phase of `drain`."""


class ConnectionState:
    """Streams, budgets, and the end of a connection."""

    def __init__(self, limits: Limits, held: HeldBytes | None = None) -> None:
        """`held` counts what all connections hold."""
        self.streams: dict[int, Stream] = {}
        """Those that are not closed."""
        self.fault: ConnectionFault | None = None
        """Why the connection is over; None: it is not. GOAWAY is then in the output."""
        self.is_established = False
        """Whether the preface and the first SETTINGS frame have come."""
        self.limits = limits
        self.held = held or HeldBytes()
        self.sender = Sender(limits, self.held, self._give_back, self._on_end_sent)
        self.frames = Budget(limits.frames_burst, limits.frames_per_second)
        """Allowance of frames with little or no content."""
        self.resets = Budget(limits.resets_burst, limits.resets_per_second)
        """Allowance of streams that the peer resets before they have an answer, or has reset."""
        self.highest = 0
        """The highest stream id that the peer has used."""
        # An OrderedDict: in a dict the first key is found behind all those that were deleted.
        self._closed: OrderedDict[int, bool] = OrderedDict()
        """Latest closed streams; whether frames on them are ignored. The oldest comes first."""
        self._last: int | None = None
        """The last stream that is served, once the final GOAWAY is sent."""
        self._is_draining = self.is_peer_leaving = False
        self.events: list[Event] = []
        self.now = 0.0

    def drained(self) -> None:
        """Serve no stream that is opened from now on."""
        if self._last is None and self.fault is None:
            self._last = self.highest
            self.sender.write(goaway(self._last, ErrorCode.NO_ERROR))

    def close(self, stream: Stream, *, ignore: bool) -> None:
        """Forget a stream; `ignore`: frames for it may be under way."""
        del self.streams[stream.id]
        stream.is_remote_open = stream.is_local_open = False
        self.held.give_back(STREAM_BYTES)
        self.sender.forget(stream)
        self.remember(stream.id, ignore=ignore)

    def remember(self, stream_id: int, *, ignore: bool) -> None:
        """Keep the id of a closed stream."""
        closed = self._closed
        closed[stream_id] = ignore
        if len(closed) > _REMEMBERED:
            closed.popitem(last=False)

    def is_ignored(self, stream_id: int) -> bool | None:
        """Whether frames on a closed stream are ignored; None: it is not remembered."""
        return self._closed.get(stream_id)

    def opens(self, stream_id: int) -> bool:
        """Whether a new stream is served, not too late."""
        return self._last is None or stream_id <= self._last

    def on_pong(self, data: bytes) -> None:
        """The peer answered a PING."""
        if self._is_draining and data == DRAIN_PING:
            self.drained()

    def spend(self, frames: float = 1.0) -> None:
        """Count frames with little or no content. Raises ConnectionFault."""
        if not self.frames.spend(frames, self.now):
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many frames with no content")

    def _give_back(self, stream: Stream) -> None:
        """Give consumed bytes back to the peer, unless the stream is not read for now."""
        if (
            not stream.withheld
            or stream.is_paused
            or not stream.is_remote_open
            or stream.unsent > self.limits.stream_unsent
        ):
            return
        consumed, stream.withheld = stream.withheld, 0
        if increment := stream.receive_window.consume(consumed):
            self.sender.write(window_update(stream.id, increment))

    def _on_end_sent(self, stream: Stream) -> None:
        if stream.is_remote_open:
            self.sender.write(rst_stream(stream.id, ErrorCode.NO_ERROR))
        self.close(stream, ignore=stream.is_remote_open)
