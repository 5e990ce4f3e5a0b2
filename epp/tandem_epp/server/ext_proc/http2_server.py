"""The gRPC transport, on our own HTTP/2 server: ext_proc messages in and out of the stream's state
machine.

A handler runs inside the read event that brought its message: a request costs no task and no
switch between coroutines, unless its pick must wait for `prepare`.

Errors: `ListenError` when the server cannot listen at its address.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from time import time
from typing import Final

from google.protobuf.message import DecodeError

from tandem_contract.commandline import HostPort
from tandem_contract.held_bytes import HeldBytes

from ...exchange import BrokenAnswer, Reply
from ..http2.errors import CallFault, Status
from ..http2.health import HealthService
from ..http2.limits import Limits
from ..http2.pieces import Pieces
from ..http2.server import Server
from ..http2.session import Call
from . import access_log
from . import access_log_pb2 as log_pb
from . import ext_proc_pb2 as pb
from .access_log import broken_answers
from .body_deadlines import BODY_SECONDS, BodyDeadlines
from .codec import read_message
from .interface import ENVELOPE, REPLY_SECONDS, SERVICE, ListenError, Preparer
from .messages import Answer, Continue, Input, MoreTime
from .stream import ExtProcStream, RequestPicker, shared_parts
from .wire_answers import encode_answer, encode_head
from .wire_bodies import head_size, read_body, read_large_body
from .wire_headers import read_headers

_PIECE: Final = 512 * 1024
"""Bytes of a body that are sent at once, after which other streams have their turn."""


class Http2Server:
    """Serves ext_proc, Envoy's access log and health on one address."""

    def __init__(
        self,
        picker: RequestPicker,
        listen: HostPort,
        body_limit: int,
        on_broken: Callable[[BrokenAnswer, float], None] = lambda *_: None,
        *,
        held: HeldBytes | None = None,
        body_seconds: float = BODY_SECONDS,
        is_ready: Callable[[], bool] = lambda: True,
        limits: Limits | None = None,
        tls: ssl.SSLContext | None = None,
        allows_clear: bool = False,
    ) -> None:
        """`body_limit` is in bytes; `held` counts what all streams hold, and bodies are complete
        after `body_seconds` or refused. `on_broken` is called with each answer that broke off, and
        the time; `is_ready` answers probes. `tls`: None serves HTTP/2 in clear text;
        beside `tls` that is served too if it `allows_clear`."""
        self.picker, self.body_limit, self.on_broken = picker, body_limit, on_broken
        self.prepare: Preparer | None = None
        """Called with each request that has a body; None: picks wait for nothing."""
        self.longest_wait: Callable[[], float] = lambda: 0.0
        """As in `ExtProcServer`."""
        self.held = held or HeldBytes()
        self.shared_parts = shared_parts()
        self.deadlines = BodyDeadlines(body_seconds)
        self.is_stopping = False
        self.open: set[_Process | _AccessLog] = set()
        """The calls that are not over."""
        self._listen, self._is_ready = listen, is_ready
        self._tls, self._allows_clear = tls, allows_clear
        # A BUFFERED body comes in one message.
        limits = replace(limits or Limits(), message=body_limit + ENVELOPE)
        services = frozenset((SERVICE, access_log.SERVICE))
        self.server = Server(
            {
                f"/{SERVICE}/Process": lambda call: _Process(self, call),
                f"/{access_log.SERVICE}/StreamAccessLogs": lambda call: _AccessLog(self, call),
            },
            HealthService(lambda: self._is_ready() and not self.is_stopping, services),
            limits,
            self.held,
        )

    async def start(self) -> int:
        """Listen and serve; returns the port. Raises ListenError."""
        try:
            return await self.server.listen(
                self._listen.host, self._listen.port, self._tls, allows_clear=self._allows_clear
            )
        except OSError as err:
            raise ListenError(
                f"cannot listen on {self._listen}: is the port in use? See --listen"
            ) from err

    async def stop(self, grace: float) -> None:
        """As `ExtProcServer.stop`; streams that are placed meanwhile end then."""
        self.is_stopping = True
        for handler in list(self.open):
            handler.stop()
        # Writes what the handlers sent, with GOAWAY behind it.
        await self.server.stop(grace)
        self.deadlines.close()


