"""gRPC calls on a connection's streams: which handler serves a stream, and how a call ends. Pure.

`Handler` and `Call` are the two sides of one call. The session calls the handler's methods in the
order of the client's frames; the handler answers through its `Call`, at once or later. A request
that is not gRPC is answered from `pages`, so that a probe by HTTP/2 works too.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from . import grpc
from .connection import Connection
from .errors import CallFault, Status
from .headers import RequestHead, encode
from .limits import FRAMES_PER_MESSAGE
from .stream import DataReceived, Event, RequestReceived, Stream


class Handler(Protocol):
    """Serves one call. An exception ends the call with a status: CallFault with its own, any other
    with UNKNOWN, and it is reported. One of `on_end` is only reported."""

    def on_message(self, message: bytes) -> None:
        """The client sent `message`."""

    def on_over_budget(self) -> None:
        """The server holds more bytes than it may, with a part of a message from this client. The
        rest is taken, unless the handler finishes the call."""

    def on_half_close(self) -> None:
        """The client sends no more; the handler must finish the call, now or later."""

    def on_end(self) -> None:
        """The call is over, in whatever way. Called once, and nothing is called after it."""


class Call:
    """The server's side of one call: what its handler answers."""

    __slots__ = (
        "_has_headers",
        "_session",
        "handler",
        "is_over",
        "on_over",
        "reader",
        "stream",
        "timeout",
    )

    def __init__(self, session: "GrpcSession", stream: Stream, timeout: float | None) -> None:
        self._session = session
        self._has_headers = False
        self.stream = stream
        self.timeout = timeout
        """Seconds that the client gives the call; None: no limit."""
        connection = session.connection
        self.reader = grpc.MessageReader(connection.limits.message, connection.held)
        self.handler: Handler | None = None
        self.is_over = False
        self.on_over: Callable[[], object] | None = None
        """Called when the call is over, before its handler."""

    def send(self, message: bytes) -> None:
        """Send a message; nothing once the call is over."""
        if not self.is_over:
            self.send_framed(grpc.framed(message))

    def send_framed(self, data: bytes) -> None:
        """Send messages that carry their prefixes."""
        if self.is_over:
            return
        connection = self._session.connection
        if not self._has_headers:
            self._has_headers = True
            connection.respond(self.stream, grpc.RESPONSE)
        connection.send(self.stream, data)

    def finish(self, status: Status = Status.OK, message: str = "") -> None:
        """End the call. `message` is shown to the client's user."""
        if self.is_over:
            return
        connection = self._session.connection
        if self._has_headers:
            connection.finish(self.stream, grpc.trailers(status, message))
        else:
            connection.respond(self.stream, grpc.trailers_only(status, message), end=True)
        self.end()

    def fail(self, error: Exception) -> None:
        """End the call because its handler has raised `error`."""
        if isinstance(error, CallFault):
            self.finish(error.status, error.message)
        else:
            self._session.on_error(error)
            self.finish(Status.UNKNOWN, f"unexpected {type(error).__name__}")

    def exhaust(self) -> None:
        """End the call, since the server holds more bytes than it may."""
        self.finish(Status.RESOURCE_EXHAUSTED, "the server holds as many bytes as it may")

    def pause(self) -> None:
        """Take no more from the client than it may send already. Messages still arrive."""
        self._session.connection.pause(self.stream)

    def resume(self) -> None:
        """Undo `pause`."""
        self._session.connection.resume(self.stream)

    def flush(self) -> None:
        """Write what was sent. Needed only outside of the handler's methods."""
        self._session.flush()

    def end(self) -> None:
        """The call is over: tell the handler."""
        if not self.is_over:
            self.is_over = True
            handler, self.handler = self.handler, None
            # They refer to each other; so they go without the garbage collector.
            self.stream.call = self.reader.large = None
            self._session.calls.discard(self)
            self.reader.drop()
            if self.on_over is not None:
                self.on_over()
            try:
                if handler is not None:
                    handler.on_end()
            except Exception as err:  # noqa: BLE001 - the other calls of the connection go on
                self._session.on_error(err)


Service = Callable[[Call], Handler]
"""Makes the handler of a call."""
Pages = Callable[[str], tuple[int, bytes] | None]
"""Path → status and text of a page for probes; None: there is none."""


