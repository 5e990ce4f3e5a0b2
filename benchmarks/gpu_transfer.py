"""KV from one process's GPU memory to another's, over the engine's transfer; and a socket copy."""

import asyncio
import multiprocessing
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Final

import torch

from tandem_contract.transfer_params import TransferParams
from tandem_engine.transfer.producer import Producer
from tandem_engine.transfer.puller import Puller
from tandem_engine.types import KvLayout

BLOCK: Final = 16
_RECEIVE: Final = 1 << 20


def layout(layers: int, kv_heads: int, head_dim: int) -> KvLayout:
    """The layout of a cache in bfloat16."""
    return KvLayout("benchmark", "bfloat16", layers, kv_heads, head_dim, BLOCK)


def caches(kv: KvLayout, blocks: int, device: str) -> list[torch.Tensor]:
    """A cache with random KV."""
    shape = (blocks, 2, kv.block_size, kv.kv_heads, kv.head_dim)
    return [torch.rand(shape, device=device).to(torch.bfloat16) for _ in range(kv.layers)]


def _hold(control: Connection, kv: KvLayout, blocks: int, device: str) -> None:
    """The producer's process: holds all blocks under each request id that it receives."""

    async def serve() -> None:
        producer = Producer(
            caches(kv, blocks, device), kv, "bench", "127.0.0.1", 0, 60.0, lambda *_: None
        )
        await producer.start()
        control.send(producer.address)
        tokens = blocks * kv.block_size
        while (name := await asyncio.to_thread(control.recv)) is not None:
            producer.open(name, "prompt")
            producer.publish(name, range(blocks), tokens, kv.layers)
            producer.complete(name, tokens)
            control.send(name)
        await producer.close()

    asyncio.run(serve())


def _pour(control: Connection, size: int) -> None:
    """The process of the socket copy: sends `size` bytes for each message that it receives."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        control.send(server.getsockname())
        sock, _ = server.accept()
        with sock, memoryview(bytearray(size)) as view:
            while control.recv() is not None:
                sock.sendall(view)


def socket_rate(size: int, rounds: int) -> list[float]:
    """Bytes per second of a copy from process to process over loopback, without anything else."""
    spawn = multiprocessing.get_context("spawn")
    control, theirs = spawn.Pipe()
    child = spawn.Process(target=_pour, args=(theirs, size))
    child.start()
    theirs.close()
    into, rates = memoryview(bytearray(size)), []
    with socket.create_connection(control.recv()) as sock:
        for _ in range(rounds + 1):
            begin, received = time.perf_counter(), 0
            control.send("go")
            while received < size:
                received += sock.recv_into(into[received : received + _RECEIVE])
            rates.append(size / (time.perf_counter() - begin))
        control.send(None)
    child.join()
    return rates[1:]  # the first touches fresh memory


async def transfer_rates(
    kv: KvLayout, tokens: int, streams: Sequence[int], device: str, rounds: int
) -> dict[int, list[float]]:
    """Bytes per second of hand-offs of `tokens` tokens each, by how many run at once."""
    spawn = multiprocessing.get_context("spawn")
    control, theirs = spawn.Pipe()
    blocks = tokens // kv.block_size
    child = spawn.Process(target=_hold, args=(theirs, kv, blocks, device))
    child.start()
    theirs.close()
    most = max(streams)
    puller = Puller(caches(kv, blocks * most, device), kv)
    address = await asyncio.to_thread(control.recv)
    names = iter(range(10**9))

    async def pull(place: int) -> None:
        control.send(name := f"request-{next(names)}")
        control.recv()
        own = range(place * blocks, (place + 1) * blocks)
        params = TransferParams(
            "bench", name, *address, (tuple(range(blocks)),), tokens, tandem_prompt_hash="prompt"
        )
        await puller.pull(params, own, 0, tokens)

    size = kv.layers * blocks * kv.block_bytes
    rates: dict[int, list[float]] = {}
    for count in streams:
        for turn in range(rounds + 1):
            begin = time.perf_counter()
            await asyncio.gather(*(pull(place) for place in range(count)))
            if turn:
                rate = count * size / (time.perf_counter() - begin)
                rates.setdefault(count, []).append(rate)
    await puller.close()
    control.send(None)
    await asyncio.to_thread(child.join)
    return rates
