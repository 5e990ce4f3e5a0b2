"""One HTTP/2 connection as a pure state machine: bytes in, events and bytes out.

No I/O and no clock: `receive` takes the bytes of a read event and the time, and returns what
happened on streams; the caller answers with `respond`, `send` and `finish`, and writes what `take`
returns. The life of a stream (RFC 9113, 5.1):

    idle ──HEADERS──► open ──peer's END_STREAM──► half-closed ──our last frame──► closed
                        └──our last frame──► closed, with RST_STREAM: NO_ERROR, because a gRPC
                                             answer may be complete before its request

Closed streams are forgotten but for the latest few ids, which tell frames that were under way when
this side closed a stream (ignored) from those that a peer sends on a stream it ended (an error).

Work that a peer can cause is bounded by `limits`: windows bound what is collected, `Budget`s bound
frames that carry little and streams that are reset, by the peer before an answer or by this side
for what the peer sent. A peer that exceeds them is told ENHANCE_YOUR_CALM.
"""

from tandem_contract.held_bytes import STREAM_BYTES, HeldBytes

from .control import ControlFrames
from .errors import ConnectionFault, ErrorCode, StreamFault
from .frames import (
    END_STREAM,
    HEADER_SIZE,
    PADDED,
    PREFACE,
    FrameType,
    Setting,
    frame,
    goaway,
    rst_stream,
    settings,
    window_update,
    without_padding,
)
from .headers import TABLE_SIZE, BlockCache
from .limits import DEFAULT_WINDOW, FRAMES_PER_CONTENT, LAST_STREAM, SMALL_FRAME, Limits
from .pieces import Pieces
from .state import DRAIN_PING, ConnectionState
from .stream import DataReceived, Event, ReceiveWindow, Stream, StreamEnded


