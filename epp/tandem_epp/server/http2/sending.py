"""The sending half of a connection: frames in order, held back where a window is full. Pure.

DATA that no window holds back is written at once. Otherwise it waits in its stream's queue, and the
rest of the stream behind it. A stream that waits for the connection's window alone stands in
`_ready`, so that an update of that window costs what it releases, however many streams wait for
their own windows.
"""

from collections import deque
from collections.abc import Callable

from tandem_contract.held_bytes import HeldBytes

from .errors import ConnectionFault, ErrorCode
from .frames import END_STREAM, HEADER, FrameType, headers
from .headers import EMPTY_TABLE
from .limits import DEFAULT_FRAME, DEFAULT_WINDOW, Limits
from .stream import SendWindow, Stream

_TYPE_DATA = int(FrameType.DATA)


class Sender:
    """Frames to write, and what waits for windows."""

    def __init__(
        self,
        limits: Limits,
        held: HeldBytes,
        on_released: Callable[[Stream], None],
        on_end: Callable[[Stream], None],
    ) -> None:
        """`on_released` is called with a stream that waits less than before, `on_end` with one
        whose last frame is written."""
        self._limits, self._held = limits, held
        self._on_released, self._on_end = on_released, on_end
        self._out: list[bytes | memoryview] = []
        self._ready: dict[int, Stream] = {}
        self._unsent = 0
        """Bytes in the queues of all streams."""
        self.released = 0
        """Bytes that have left the queues: it grows while the peer reads."""
        self._is_first_block = True
        self.window = SendWindow(DEFAULT_WINDOW)
        """The connection's."""
        self.initial_window = DEFAULT_WINDOW
        """The window of new streams."""
        self.largest_frame = DEFAULT_FRAME

    @property
    def has_output(self) -> bool:
        """Whether `take` would return anything."""
        return bool(self._out)

    @property
    def is_waiting(self) -> bool:
        """Whether answers wait for a window."""
        return self._unsent > 0

    def take(self) -> bytes:
        """All frames to write now, in order."""
        out, self._out = self._out, []
        return b"".join(out)

    def write(self, frame: bytes) -> None:
        """A whole frame that no window holds back."""
        self._out.append(frame)

    def headers(self, stream: Stream, block: bytes, *, end: bool) -> None:
        """Response headers, or trailers if `end` follows them."""
        if self._is_first_block:
            self._is_first_block = False
            block = EMPTY_TABLE + block
        stream.has_answer = True
        self._out.append(headers(stream.id, block, self.largest_frame, end=end))
        if end:
            self._on_end(stream)

    def data(self, stream: Stream, data: bytes) -> bool:
        """DATA; whether it was written at once. Raises ConnectionFault when too much waits."""
        size = len(data)
        own, shared = stream.send_window, self.window
        if (
            size <= own.size
            and size <= shared.size
            and size <= self.largest_frame
            and not stream.queue
        ):
            own.size -= size
            shared.size -= size
            self._out += (HEADER.pack(size >> 8, size & 0xFF, _TYPE_DATA, 0, stream.id), data)
            return True
        if stream.queue is None:
            stream.queue = deque()
        stream.queue.append(data)
        stream.unsent += size
        self._unsent += size
        self._held.add(size)
        if self._unsent > self._limits.connection_unsent or self._held.exceeds_share(self._unsent):
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "the peer does not read its answers")
        self._flush(stream)
        return False

    def end(self, stream: Stream, trailers: bytes | None) -> None:
        """End the stream behind what waits: with trailers, or with the last DATA."""
        stream.is_ending, stream.trailers = True, trailers
        if not stream.queue:
            self._end(stream)

    def on_stream_window(self, stream: Stream) -> int:
        """A stream's window grew; returns the bytes of the largest frame that it released."""
        return self._flush(stream) if stream.queue else 0

    def on_connection_window(self) -> int:
        """The connection's window grew; returns the bytes of the largest frame that it released."""
        largest = 0
        while self._ready and self.window.size > 0:
            stream = next(iter(self._ready.values()))
            largest = max(largest, self._flush(stream))
        return largest

    def forget(self, stream: Stream) -> None:
        """Drop what waits: the stream is over."""
        self._count_sent(stream.unsent)
        stream.unsent = 0
        if stream.queue:
            stream.queue.clear()
        self._ready.pop(stream.id, None)

    def _flush(self, stream: Stream) -> int:
        """Write what the windows allow; returns the bytes of the largest frame."""
        own, shared, queue = stream.send_window, self.window, stream.queue
        if queue is None:
            return 0
        before, largest = stream.unsent, 0
        while queue and (room := min(own.size, shared.size, self.largest_frame)) > 0:
            data = queue[0]
            part = data if len(data) <= room else memoryview(data)[:room]
            size = len(part)
            if part is data:
                queue.popleft()
            else:
                queue[0] = memoryview(data)[room:]
            own.size -= size
            shared.size -= size
            stream.unsent -= size
            largest = max(largest, size)
            self._out += (HEADER.pack(size >> 8, size & 0xFF, _TYPE_DATA, 0, stream.id), part)
        self._count_sent(before - stream.unsent)
        if queue and own.size > 0:
            self._ready[stream.id] = stream
        else:
            self._ready.pop(stream.id, None)
        if stream.unsent < before:
            self._on_released(stream)
        if stream.is_ending and not queue:
            self._end(stream)
        return largest

    def _count_sent(self, size: int) -> None:
        self._unsent -= size
        self.released += size
        self._held.give_back(size)

    def _end(self, stream: Stream) -> None:
        if stream.trailers is not None:
            self.headers(stream, stream.trailers, end=True)
            return
        self._out.append(HEADER.pack(0, 0, _TYPE_DATA, END_STREAM, stream.id))
        self._on_end(stream)
