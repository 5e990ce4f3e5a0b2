"""Events on their way to one peer: bounded, in order, and begun with a snapshot. Pure."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from .frames import encode_frame

MAX_QUEUE: Final = 8 << 20
"""Bytes of events that wait for a peer behind the snapshot; beyond them the queue is replaced by
another one. Too low: a peer that pauses for a moment costs a snapshot; too high: memory for every
peer that hangs. The rest of a snapshot is not counted: its size is bounded where it is made
(`shared_fleet.SNAPSHOT_BYTES`), and in a large fleet it alone would overflow the queue, again and
again. So a queue takes at most these bytes and one snapshot."""
MAX_FRAME: Final = 256 << 10
"""Bytes of events after which a frame is closed. One event may be larger."""


class OutgoingFrame(NamedTuple):
    """A frame to send."""

    data: bytes
    epoch: int
    number: int
    events: int


class Outbox:
    """The queue for one peer. The first frame, and the first one after an overflow, begins an
    epoch with the snapshot."""

    def __init__(
        self,
        epochs: Iterator[int],
        snapshot: Callable[[], Iterable[bytes]],
        on_dropped: Callable[[int], None] = lambda count: None,
        max_queue: int = MAX_QUEUE,
    ) -> None:
        """`epochs` are the numbers of epochs, ascending; `snapshot` returns the encoded events of a
        snapshot; `on_dropped` gets the number of events that an overflow dropped."""
        self._epochs, self._epoch = epochs, -1
        self._snapshot, self._on_dropped, self._max_queue = snapshot, on_dropped, max_queue
        self._queue: deque[bytes] = deque()
        self._queue_bytes = 0
        """Of the events behind the snapshot."""
        self._number = 0
        """Number of the next frame in this epoch."""
        self._needs_snapshot = True
        self._snapshot_left = 0
        """Events of the snapshot that are still in the queue."""

    @property
    def is_empty(self) -> bool:
        """Whether the next frame would be a heartbeat."""
        return not self._queue and not self._needs_snapshot

    def put(self, event: bytes) -> None:
        """Add an encoded event; a snapshot that is taken later contains its effect."""
        if self._needs_snapshot:
            return
        self._queue.append(event)
        self._queue_bytes += len(event)
        if self._queue_bytes > self._max_queue:
            self._on_dropped(len(self._queue))
            self._queue.clear()
            self._queue_bytes = 0
            self._needs_snapshot = True

    def restart(self, epoch: int) -> bool:
        """The peer missed events of `epoch`: replace the queue by a snapshot, unless a later epoch
        has begun; returns whether it does."""
        if epoch != self._epoch or self._needs_snapshot:
            return False
        self._queue.clear()
        self._queue_bytes = 0
        self._needs_snapshot = True
        return True

    def next_frame(self) -> OutgoingFrame:
        """The next frame: events that wait, up to about MAX_FRAME bytes; without any a heartbeat,
        which is a frame without events."""
        is_first = self._needs_snapshot
        if is_first:
            self._epoch = next(self._epochs)
            self._number = 0
            self._queue = deque(self._snapshot())
            self._snapshot_left = len(self._queue)
            self._needs_snapshot = False
        events: list[bytes] = []
        size = 0
        while self._queue and size < MAX_FRAME:
            event = self._queue.popleft()
            events.append(event)
            size += len(event)
            if self._snapshot_left:
                self._snapshot_left -= 1
            else:
                self._queue_bytes -= len(event)
        is_complete = not self._snapshot_left
        data = encode_frame(
            self._epoch, self._number, events, is_snapshot=is_first, is_complete=is_complete
        )
        frame = OutgoingFrame(data, self._epoch, self._number, len(events))
        self._number += 1
        return frame
