"""The gRPC transport, on grpcio: ext_proc messages in and out of the stream's state machine.

Errors: `ListenError` when the server cannot listen at its address.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from time import time

import grpc
import grpc.aio

from tandem_contract.commandline import HostPort
from tandem_contract.held_bytes import HeldBytes

from ...exchange import BrokenAnswer
from . import ext_proc_pb2 as pb
from .access_log import AccessLogService
from .body_deadlines import BODY_SECONDS, BodyDeadlines
from .codec import read_message, write_answer
from .interface import ENVELOPE, REPLY_SECONDS, SERVICE, ListenError, Preparer
from .messages import Answer, Input, MoreTime, RequestHeaders
from .stream import ExtProcStream, RequestPicker, shared_parts


@dataclass(eq=False, slots=True)
class _OpenStream:
    """A gRPC stream and the task that serves it."""

    task: asyncio.Task[None] | None
    stream: ExtProcStream
    is_reading: bool = True
    """Whether the task waits for a message. Only then may it be cancelled: grpcio cannot send a
    status beside an unfinished write."""
    is_expired: bool = False
    """Whether the task was cancelled because the body did not come in time."""

    def expire_body(self) -> None:
        """The time for the body is over."""
        if self.task is not None and self.is_reading and self.stream.is_collecting:
            self.is_expired = True
            self.task.cancel()


class GrpcServer:
    """Serves ext_proc on one address."""

    def __init__(
        self,
        picker: RequestPicker,
        listen: HostPort,
        body_limit: int,
        on_broken: Callable[[BrokenAnswer, float], None] = lambda *_: None,
        *,
        held: HeldBytes | None = None,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        """`body_limit` is in bytes; `held` counts what all streams hold, and bodies are complete
        after `body_seconds` or refused. `on_broken` is called with each answer that broke off, and
        the time."""
        self._picker, self._listen, self._body_limit = picker, listen, body_limit
        self.held = held or HeldBytes()
        self._shared_parts = shared_parts()
        self.deadlines = BodyDeadlines(body_seconds)
        self.prepare: Preparer | None = None
        """Called with each request that has a body; None: picks wait for nothing."""
        self.longest_wait: Callable[[], float] = lambda: 0.0
        """As in `ExtProcServer`."""
        self._open: set[_OpenStream] = set()
        self._is_stopping = False
        self._server = grpc.aio.server(
            options=(
                # A BUFFERED body comes in one message.
                ("grpc.max_receive_message_length", body_limit + ENVELOPE),
                # Otherwise a second EPP on the same port would take part of the requests unnoticed.
                ("grpc.so_reuseport", 0),
            )
        )
        method = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=pb.ProcessingRequest.FromString,
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(SERVICE, {"Process": method})
        self._access_log = AccessLogService(on_broken)
        self._server.add_generic_rpc_handlers((handler, self._access_log.handler))

    async def start(self) -> int:
        """Listen and serve; returns the port. Raises ListenError."""
        try:
            port = self._server.add_insecure_port(str(self._listen))
        except RuntimeError as err:
            raise ListenError(
                f"cannot listen on {self._listen}: is the port in use? See --listen"
            ) from err
        await self._server.start()
        return port

    async def stop(self, grace: float) -> None:
        """Accept no new stream, end streams of placed requests now, all others after `grace` s.

        Streams of placed requests end with status OK, which tells Envoy to go on without ext_proc.
        Any other status is an error: Envoy would reset a request that it sent in
        FULL_DUPLEX_STREAMED mode.
        """
        self._is_stopping = True
        self._access_log.stop()
        # Started first, so that no new stream is accepted while the placed ones are ended.
        stopped = asyncio.create_task(self._server.stop(grace))
        # A stream that is writing sees `_is_stopping` itself once it has written.
        for open_stream in self._open:
            if open_stream.task and open_stream.is_reading and open_stream.stream.is_placed:
                open_stream.task.cancel()
        await stopped
        self.deadlines.close()

    async def _process(
        self,
        requests: AsyncIterator[pb.ProcessingRequest],
        context: grpc.aio.ServicerContext[pb.ProcessingRequest, pb.ProcessingResponse],
    ) -> None:
        # Envoy opens one gRPC stream for each HTTP request.
        stream = ExtProcStream(self._picker, self._body_limit, self.held, self._shared_parts)
        open_stream = _OpenStream(asyncio.current_task(), stream)
        self._open.add(open_stream)
        try:
            async for request in requests:
                open_stream.is_reading = False
                message = read_message(request)
                preparing = self._preparing(stream, message)
                if preparing is not None and stream.is_timed and (longest := self.longest_wait()):
                    await context.write(write_answer(MoreTime(longest + REPLY_SECONDS)))
                for answer in await self._answers(stream, message, preparing):
                    await context.write(write_answer(answer))
                if stream.is_collecting and isinstance(message, RequestHeaders):
                    self.deadlines.start(open_stream)
                open_stream.is_reading = True
                if self._is_stopping and stream.is_placed:
                    break
        except asyncio.CancelledError:
            # Cancelled by `stop` or at the deadline: return normally, so that grpcio sends status
            # OK.
            if open_stream.is_expired:
                for answer in stream.expire():
                    await context.write(write_answer(answer))
            elif not (self._is_stopping and stream.is_placed):
                raise
        finally:
            # Whatever ended the gRPC stream, the request's count on its pods ends with it.
            stream.close(time())
            self.deadlines.forget(open_stream)
            self._open.discard(open_stream)

    def _preparing(
        self, stream: ExtProcStream, message: Input
    ) -> AbstractAsyncContextManager[object] | None:
        """What the pick waits for once `message` has completed the body; None: nothing."""
        complete = stream.complete_body(message) if self.prepare is not None else None
        return self.prepare(*complete) if self.prepare is not None and complete else None

    @staticmethod
    async def _answers(
        stream: ExtProcStream,
        message: Input,
        preparing: AbstractAsyncContextManager[object] | None,
    ) -> Iterable[Answer]:
        if preparing is None:
            return stream.receive(message, time())
        async with preparing as preparation:
            stream.prepare(preparation)
            return stream.receive(message, time())
