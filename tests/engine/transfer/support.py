"""A small paged cache, and peers whose frames each test writes."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import torch

from tandem_contract.transfer_params import TransferParams
from tandem_engine.transfer import wire
from tandem_engine.transfer.producer import FreeReason, Producer
from tandem_engine.types import KvLayout

from ..device import DEVICE

torch.set_num_threads(1)

HOST = "127.0.0.1"
ENGINE = "engine-1"
HASH = "prompt"
"""Of every prompt here, unless a test says otherwise."""
LAYOUT = KvLayout("tiny", "float32", layers=3, kv_heads=2, head_dim=8, block_size=4)
BIG = replace(LAYOUT, layers=2, kv_heads=16, head_dim=64, block_size=64)
"""512 KiB per block and layer: a few blocks are more than socket buffers hold."""
HURRIED = wire.TransferLimits(handshake=0.2, idle=0.2)
DEADLINE = 20.0


def cache(seed: int, layout: KvLayout = LAYOUT, blocks: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (blocks, 2, layout.block_size, layout.kv_heads, layout.head_dim)
    dtype = getattr(torch, layout.dtype)
    return [
        torch.rand(shape, generator=generator).to(dtype).to(DEVICE) for _ in range(layout.layers)
    ]


def params(address: tuple[str, int], request_id: str = "r") -> TransferParams:
    """Transfer parameters without block ids, which the producer knows."""
    return TransferParams(
        ENGINE, request_id, *address, remote_block_ids=(), tandem_prompt_hash=HASH
    )


def finish(producer: Producer, request_id: str, blocks: list[int], layout: KvLayout) -> int:
    """Open and complete a request that fills all its blocks. Returns its number of tokens."""
    tokens = len(blocks) * layout.block_size
    producer.open(request_id, HASH)
    producer.publish(request_id, blocks, tokens, layout.layers)
    producer.complete(request_id, tokens)
    return tokens


async def until(condition: Callable[[], bool]) -> None:
    """Run the event loop until the condition holds."""
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.001)


class Freed:
    """Records what a producer released, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, FreeReason]] = []

    def __call__(self, request_id: str, reason: FreeReason) -> None:
        self.log.append((request_id, reason))

    async def was(self, *expected: tuple[str, FreeReason]) -> None:
        await until(lambda: len(self.log) >= len(expected))
        assert self.log == list(expected)


class Peer:
    """One end of a connection, frame by frame."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    async def send(self, *frames: wire.Frame) -> None:
        await wire.send_frames_async(self.sock, *frames)

    async def send_bytes(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def from_producer(self) -> wire.ToReader:
        async with asyncio.timeout(DEADLINE):
            return await wire.receive_frame_async(self.sock, wire.to_reader)

    async def from_reader(self) -> wire.ToProducer:
        async with asyncio.timeout(DEADLINE):
            return await wire.receive_frame_async(self.sock, wire.to_producer)

    async def read(self, count: int) -> bytes:
        """`count` bytes, fewer at the end of the stream."""
        data = bytearray()
        async with asyncio.timeout(DEADLINE):
            while len(data) < count:
                more = await asyncio.get_running_loop().sock_recv(self.sock, count - len(data))
                if not more:
                    break
                data += more
        return bytes(data)

    async def ended(self) -> None:
        """Read to the end of the stream, or to a reset."""
        try:
            while await self.read(1 << 16):
                pass
        except ConnectionResetError:
            pass


def hello(layout: KvLayout = LAYOUT, engine_id: str = ENGINE) -> wire.Hello:
    return wire.Hello(wire.VERSION, engine_id, layout)


def read(tokens: int, request_id: str = "r", skip_blocks: int = 0) -> wire.Read:
    return wire.Read(request_id, skip_blocks, tokens, 10.0, HASH)


@asynccontextmanager
async def connected(address: tuple[str, int], receive_buffer: int = 0) -> AsyncIterator[Peer]:
    """A connection to a producer; `receive_buffer` in bytes bounds what the kernel takes in."""
    with socket.socket() as sock:
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
        yield Peer(sock)


@asynccontextmanager
async def playing_producer(
    script: Callable[[Peer], Awaitable[None]],
) -> AsyncIterator[tuple[str, int]]:
    """A producer that runs the script on each connection, one connection after the other."""
    loop = asyncio.get_running_loop()

    async def serve(listening: socket.socket) -> None:
        while True:
            sock, _ = await loop.sock_accept(listening)
            sock.setblocking(False)
            with sock:
                await script(Peer(sock))

    with socket.create_server((HOST, 0)) as listening:
        listening.setblocking(False)
        serving = asyncio.create_task(serve(listening))
        try:
            yield listening.getsockname()
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
