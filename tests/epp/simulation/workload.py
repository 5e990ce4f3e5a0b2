"""Requests for the simulation: a recorded trace, made-up conversations, a shared system prompt."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import ceil
from pathlib import Path
from random import Random
from typing import Final

from tandem_loadtest.workload.traces import load_trace

from .engine import BLOCK, Work

_MEAN_PROMPT: Final = 4000
"""Tokens of a conversation's first prompt, on average."""
_MEAN_ADDED: Final = 2500
"""Tokens that each further turn adds, the answer before it included."""
_MEAN_OUTPUT: Final = 300
_MEAN_PAUSE: Final = 60.0
"""Seconds between two turns."""
_MEAN_TURNS: Final = 4


@dataclass(frozen=True, slots=True)
class Request:
    """One request; lengths in tokens, `at` in seconds."""

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Ids of the prompt's blocks of BLOCK tokens; equal ids, equal prefix."""

    def work(self, index: int) -> Work:
        """The request on a pod."""
        return Work(index, self.at, self.prompt_tokens, self.output_tokens, self.blocks)


def from_trace(file: Path, *, speed: float, limit: int | None = None) -> list[Request]:
    """The requests of a trace with prefix blocks, `speed` times as fast. Raises TraceError."""
    return [
        Request(a.at / speed, a.prompt_tokens, a.output_tokens, a.prefix_blocks or ())
        for a in load_trace(file, limit=limit)
    ]


def conversations(number: int, *, rate: float, seed: int) -> list[Request]:
    """About `number` requests of conversations that grow, `rate` per second on average.

    Lengths and pauses are exponentially distributed, turns geometrically; conversations start as a
    Poisson process.
    """
    random, ids, start = Random(seed), count(), 0.0
    requests: list[Request] = []
    while len(requests) < number:
        start += random.expovariate(rate / _MEAN_TURNS)
        at, blocks = start, list[int]()
        tokens = 1 + int(random.expovariate(1 / _MEAN_PROMPT))
        while True:
            blocks += [next(ids) for _ in range(ceil(tokens / BLOCK) - len(blocks))]
            output = 1 + int(random.expovariate(1 / _MEAN_OUTPUT))
            requests.append(Request(at, tokens, output, tuple(blocks)))
            if random.random() < 1 / _MEAN_TURNS:
                break
            at += random.expovariate(1 / _MEAN_PAUSE)
            # The last block of a prompt is partial: the next turn fills it with other tokens.
            blocks.pop()
            tokens += 1 + int(random.expovariate(1 / _MEAN_ADDED))
    return sorted(requests, key=lambda request: request.at)


def shared_prompt(
    number: int, *, prompt_tokens: int, shared: float, output_tokens: int
) -> Iterator[Request]:
    """`number` requests at once, of which the share `shared` of every prompt is the same."""
    common = int(prompt_tokens * shared) // BLOCK
    ids = count(common)
    for _ in range(number):
        own = [next(ids) for _ in range(ceil(prompt_tokens / BLOCK) - common)]
        yield Request(0.0, prompt_tokens, output_tokens, (*range(common), *own))


def prompt_ids(work: Work) -> bytes:
    """The prompt as JSON, a list of token ids; equal blocks are equal ids."""
    full, rest = divmod(work.prompt_tokens, BLOCK)
    parts = [b"%d," % block * BLOCK for block in work.blocks[:full]]
    # A prompt may be longer than its recorded blocks: the rest is its own.
    own = work.prompt_tokens - BLOCK * len(parts)
    last = work.blocks[full] if rest and full < len(work.blocks) else 10_000_000 + work.index
    return b"[%b]" % (b"".join(parts) + b"%d," % last * own).rstrip(b",")
