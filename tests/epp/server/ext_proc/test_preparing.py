"""Picks that wait for something about the body, on both transports."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from tandem_contract.commandline import HostPort
from tandem_epp.exchange import HttpRequest
from tandem_epp.server.ext_proc import ext_proc_pb2 as pb
from tandem_epp.server.ext_proc.grpc_server import GrpcServer
from tandem_epp.server.ext_proc.http2_server import Http2Server
from tandem_epp.server.ext_proc.interface import SERVICE

from ...real import until
from .test_servers import Kind, body, head
from .test_stream import Placement, Placer

pytestmark = pytest.mark.component

LIMIT = 1 << 22


class Recorder(Placer):
    """Records what requests were prepared with."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[object] = []

    def place(self, request: HttpRequest, body: bytes | None, now: float) -> Placement:
        self.prepared.append(request.preparation)
        placement = super().place(request, body, 1.0)
        placement.end = lambda now: self.prepared.append("end")  # type: ignore[method-assign]
        return placement


class Preparing:
    """A server of which each pick waits for `release`."""

    def __init__(self, kind: Kind) -> None:
        self.picker = Recorder()
        self.server = kind(self.picker, HostPort("127.0.0.1", 0), LIMIT)
        self.server.prepare = self.prepare
        self.release = asyncio.Event()
        self.waits = 0
        self.fails = False

    def prepare(
        self, request: HttpRequest, body: bytes
    ) -> AbstractAsyncContextManager[object] | None:
        return None if body == b"quick" else self._prepare(body)

    @asynccontextmanager
    async def _prepare(self, body: bytes) -> AsyncIterator[object]:
        self.waits += 1
        try:
            await self.release.wait()
            if self.fails:
                raise KeyError("prepare")
            yield body
        finally:
            self.waits -= 1

    async def is_waiting(self) -> bool:
        return self.waits == 1


@pytest.fixture(params=[GrpcServer, Http2Server])
async def preparing(request: pytest.FixtureRequest) -> AsyncIterator[Preparing]:
    server = Preparing(request.param)
    yield server
    await server.server.stop(0)


@asynccontextmanager
async def calling(preparing: Preparing) -> AsyncIterator[Any]:
    port = await preparing.server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )


async def test_a_pick_knows_what_was_prepared_and_the_rest_follows(preparing: Preparing) -> None:
    async with calling(preparing) as method:
        call = method()
        await call.write(head("/v1/completions", end=False))
        await call.write(body(b"text", end=True))
        await until(preparing.is_waiting)
        # These come while the pick waits, and are answered behind it.
        await call.write(pb.ProcessingRequest(response_headers=pb.HttpHeaders()))
        await call.write(pb.ProcessingRequest(response_trailers=pb.HttpTrailers()))
        await call.done_writing()
        preparing.release.set()
        kinds = [answer.WhichOneof("response") async for answer in call]
        assert kinds == ["request_headers", "request_body", "response_headers", "response_trailers"]
        assert await call.code() is grpc.StatusCode.OK
        assert preparing.picker.prepared == [b"text", "end"]


async def test_a_pick_that_waits_for_nothing(preparing: Preparing) -> None:
    async with calling(preparing) as method:
        call = method()
        await call.write(head("/v1/completions", end=False))
        await call.write(body(b"quick", end=True))
        assert (await call.read()).WhichOneof("response") == "request_headers"
        assert preparing.picker.prepared == [None]


async def test_a_client_that_leaves_ends_the_wait(preparing: Preparing) -> None:
    async with calling(preparing) as method:
        call = method()
        await call.write(head("/v1/completions", end=False))
        await call.write(body(b"text", end=True))
        await until(preparing.is_waiting)
        call.cancel()

        async def over() -> bool:
            return preparing.waits == 0

        await until(over)
        assert preparing.picker.prepared == []


async def test_an_error_of_the_preparation_ends_the_stream(preparing: Preparing) -> None:
    async with calling(preparing) as method:
        call = method()
        preparing.fails = True
        preparing.release.set()
        await call.write(head("/v1/completions", end=False))
        await call.write(body(b"text", end=True))
        assert await call.code() is grpc.StatusCode.UNKNOWN
        assert preparing.picker.prepared == []


async def test_a_stop_waits_for_the_pick_and_then_ends_the_stream(preparing: Preparing) -> None:
    async with calling(preparing) as method:
        call = method()
        await call.write(head("/v1/completions", end=False))
        await call.write(body(b"text", end=True))
        await until(preparing.is_waiting)
        stopping = asyncio.create_task(preparing.server.stop(100))
        preparing.release.set()
        kinds = [answer.WhichOneof("response") async for answer in call]
        assert kinds == ["request_headers", "request_body"]
        assert await call.code() is grpc.StatusCode.OK
        await stopping


async def test_what_a_client_sends_meanwhile_is_bounded_by_its_window() -> None:
    preparing = Preparing(Http2Server)
    async with calling(preparing) as method:
        call = method()
        await call.write(head("/v1/completions", end=False))
        await call.write(body(b"text", end=True))
        await until(preparing.is_waiting)
        sent = 0
        chunk = pb.ProcessingRequest(response_body=pb.HttpBody(body=bytes(60_000)))

        async def send() -> None:
            nonlocal sent
            while sent < 100:
                await call.write(chunk)
                sent += 1

        sending = asyncio.create_task(send())
        (handler,) = preparing.server.open  # type: ignore[union-attr]
        window = preparing.server.server.limits.stream_window  # type: ignore[union-attr]

        async def full() -> bool:
            received = sum(60_000 for _ in handler._inbox or ())
            assert received <= window
            return received > window - 130_000

        await until(full)
        preparing.release.set()
        await sending
        await call.done_writing()
        kinds = [answer.WhichOneof("response") async for answer in call]
        assert kinds == ["request_headers", "request_body", *["response_body"] * 100]
        assert await call.code() is grpc.StatusCode.OK
    await preparing.server.stop(0)