class _Process:
    """One ext_proc stream: Envoy opens one for each HTTP request."""

    __slots__ = ("_call", "_inbox", "_server", "_stream", "_task", "_waiting")

    def __init__(self, server: Http2Server, call: Call) -> None:
        self._server, self._call = server, call
        self._stream = ExtProcStream(
            server.picker, server.body_limit, server.held, server.shared_parts
        )
        self._task: asyncio.Task[None] | None = None
        """Waits for `prepare`; None: nothing is waited for."""
        self._inbox: deque[Input | None] | None = None
        """What came meanwhile, in which None is the end of the request; None: nothing did."""
        self._waiting = 0
        """Bytes of the messages in `_inbox`."""
        server.open.add(self)
        call.reader.large = self

    def on_message(self, message: bytes) -> None:
        body = read_body(message)
        value: Input = body or read_headers(message) or _read(message)
        if self._task is not None:
            self._queue(value, len(message))
            return
        self._receive(value)
        if body is None and self._stream.is_collecting:
            self._server.deadlines.start(self)

    def head_size(self, begin: bytes) -> int:
        return head_size(begin)

    def on_large(self, head: bytes, rest: Pieces) -> None:
        size = len(head) + rest.size
        if (body := read_large_body(head, rest)) is None:
            self.on_message(head + rest.take())
        elif self._task is not None:
            self._queue(body, size)
        else:
            self._receive(body)

    def on_over_budget(self) -> None:
        held = self._server.held
        # What is placed is in the middle of its answer, which must not break off for this.
        if held.is_twice_full or not self._stream.is_placed:
            self._refuse(self._stream.refuse_body())
            self._call.exhaust()

    def expire_body(self) -> None:
        # A body that is being prepared is complete.
        if self._task is None and self._stream.is_collecting:
            self._refuse(self._stream.expire())
            self._call.flush()

    def on_half_close(self) -> None:
        if self._task is None:
            self._call.finish()
        else:
            self._queue(None, 0)

    def on_end(self) -> None:
        # Whatever ended the gRPC stream, the request's count on its pods ends with it.
        self._server.open.discard(self)
        self._server.deadlines.forget(self)
        self._server.held.give_back(self._waiting)
        self._waiting = 0
        self._stream.close(time())
        # The task may itself have ended the call; then it ends by itself.
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def stop(self) -> None:
        """The server stops: end the stream if its request is placed."""
        # A task ends it behind its last answer, of which a part may have been sent.
        if self._task is None and self._stream.is_placed:
            self._call.finish()

    def _refuse(self, answers: Sequence[Answer]) -> None:
        """End the call, since more of it must not come."""
        for answer in answers:
            self._call.send_framed(encode_answer(answer))
            self._call.finish()

    def _queue(self, value: Input | None, size: int) -> None:
        """Keep what comes while the pick waits."""
        if self._inbox is None:
            self._inbox = deque()
        self._inbox.append(value)
        self._waiting += size
        self._server.held.add(size)

    def _receive(self, value: Input) -> None:
        prepare = self._server.prepare
        if (
            prepare is not None
            and (complete := self._stream.complete_body(value))
            and (context := prepare(*complete)) is not None
        ):
            # The client may send what its window allows; the window bounds the inbox.
            self._call.pause()
            if self._stream.is_timed and (longest := self._server.longest_wait()):
                more = MoreTime(longest + REPLY_SECONDS)
                self._call.send_framed(encode_answer(more))
            waiting = self._prepare(context, value)
            self._task = asyncio.get_running_loop().create_task(waiting)
            return
        self._answer(value)

    def _answer(self, value: Input) -> None:
        for answer in self._stream.receive(value, time()):
            self._call.send_framed(encode_answer(answer))
            if type(answer) is Reply and self._stream.is_in_pieces:
                # The rest would be read for nothing.
                self._call.finish()
        if self._server.is_stopping and self._stream.is_placed:
            self._call.finish()

    async def _send(self, answers: Iterable[Answer]) -> None:
        """Send the answers to a complete body, some at a time: they hold all of it."""
        size = 0
        for encoded in _pieces(answers):
            self._call.send_framed(encoded)
            size += len(encoded)
            if size >= _PIECE:
                size = 0
                self._call.flush()
                await asyncio.sleep(0)
        if self._server.is_stopping and self._stream.is_placed:
            self._call.finish()

    async def _prepare(self, context: AbstractAsyncContextManager[object], value: Input) -> None:
        """Answer `value` within the context of its pick, and then what came meanwhile."""
        try:
            async with context as preparation:
                self._stream.prepare(preparation)
                answers = self._stream.receive(value, time())
            await self._send(answers)
            # A body is complete once: nothing that follows has to be prepared.
            while self._inbox and not self._call.is_over:
                following = self._inbox.popleft()
                if following is None:
                    self._call.finish()
                else:
                    self._answer(following)
        except Exception as err:  # noqa: BLE001 - the top of a task; the session reports it
            self._call.fail(err)
        self._server.held.give_back(self._waiting)
        self._waiting = 0
        self._task = None
        self._call.resume()
        self._call.flush()


def _pieces(answers: Iterable[Answer]) -> Iterator[bytes]:
    """The answers' messages, large ones cut."""
    for answer in answers:
        if type(answer) is Continue and answer.body is not None and len(answer.body) > _PIECE:
            body = answer.body
            yield encode_head(answer, len(body))
            for at in range(0, len(body), _PIECE):
                yield body[at : at + _PIECE]
        else:
            yield encode_answer(answer)


def _read(message: bytes) -> Input:
    try:
        return read_message(pb.ProcessingRequest.FromString(message))
    except DecodeError as err:
        # grpcio's status for it.
        raise CallFault(Status.UNKNOWN, "the message is no ProcessingRequest") from err


class _AccessLog:
    """One Envoy's access log."""

    def __init__(self, server: Http2Server, call: Call) -> None:
        self._server, self._call = server, call
        call.stream.is_lasting = True
        server.open.add(self)

    def on_message(self, message: bytes) -> None:
        try:
            entries = log_pb.StreamAccessLogsMessage.FromString(message)
        except DecodeError as err:
            raise CallFault(Status.UNKNOWN, "the message is no StreamAccessLogsMessage") from err
        for broken in broken_answers(entries):
            self._server.on_broken(broken, time())

    def on_over_budget(self) -> None:
        self._call.exhaust()

    def on_half_close(self) -> None:
        self._finish()

    def on_end(self) -> None:
        self._server.open.discard(self)

    def stop(self) -> None:
        """End the stream, which would last as long as Envoy; it opens it again elsewhere."""
        self._finish()

    def _finish(self) -> None:
        self._call.send(log_pb.StreamAccessLogsResponse().SerializeToString())
        self._call.finish()