class Connection(ConnectionState):
    """The server's side of a connection."""

    def __init__(self, limits: Limits, cache: BlockCache, held: HeldBytes | None = None) -> None:
        """`held` counts what all connections hold."""
        super().__init__(limits, held)
        self._has_preface = False
        self._window = ReceiveWindow(limits.connection_window)
        self._pieces = Pieces()
        """An incomplete frame; joined only when `_missing` bytes have come, so that a frame in
        single bytes is not copied for each of them."""
        self._missing = 0
        self._control = ControlFrames(self, cache)
        self._announce()

    @property
    def is_done(self) -> bool:
        """Whether nothing more can happen: close the transport once the output is written."""
        is_leaving = self._last is not None or self.is_peer_leaving
        return self.fault is not None or (is_leaving and not self.streams)

    def receive(self, data: bytes, now: float) -> list[Event]:
        """What the bytes of a read event mean at `now` (seconds of any clock).

        Raises nothing: after a ConnectionFault, `fault` is set and every stream has ended."""
        self.now = now
        if self.fault is None:
            try:
                self._read(data)
            except ConnectionFault as fault:
                self.fail(fault)
        return self.take_events()

    def take_events(self) -> list[Event]:
        """Events that came since `receive`: `send` fails the connection when too much waits."""
        events, self.events = self.events, []
        return events

    def respond(self, stream: Stream, block: bytes, *, end: bool = False) -> None:
        """Send response headers, and nothing else if `end`."""
        if stream.is_local_open:
            self.sender.headers(stream, block, end=end)

    def send(self, stream: Stream, data: bytes) -> None:
        """Send DATA, as far as the windows allow; the rest follows by itself."""
        if not stream.is_local_open or not data:
            return
        try:
            if self.sender.data(stream, data):
                self.frames.earn(FRAMES_PER_CONTENT)
        except ConnectionFault as fault:
            self.fail(fault)

    def finish(self, stream: Stream, trailers: bytes | None = None) -> None:
        """Nothing follows what was sent, but for `trailers`."""
        if stream.is_local_open and not stream.is_ending:
            self.sender.end(stream, trailers)

    def pause(self, stream: Stream) -> None:
        """Take no more of the stream than the peer may send already."""
        stream.is_paused = True

    def resume(self, stream: Stream) -> None:
        """Let the peer send again."""
        stream.is_paused = False
        self._give_back(stream)

    def drain(self) -> None:
        """Tell the peer to open no more streams; those that it opens meanwhile are still served.

        The answer to a PING shows that it knows; the second GOAWAY then names the last stream
        (6.8)."""
        if not self._is_draining and self.fault is None:
            self._is_draining = True
            self.sender.write(goaway(LAST_STREAM, ErrorCode.NO_ERROR))
            self.sender.write(frame(FrameType.PING, 0, 0, DRAIN_PING))

    def fail(self, fault: ConnectionFault) -> None:
        """End the connection, and all streams with it."""
        if self.fault is None:
            self.fault = fault
            self.sender.write(goaway(self.highest, fault.code, fault.reason))
            for stream in list(self.streams.values()):
                self.close(stream, ignore=True)
                self.events.append(StreamEnded(stream, fault.code))

    def take(self) -> bytes:
        """The bytes to write now."""
        return self.sender.take()

    def lost(self) -> None:
        """The transport is gone: nothing that waits will be sent."""
        for stream in self.streams.values():
            self.held.give_back(STREAM_BYTES)
            self.sender.forget(stream)
        self.streams.clear()

    def _announce(self) -> None:
        limits = self.limits
        self.sender.write(
            settings(
                {
                    Setting.HEADER_TABLE_SIZE: TABLE_SIZE,
                    Setting.MAX_CONCURRENT_STREAMS: limits.streams,
                    Setting.INITIAL_WINDOW_SIZE: limits.stream_window,
                    Setting.MAX_FRAME_SIZE: limits.frame,
                    Setting.MAX_HEADER_LIST_SIZE: limits.header_list,
                }
            )
        )
        self.sender.write(window_update(0, limits.connection_window - DEFAULT_WINDOW))

    def _read(self, data: bytes) -> None:
        """Handle all complete frames; keep the rest."""
        if self._pieces:
            self._pieces.add(data)
            self._missing -= len(data)
            if self._missing > 0:
                return
            data = self._pieces.take()
        if (at := self._after_preface(data)) is None:
            return
        end, largest = len(data), self.limits.frame
        missing = HEADER_SIZE - (end - at)
        while missing <= 0:
            # Byte by byte, which is compiled to arithmetic, unlike a call of `struct`.
            size = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
            if size > largest:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            stop = at + HEADER_SIZE + size
            if stop > end:
                missing = stop - end
                break
            kind, flags = data[at + 3], data[at + 4]
            stream_id = data[at + 5] << 24 | data[at + 6] << 16 | data[at + 7] << 8 | data[at + 8]
            stream_id &= LAST_STREAM
            payload = data[at + HEADER_SIZE : stop]
            at = stop
            missing = HEADER_SIZE - (end - at)
            try:
                if kind == 0 and not self._control.is_exclusive:
                    self._data(stream_id, flags, payload)
                else:
                    self._control.receive(kind, flags, stream_id, payload)
            except StreamFault as fault:
                self._fail_stream(fault)
        if at < end:
            self._pieces.add(data[at:] if at else data)
            self._missing = missing

    def _after_preface(self, data: bytes) -> int | None:
        """Where frames begin in `data`; None: it is shorter than the preface. Raises
        ConnectionFault."""
        if self._has_preface:
            return 0
        if not PREFACE.startswith(data[: len(PREFACE)]):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "no preface of HTTP/2")
        if len(data) < len(PREFACE):
            self._pieces.add(data)
            self._missing = len(PREFACE) - len(data)
            return None
        self._has_preface = True
        return len(PREFACE)

    def _data(self, stream_id: int, flags: int, payload: bytes) -> None:
        size, is_end = len(payload), bool(flags & END_STREAM)
        if not self._window.take(size):
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is full")
        # On closed streams, too. An end is free: each stream has one.
        if size >= SMALL_FRAME:
            self.frames.earn(FRAMES_PER_CONTENT)
        elif size or not is_end:
            self.spend()
        # Given back at once: only a stream's own window holds back a stream that is not read.
        if increment := self._window.consume(size):
            self.sender.write(window_update(0, increment))
        stream = self.streams.get(stream_id)
        if stream is None or not stream.is_remote_open:
            self._data_on_closed(stream_id, stream)
            return
        if not stream.receive_window.take(size):
            raise StreamFault(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "the window is full")
        if flags & PADDED:
            payload = without_padding(payload)
        if not stream.fits(len(payload), is_end):
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, "content-length is wrong")
        self.events.append(DataReceived(stream, payload, is_end))
        if is_end:
            stream.is_remote_open = False
        else:
            stream.withheld += size
            self._give_back(stream)

    def _data_on_closed(self, stream_id: int, stream: Stream | None) -> None:
        if stream_id == 0 or stream_id > self.highest:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"DATA on the idle stream {stream_id}")
        if stream is None and self._closed.get(stream_id):
            return
        raise StreamFault(stream_id, ErrorCode.STREAM_CLOSED, "DATA on a closed stream")

    def _fail_stream(self, fault: StreamFault) -> None:
        # What the peer sent makes this side reset streams as often as the peer itself could.
        if not self.resets.spend(1, self.now):
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many streams had to be reset")
        self.sender.write(rst_stream(fault.stream_id, fault.code))
        stream = self.streams.get(fault.stream_id)
        if stream is None:
            self.remember(fault.stream_id, ignore=True)
        else:
            self.close(stream, ignore=True)
            self.events.append(StreamEnded(stream, fault.code))
