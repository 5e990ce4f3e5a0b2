"""Measures the KV transfer between two processes against a socket copy of as many bytes.

Both send from one process and receive in another over loopback. The transfer also frames the bytes,
hashes them on both sides and writes them into the reader's blocks. The two alternate in one run.
"""

import asyncio
import multiprocessing
import socket
import time
from multiprocessing.connection import Connection
from typing import Final

import torch

from tandem_contract.transfer_params import TransferParams
from tandem_engine.transfer.producer import Producer
from tandem_engine.transfer.puller import Puller
from tandem_engine.types import KvLayout

LAYOUT: Final = KvLayout(
    model="benchmark", dtype="float32", layers=16, kv_heads=8, head_dim=128, block_size=16
)
BLOCKS: Final = 128
TOKENS: Final = BLOCKS * LAYOUT.block_size
BYTES: Final = LAYOUT.layers * BLOCKS * LAYOUT.block_bytes
"""256 MiB."""
CHUNK: Final = 1 << 20


def _cache() -> list[torch.Tensor]:
    shape = (BLOCKS, 2, LAYOUT.block_size, LAYOUT.kv_heads, LAYOUT.head_dim)
    return [torch.rand(shape) for _ in range(LAYOUT.layers)]


def _hold(control: Connection) -> None:
    """The producer's process: holds the whole cache under each request id that it receives."""
    torch.set_num_threads(1)

    async def serve() -> None:
        freed = asyncio.Queue[str]()
        producer = Producer(
            _cache(), LAYOUT, "bench", "127.0.0.1", 0, 30.0, lambda name, _: freed.put_nowait(name)
        )
        await producer.start()
        control.send(producer.address)
        while True:
            name = await asyncio.to_thread(control.recv)
            producer.open(name, "prompt")
            producer.publish(name, range(BLOCKS), TOKENS, LAYOUT.layers)
            producer.complete(name, TOKENS)
            control.send(name)
            await freed.get()

    asyncio.run(serve())


def _pour(control: Connection) -> None:
    """The process of the socket copy: sends as many bytes for each message that it receives."""
    memory = bytearray(BYTES)
    with socket.create_server(("127.0.0.1", 0)) as server:
        control.send(server.getsockname())
        sock, _ = server.accept()
        with sock, memoryview(memory) as view:
            while True:
                control.recv()
                sock.sendall(view)


def _raw(sock: socket.socket, control: Connection, into: memoryview) -> float:
    start = time.perf_counter()
    control.send("go")
    received = 0
    while received < BYTES:
        received += sock.recv_into(into[received : received + CHUNK])
    return time.perf_counter() - start


async def _pull(puller: Puller, control: Connection, address: tuple[str, int], name: str) -> float:
    control.send(name)
    control.recv()
    params = TransferParams(
        "bench", name, *address, (tuple(range(BLOCKS)),), TOKENS, tandem_prompt_hash="prompt"
    )
    start = time.perf_counter()
    await puller.pull(params, range(BLOCKS), 0, TOKENS)
    return time.perf_counter() - start


def copy_ratios(rounds: int) -> list[float]:
    """Bytes per second of the transfer over those of a bare copy, for each of `rounds` pairs."""
    spawn = multiprocessing.get_context("spawn")
    torch.set_num_threads(1)
    holder, holder_end = spawn.Pipe()
    pourer, pourer_end = spawn.Pipe()
    children = [
        spawn.Process(target=_hold, args=(holder_end,)),
        spawn.Process(target=_pour, args=(pourer_end,)),
    ]
    for child in children:
        child.start()
    # With the child's end closed here, its death is an EOFError instead of an endless wait.
    holder_end.close()
    pourer_end.close()

    async def measure() -> list[float]:
        puller = Puller(_cache(), LAYOUT)
        address, memory = holder.recv(), memoryview(bytearray(BYTES))
        ratios = []
        with socket.create_connection(pourer.recv()) as sock:
            for turn in range(rounds + 1):
                pull_seconds = await _pull(puller, holder, address, f"request-{turn}")
                ratios.append(_raw(sock, pourer, memory) / pull_seconds)
        await puller.close()
        return ratios[1:]  # the first touches fresh memory

    try:
        return asyncio.run(measure())
    finally:
        for child in children:
            child.terminate()
            child.join()