class GrpcSession:
    """The calls of one connection."""

    def __init__(
        self,
        connection: Connection,
        services: Mapping[str, Service],
        pages: Pages,
        *,
        on_error: Callable[[Exception], None],
        on_flush: Callable[[], None] = lambda: None,
        on_deadline: Callable[[Call, float], None] = lambda *_: None,
    ) -> None:
        """`services` maps `/package.Service/Method` to the method. `on_error` is called with each
        unexpected exception of a handler, `on_flush` when there is output outside of `receive`,
        `on_deadline` with a call that is to be ended in so many seconds (`expire`)."""
        self.connection = connection
        self.calls: set[Call] = set()
        """Those that are not over."""
        self._services, self._pages = services, pages
        self.on_error, self._on_flush, self._on_deadline = on_error, on_flush, on_deadline

    def receive(self, data: bytes, now: float) -> None:
        """Handle the bytes of a read event at `now` (seconds)."""
        self._dispatch(self.connection.receive(data, now))
        if self.connection.events:
            self._dispatch(self.connection.take_events())

    def flush(self) -> None:
        """Have the output written."""
        self._on_flush()
        self._dispatch(self.connection.take_events())

    def expire(self, call: Call) -> None:
        """The call's deadline has passed."""
        if not call.is_over:
            call.finish(Status.DEADLINE_EXCEEDED, "the call's deadline has passed")
            self.flush()

    def lost(self) -> None:
        """The connection is gone: end all calls."""
        for call in list(self.calls):
            call.end()
        self.connection.lost()

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            stream = event.stream
            call = stream.call
            if isinstance(event, DataReceived):
                # Where the stream was reset in the same read event, its data costs no more work.
                if isinstance(call, Call):
                    if stream.is_local_open:
                        self._receive(call, event.data, event.is_end)
                elif event.is_end and isinstance(call, RequestHead):
                    self._answer_page(stream, call)
            elif isinstance(event, RequestReceived):
                if stream.is_local_open:
                    self._open(stream, event.head, event.is_end)
            elif isinstance(call, Call):
                call.end()

    def _open(self, stream: Stream, head: RequestHead, is_end: bool) -> None:
        if head.method != "POST" or not grpc.is_grpc(head.fields):
            # Answered at its end, so that the answer does not hide what is wrong with its rest.
            stream.call = head
            if is_end:
                self._answer_page(stream, head)
            return
        service = self._services.get(head.path)
        try:
            if service is None:
                raise CallFault(Status.UNIMPLEMENTED, f"unknown method {head.path}")
            call = Call(self, stream, grpc.timeout(head.fields))
        except CallFault as fault:
            block = grpc.trailers_only(fault.status, fault.message)
            self.connection.respond(stream, block, end=True)
            return
        stream.call = call
        self.calls.add(call)
        call.handler = service(call)
        if call.timeout is not None:
            self._on_deadline(call, call.timeout)
        if is_end:
            self._receive(call, b"", is_end=True)

    def _receive(self, call: Call, data: bytes, is_end: bool) -> None:
        """Pass on `data`. The top of a handler's work, as far as exceptions go."""
        try:
            if data and (messages := call.reader.feed(data)):
                # Their frames, even small ones, had a purpose.
                self.connection.frames.earn(FRAMES_PER_MESSAGE * len(messages))
                for message in messages:
                    if call.handler is None:
                        return
                    call.handler.on_message(message)
            if call.reader.is_over_budget and call.handler is not None:
                call.handler.on_over_budget()
            if is_end and call.handler is not None:
                if call.reader.is_within_message:
                    raise CallFault(Status.INTERNAL, "the request ends within a message")
                call.handler.on_half_close()
        except Exception as err:  # noqa: BLE001 - one call's failure must not end the others
            call.fail(err)

    def _answer_page(self, stream: Stream, head: RequestHead) -> None:
        """Answer a probe by HTTP/2."""
        connection = self.connection
        page = self._pages(head.path) if head.method in ("GET", "HEAD") else None
        if page is None and head.method == "POST":
            page = 415, b"content-type is not application/grpc\n"
        status, text = page or (404, b"not found\n")
        fields = (
            (b":status", b"%d" % status),
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(text)),
        )
        is_head = head.method == "HEAD"
        connection.respond(stream, encode(fields), end=is_head)
        if not is_head:
            connection.send(stream, text)
            connection.finish(stream)
