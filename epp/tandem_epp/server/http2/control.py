"""The frames of a connection other than DATA: header blocks, settings, windows, resets. Pure.

They change the streams and budgets of `state.ConnectionState`.
"""

from typing import Final

from tandem_contract.held_bytes import STREAM_BYTES

from .errors import ConnectionFault, ErrorCode, MalformedFields, StreamFault
from .frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    PADDED,
    PRIORITY_FLAG,
    SETTINGS_ACK,
    FrameType,
    Setting,
    frame,
    read_code,
    read_id,
    read_settings,
    without_padding,
)
from .headers import BlockCache, HeaderDecoder
from .limits import DEFAULT_FRAME, FRAMES_PER_CONTENT, LARGEST_FRAME, LARGEST_WINDOW, SMALL_FRAME
from .state import ConnectionState
from .stream import DataReceived, RequestReceived, Stream, StreamEnded

_STREAMS_PER_FRAME: Final = 64
"""Streams whose window one frame without content pays to change: SETTINGS may change them all."""


class ControlFrames:
    """Handles one connection's control frames, in order."""

    def __init__(self, connection: ConnectionState, cache: BlockCache) -> None:
        self._connection = connection
        self._limits = connection.limits
        self._sender = connection.sender
        self._decoder = HeaderDecoder(cache, connection.limits.header_list)
        self._block: list[bytes] | None = None
        """The parts of a header block whose end has not come."""
        self._block_stream = 0
        self._block_flags = 0
        self._block_size = 0
        self._handlers = {
            FrameType.HEADERS: self._headers,
            FrameType.PRIORITY: self._priority,
            FrameType.RST_STREAM: self._rst_stream,
            FrameType.SETTINGS: self._settings,
            FrameType.PUSH_PROMISE: self._push_promise,
            FrameType.PING: self._ping,
            FrameType.GOAWAY: self._goaway,
            FrameType.WINDOW_UPDATE: self._window_update,
            FrameType.CONTINUATION: self._continuation,
        }

    @property
    def is_exclusive(self) -> bool:
        """Whether only one type of frame may come next: SETTINGS first, CONTINUATION in a block."""
        return self._block is not None or not self._connection.is_established

    def receive(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle a frame. Raises ConnectionFault, StreamFault."""
        if self._block is not None and (
            kind != FrameType.CONTINUATION or stream_id != self._block_stream
        ):
            raise _protocol_error("a header block is not continued (4.3)")
        if not self._connection.is_established and kind != FrameType.SETTINGS:
            raise _protocol_error("the first frame is not SETTINGS (3.4)")
        handler = self._handlers.get(kind)  # type: ignore[call-overload]
        if handler is None:
            # An unknown type is ignored (5.5).
            self._connection.spend()
            return
        handler(flags, stream_id, payload)

    # Header blocks (6.2, 6.10)

    def _headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id % 2 == 0:
            raise _protocol_error(f"HEADERS on stream {stream_id}, not a client's")
        if flags & PADDED:
            payload = without_padding(payload)
        if flags & PRIORITY_FLAG:
            if len(payload) < 5:
                raise _frame_size("HEADERS is too short for its priority")
            # The block must still be decoded, so the dependency is only judged at its end.
            if read_id(payload) == stream_id:
                flags |= _SELF_DEPENDENT
            payload = payload[5:]
        self._block_stream, self._block_flags = stream_id, flags
        if flags & END_HEADERS:
            self._check_block(len(payload))
            self._complete(payload)
            return
        self._block, self._block_size = [payload], len(payload)
        self._check_block(self._block_size)

    def _continuation(self, flags: int, _stream_id: int, payload: bytes) -> None:
        if self._block is None:
            raise _protocol_error("CONTINUATION continues nothing (6.10)")
        if len(payload) < SMALL_FRAME:
            self._connection.spend()
        self._block.append(payload)
        self._block_size += len(payload)
        if len(self._block) - 1 > self._limits.continuations:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many CONTINUATION frames")
        self._check_block(self._block_size)
        if flags & END_HEADERS:
            block, self._block = b"".join(self._block), None
            self._complete(block)

    def _check_block(self, size: int) -> None:
        if size > self._limits.header_block:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "the header section is too large")

    def _complete(self, block: bytes) -> None:
        stream_id, flags = self._block_stream, self._block_flags
        connection = self._connection
        stream = connection.streams.get(stream_id)
        try:
            if stream is not None:
                self._trailers(stream, block, is_end=bool(flags & END_STREAM))
            elif stream_id <= connection.highest:
                self._headers_on_closed(stream_id, block)
            else:
                self._open(stream_id, block, is_end=bool(flags & END_STREAM))
            if flags & _SELF_DEPENDENT:
                raise MalformedFields("the stream depends on itself")
        except MalformedFields as err:
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, str(err)) from err

    def _open(self, stream_id: int, block: bytes, *, is_end: bool) -> None:
        connection = self._connection
        connection.highest = stream_id
        # Decoded first, whatever follows: the compression state is the connection's.
        head = self._decoder.request(block)
        if not connection.opens(stream_id):
            connection.remember(stream_id, ignore=True)
            return
        if is_end and head.length:
            raise MalformedFields("content-length of a request without a body")
        # The second gives room for a stream; a connection that closes it gives it back.
        if len(connection.streams) >= self._limits.streams or not connection.held.take(
            STREAM_BYTES, of=STREAM_BYTES
        ):
            raise StreamFault(stream_id, ErrorCode.REFUSED_STREAM, "too many streams")
        stream = Stream(stream_id, self._sender.initial_window, self._limits.stream_window)
        stream.expected = head.length
        stream.is_remote_open = not is_end
        connection.streams[stream_id] = stream
        connection.events.append(RequestReceived(stream, head, is_end))

    def _trailers(self, stream: Stream, block: bytes, *, is_end: bool) -> None:
        if not stream.is_remote_open:
            self._decoder.skip(block)
            raise StreamFault(stream.id, ErrorCode.STREAM_CLOSED, "HEADERS after the end")
        self._decoder.trailers(block)
        if not is_end or stream.expected:
            raise MalformedFields("trailers without END_STREAM, or before the end of the body")
        stream.is_remote_open = False
        self._connection.events.append(DataReceived(stream, b"", True))

    def _headers_on_closed(self, stream_id: int, block: bytes) -> None:
        is_ignored = self._connection.is_ignored(stream_id)
        if is_ignored is None:
            raise _protocol_error(f"stream {stream_id} is not above the ones before (5.1.1)")
        if not is_ignored:
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")
        self._decoder.skip(block)

    # Streams

    def _priority(self, _flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id == 0:
            raise _protocol_error("PRIORITY on stream 0")
        self._connection.spend()
        if len(payload) != 5:
            raise StreamFault(stream_id, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY has 5 bytes")
        if read_id(payload) == stream_id:
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, "it depends on itself")

    def _rst_stream(self, _flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise _frame_size("RST_STREAM has 4 bytes")
        self._check_used(stream_id, "RST_STREAM")
        connection = self._connection
        stream = connection.streams.get(stream_id)
        if stream is None:
            connection.spend()
            # The peer knows that the stream is over: nothing more of it can be under way.
            connection.remember(stream_id, ignore=False)
            return
        # After an answer the stream has cost what any request costs. Before, a peer could open and
        # reset streams without end (CVE-2023-44487).
        if not stream.has_answer and not connection.resets.spend(1, connection.now):
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many resets")
        connection.close(stream, ignore=False)
        connection.events.append(StreamEnded(stream, read_code(payload)))

    def _push_promise(self, _flags: int, _stream_id: int, _payload: bytes) -> None:
        raise _protocol_error("a client sent PUSH_PROMISE (8.4)")

    def _check_used(self, stream_id: int, name: str) -> None:
        if stream_id == 0 or stream_id > self._connection.highest or stream_id % 2 == 0:
            raise _protocol_error(f"{name} on the idle stream {stream_id}")

    # The connection

    def _settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise _protocol_error("SETTINGS on a stream")
        if flags & ACK:
            if payload:
                raise _frame_size("SETTINGS with ACK has no content")
            if not self._connection.is_established:
                raise _protocol_error("the first frame is not SETTINGS (3.4)")
            self._connection.spend()
            return
        # Its cost includes the windows of all streams, which it may change.
        self._connection.spend(1 + len(self._connection.streams) / _STREAMS_PER_FRAME)
        entries = list(read_settings(payload))
        if len(entries) > self._limits.settings:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many entries in SETTINGS")
        for key, value in entries:
            self._check_setting(key, value)
        values = dict(entries)
        self._sender.largest_frame = values.get(Setting.MAX_FRAME_SIZE, self._sender.largest_frame)
        self._connection.is_established = True
        self._sender.write(SETTINGS_ACK)
        if (window := values.get(Setting.INITIAL_WINDOW_SIZE)) is not None:
            self._resize_windows(window)

    def _check_setting(self, key: int, value: int) -> None:
        if key == Setting.ENABLE_PUSH and value > 1:
            raise _protocol_error("ENABLE_PUSH is 0 or 1")
        if key == Setting.INITIAL_WINDOW_SIZE and value > LARGEST_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is too large")
        if key == Setting.MAX_FRAME_SIZE and not DEFAULT_FRAME <= value <= LARGEST_FRAME:
            raise _protocol_error("MAX_FRAME_SIZE is out of its range")

    def _resize_windows(self, size: int) -> None:
        """A new INITIAL_WINDOW_SIZE also changes the windows of open streams (6.9.2)."""
        change = size - self._sender.initial_window
        self._sender.initial_window = size
        # A copy: streams whose answer is released may close.
        for stream in list(self._connection.streams.values()):
            if not stream.send_window.grow(change):
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window is too large")
            if change > 0:
                self._sender.on_stream_window(stream)

    def _ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise _protocol_error("PING on a stream")
        if len(payload) != 8:
            raise _frame_size("PING has 8 bytes")
        self._connection.spend()
        if flags & ACK:
            self._connection.on_pong(payload)
        else:
            self._sender.write(frame(FrameType.PING, ACK, 0, payload))

    def _goaway(self, _flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise _protocol_error("GOAWAY on a stream")
        if len(payload) < 8:
            raise _frame_size("GOAWAY has at least 8 bytes")
        self._connection.spend()
        # It opens no more streams.
        self._connection.is_peer_leaving = True

    def _window_update(self, _flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise _frame_size("WINDOW_UPDATE has 4 bytes")
        connection, increment = self._connection, read_id(payload)
        if stream_id == 0:
            if increment == 0 or not self._sender.window.grow(increment):
                code = ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR
                raise ConnectionFault(code, "the increment of WINDOW_UPDATE is invalid")
            released = self._sender.on_connection_window()
        else:
            self._check_used(stream_id, "WINDOW_UPDATE")
            stream = connection.streams.get(stream_id)
            if stream is None:
                connection.spend()
                return
            if increment == 0 or not stream.send_window.grow(increment):
                code = ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR
                raise StreamFault(stream_id, code, "the increment of WINDOW_UPDATE is invalid")
            released = self._sender.on_stream_window(stream)
        # A peer that takes its answers in smaller pieces has only its budget for that.
        if released >= SMALL_FRAME:
            connection.frames.earn(FRAMES_PER_CONTENT)
        connection.spend()


_SELF_DEPENDENT: Final = 0x100
"""A flag of our own, beyond those of a frame: HEADERS whose priority names its own stream."""


def _protocol_error(reason: str) -> ConnectionFault:
    return ConnectionFault(ErrorCode.PROTOCOL_ERROR, reason)


def _frame_size(reason: str) -> ConnectionFault:
    return ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, reason)
