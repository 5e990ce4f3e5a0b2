"""Benchmark of the prefix index: memory for 100 pods, and time per operation.

Every pod holds 100,000 KV blocks of 16 tokens, in prompts of its own behind a system prompt that
all pods hold. Memory is the process's resident memory, so it includes what the index's own estimate
may miss.

The precise index is measured with prompts that one pod has cached whole: the walk along their
blocks, and the longest time for which it keeps other tasks of the event loop from running.
"""

import asyncio
import multiprocessing
import os
import time
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Final

import click

from tandem_contract.chains import Chain
from tandem_contract.prefix import covered_tokens, text_chain, whole_blocks
from tandem_epp.prefix.block_keys import TokenizedPrompt
from tandem_epp.prefix.blocks import StoredBlocks, Tier
from tandem_epp.prefix.kv_events.collector import EventCollector
from tandem_epp.prefix.pod_blocks import PodBlocks
from tandem_epp.prefix.prefix_tree import PrefixTree

from .figures import Figure, at_most, report, without_target
from .figures import progress as show_progress

PODS: Final = 100
POD_TOKENS: Final = 100_000 * 16
SYSTEM_TOKENS: Final = 1024
LIMIT_BYTES: Final = 600_000_000
BLOCK_TOKENS: Final = 16
_REPEATS: Final = 300


def _prompt(system: Chain, tokens: int) -> Chain:
    """A chain of `tokens` tokens behind the system prompt; hashes are random, as real ones look."""
    blocks = whole_blocks(SYSTEM_TOKENS + tokens) - len(system)
    chain = array("Q", system)
    chain.frombytes(os.urandom(8 * blocks))
    return chain


def _fill(tree: PrefixTree[int], tokens: int) -> list[Chain]:
    """Fill every pod with prompts of `tokens` tokens; returns the last prompt of each."""
    system = array("Q")
    system.frombytes(os.urandom(8 * whole_blocks(SYSTEM_TOKENS)))
    newest = []
    for pod in range(PODS):
        tree.set_capacity(pod, POD_TOKENS)
        for _ in range((POD_TOKENS - SYSTEM_TOKENS) // tokens):
            chain = _prompt(system, tokens)
            tree.confirm(tree.place(pod, chain))
        newest.append(chain)
    return newest


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _measure_memory(answers: Connection, tokens: int) -> None:
    tree: PrefixTree[int] = PrefixTree(limit_bytes=2 * LIMIT_BYTES)
    before = _resident_bytes()
    _fill(tree, tokens)
    answers.send((_resident_bytes() - before, tree.bytes))


def memory(tokens: int) -> tuple[int, int]:
    """Resident and estimated bytes of a full index with prompts of `tokens` tokens."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_measure_memory, args=(theirs, tokens))
    process.start()
    answer: tuple[int, int] = ours.recv()
    process.join()
    return answer


def microseconds(operation: Callable[[int], object], repeats: int = _REPEATS) -> list[float]:
    """Medians of the operation's time, of five rounds; it gets the number of the repetition."""
    medians = []
    for _ in range(5):
        times = []
        for number in range(repeats):
            start = time.perf_counter()
            operation(number)
            times.append(time.perf_counter() - start)
        medians.append(1e6 * sorted(times)[repeats // 2])
    return medians


def _memory_figures() -> list[Figure]:
    figures = []
    for tokens in (2048, 256):
        show_progress(f"filling {PODS} pods with prompts of {tokens} tokens")
        resident, estimated = memory(tokens)
        name = f"memory of {PODS} pods × 100,000 blocks, prompts of {tokens} tokens"
        figures += [
            at_most(name, resident / 1e6, "MB", LIMIT_BYTES / 1e6),
            at_most("per KV block", resident / PODS / 100_000, "bytes", 60),
            at_most("resident over estimated", resident / estimated, "ratio", 1.25),
        ]
    return figures


def _time_figures() -> list[Figure]:
    show_progress("time per operation")
    tree: PrefixTree[int] = PrefixTree()
    chains = _fill(tree, 4096)
    long = text_chain(os.urandom(220_000))
    tree.confirm(tree.place(0, long))

    def place_and_confirm(number: int) -> None:
        # Half of a known prompt, and an end of its own: a node is split, one added, one evicted.
        known = chains[number % PODS]
        chain = known[: len(known) // 2 + number % 50]
        chain.frombytes(os.urandom(8 * 100))
        tree.confirm(tree.place(number % PODS, chain))

    figures = [
        at_most("match, all pods at once", microseconds(lambda n: tree.match(chains[n % PODS])),
                "µs", 50),
        at_most("match of 220 KB on one pod", microseconds(lambda _: tree.match(long)), "µs", 50),
        at_most("place and confirm, with an eviction", microseconds(place_and_confirm), "µs", 200),
    ]  # fmt: skip
    for kilobytes in (1, 220, 400):
        data = os.urandom(kilobytes * 1000)
        times = microseconds(lambda _, data=data: text_chain(data, b"m"))  # type: ignore[misc]
        figures.append(at_most(f"hashing of {kilobytes} KB", times, "µs", 50 + 2 * kilobytes))
    covered = covered_tokens(len(text_chain(bytes(400_000))))
    show_progress(f"400 KB are {len(text_chain(bytes(400_000)))} hashes for {covered} tokens")
    return figures


def _precise(tokens: int) -> tuple[PodBlocks, TokenizedPrompt]:
    """PODS pods, of which one has cached all of a prompt and the others prompts of their own."""
    random, blocks = Random(0), PodBlocks()
    for pod in range(PODS):
        ids = array("I", (random.randrange(100_000) for _ in range(tokens if not pod else 4096)))
        names = [random.getrandbits(64) for _ in range(len(ids) // BLOCK_TOKENS)]
        blocks.store(f"{pod}", Tier.GPU, StoredBlocks(names, None, ids, BLOCK_TOKENS))
        if not pod:
            prompt = TokenizedPrompt(ids)
    return blocks, prompt


async def _longest_turn(collector: EventCollector, prompt: TokenizedPrompt) -> float:
    """Microseconds for which other tasks wait at most while the prompt is looked up."""
    matching, longest = asyncio.create_task(collector.match(prompt)), 0.0
    while not matching.done():
        start = time.perf_counter()
        await asyncio.sleep(0)
        longest = max(longest, time.perf_counter() - start)
    return 1e6 * longest


def _precise_figures() -> list[Figure]:
    show_progress("precise index")
    figures = []
    for tokens in (8_000, 32_000, 128_000):
        blocks, prompt = _precise(tokens)
        collector = EventCollector(blocks)
        times = microseconds(lambda _, c=collector, p=prompt: asyncio.run(c.match(p)), 30)  # type: ignore[misc]
        turns = [
            sorted(asyncio.run(_longest_turn(collector, prompt)) for _ in range(30))[15]
            for _ in range(5)
        ]
        name = f"precise match, {tokens:,} tokens cached, {PODS} pods"
        figures += [
            without_target(name, times, "µs"),
            at_most(f"{name}: longest turn on the event loop", turns, "µs", 1000),
        ]
    return figures


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
def main(file: Path | None) -> None:
    """Measure the memory of the prefix index, and the time of its operations."""
    report(_memory_figures() + _time_figures() + _precise_figures(), file)


if __name__ == "__main__":
    main()
