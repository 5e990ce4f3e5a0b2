"""Measures what batching, prefix caching and the KV hand-off save on the reference engine.

Each figure is a ratio of two measurements that alternate in one run: the median of the pairs, with
its smallest and largest. The model has random weights: 8 layers, hidden size 512, 8 attention heads
and 2 KV heads (4:1 as in Llama 3), float32, on CPU.

The KV transfer between two processes alternates with a socket copy of as many bytes: both send from
one process and receive in another over loopback. The transfer also frames the bytes, hashes them on
both sides and writes them into the reader's blocks.
"""

import asyncio
import multiprocessing
import random
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import aiohttp
import click
import torch

from tandem_contract.transfer_params import TransferParams
from tandem_engine.tiny import make_tiny_model
from tandem_engine.transfer.producer import Producer
from tandem_engine.transfer.puller import Puller
from tandem_engine.types import KvLayout

from .figures import Figure, at_least, at_most, progress, report
from .peers import complete, engine

VOCAB = 512
LONG = 2000
FLAGS = ("--dtype", "float32", "--max-model-len", "4096", "--num-gpu-blocks-override", "1024")
LAYOUT: Final = KvLayout(
    model="benchmark", dtype="float32", layers=16, kv_heads=8, head_dim=128, block_size=16
)
BLOCKS: Final = 128
TOKENS: Final = BLOCKS * LAYOUT.block_size
BYTES: Final = LAYOUT.layers * BLOCKS * LAYOUT.block_bytes
"""256 MiB."""
CHUNK: Final = 1 << 20


def prompt(rng: random.Random, tokens: int) -> list[int]:
    """Random token ids, so that no two prompts share a prefix."""
    return [rng.randrange(10, VOCAB) for _ in range(tokens)]


async def seconds(work: Callable[[], Awaitable[object]]) -> float:
    """Seconds that `work` takes."""
    start = time.perf_counter()
    await work()
    return time.perf_counter() - start


async def batching(session: aiohttp.ClientSession, url: str, rounds: int) -> Figure:
    """Tokens per second of 16 sequences decoded together, over those of one sequence.

    Each prompt is sent once before, so that all but its last token comes from the prefix cache and
    the measured time is decoding. The target allows for machines on which one sequence is fast: it
    is limited by memory bandwidth (each token reads all weights), 16 together by arithmetic.
    """
    rng = random.Random(1)
    tokens = 64

    async def decode(count: int) -> float:
        prompts = [prompt(rng, 33) for _ in range(count)]
        # Not timed: fills the prefix cache with these prompts.
        await asyncio.gather(*(complete(session, url, p, 1) for p in prompts))
        took = await seconds(
            lambda: asyncio.gather(*(complete(session, url, p, tokens) for p in prompts))
        )
        return count * tokens / took

    pairs = [(await decode(16), await decode(1)) for _ in range(rounds)]
    return at_least("decode of 16 sequences over one, tokens/s", _ratios(pairs), "ratio", 7)


async def prefix_hit(session: aiohttp.ClientSession, url: str, rounds: int) -> Figure:
    """Time to first token of a cold prompt over one with nine tenths of it cached."""
    rng = random.Random(2)
    pairs = []
    for _ in range(rounds):
        cold = prompt(rng, LONG)
        # A new end, so that the last tenth is computed.
        warm = cold[: LONG * 9 // 10] + prompt(rng, LONG - LONG * 9 // 10)
        first = await seconds(lambda: complete(session, url, cold, 1))  # noqa: B023
        second = await seconds(lambda: complete(session, url, warm, 1))  # noqa: B023
        pairs.append((first, second))
    return at_least("TTFT cold over 90 % prefix hit", _ratios(pairs), "ratio", 5)


async def hand_off(
    session: aiohttp.ClientSession, prefill: str, decode: str, rounds: int
) -> Figure:
    """Time to the first token from transferred KV, over that of computing the same prompt."""
    rng = random.Random(3)
    pairs = []
    for _ in range(rounds):
        ids = prompt(rng, LONG)
        start = time.perf_counter()
        leg = {"do_remote_decode": True, "do_remote_prefill": False}
        answer = await complete(session, prefill, ids, 1, kv_transfer_params=leg)
        computed = time.perf_counter() - start
        params = answer["kv_transfer_params"]
        transfer_seconds = await seconds(
            lambda: complete(session, decode, ids, 1, kv_transfer_params=params)  # noqa: B023
        )
        pairs.append((transfer_seconds, computed))
    name = f"hand-off of {LONG} tokens over computing them"
    return at_most(name, _ratios(pairs), "ratio", 0.2)


def _ratios(pairs: list[tuple[float, float]]) -> list[float]:
    return [a / b for a, b in pairs]


async def measure(rounds: int) -> list[Figure]:
    """All figures."""
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch)
        make_tiny_model(
            model, vocab=VOCAB, layers=8, hidden=512, heads=8, kv_heads=2, max_position=4096
        )
        figures = []
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
            async with engine(model, *FLAGS, threads=2) as url:
                # The first request pays for memory that later ones reuse.
                await complete(session, url, [1] * 100, 8)
                progress("batching")
                figures.append(await batching(session, url, rounds))
                progress("prefix hits")
                figures.append(await prefix_hit(session, url, rounds))
            async with (
                # Two new engines: the one above has no transfer role.
                engine(model, *FLAGS, kv_role="kv_producer") as prefill,
                engine(model, *FLAGS, kv_role="kv_consumer") as decode,
            ):
                progress("hand-off")
                figures.append(await hand_off(session, prefill, decode, rounds))
    return figures


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


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
@click.option("--rounds", default=5, show_default=True, help="pairs per figure; medians are kept")
def main(file: Path | None, rounds: int) -> None:
    """Measure batching, prefix caching and the hand-off of the reference engine."""
    figures = asyncio.run(measure(rounds))
    progress("large caches against a raw socket")
    ratios = copy_ratios(rounds)
    figures.append(at_least("large KV cache over a raw socket copy", ratios, "ratio", 0.5))
    report(figures, file)


if __name__ == "__main__":
    main()
