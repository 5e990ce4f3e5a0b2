"""Requests for the simulation: a recorded trace, made-up conversations, a shared system prompt."""

from collections.abc import Iterator, Sequence
from itertools import count, islice
from math import ceil
from pathlib import Path
from random import Random
from typing import Final

from tandem_loadtest.workload.traces import load_trace
from tandem_planner.simulation.block_pool import BLOCK
from tandem_planner.simulation.work import Request, Work

_MEAN_PROMPT: Final = 4000
"""Tokens of a conversation's first prompt, on average."""
_MEAN_ADDED: Final = 2500
"""Tokens that each further turn adds, the answer before it included."""
_MEAN_OUTPUT: Final = 300
_MEAN_PAUSE: Final = 60.0
"""Seconds between two turns."""
_MEAN_TURNS: Final = 4


def from_trace(file: Path, *, speed: float, limit: int | None = None) -> list[Request]:
    """The requests of a trace, `speed` times as fast. Without prefix blocks in the trace, no two
    prompts share anything. Raises TraceError."""
    own = count(_UNSHARED)
    return [
        Request(
            a.at / speed,
            a.prompt_tokens,
            a.output_tokens,
            a.prefix_blocks or tuple(islice(own, ceil(a.prompt_tokens / BLOCK))),
        )
        for a in load_trace(file, limit=limit)
    ]


def spread(requests: Sequence[Request], seconds: float, seed: int) -> list[Request]:
    """`requests`, each up to `seconds` later at random, in order of time: a trace whose times are
    rounded has many at one instant, which never were."""
    random = Random(seed)
    moved = (request._replace(at=request.at + random.uniform(0.0, seconds)) for request in requests)
    return sorted(moved, key=lambda request: request.at)


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


def shared_prompts(
    number: int, *, prompt_tokens: int, shared: float, output_tokens: int
) -> Iterator[Request]:
    """`number` requests at once, of which the share `shared` of every prompt is the same."""
    common = int(prompt_tokens * shared) // BLOCK
    ids = count(common)
    for _ in range(number):
        own = [next(ids) for _ in range(ceil(prompt_tokens / BLOCK) - common)]
        yield Request(0.0, prompt_tokens, output_tokens, (*range(common), *own))


def body(work: Work, *, says_max_tokens: bool = True) -> bytes:
    """The request's JSON; equal blocks have equal text. `says_max_tokens`: whether it says the
    length that the answer will have.

    A token is four bytes of text on average, which is what the EPP assumes of every text; a block
    has up to a tenth more or less.
    """
    full, rest = divmod(work.prompt_tokens, BLOCK)
    parts = [_text(block, BLOCK) for block in work.blocks[:full]]
    # A prompt may be longer than its recorded blocks: the rest is its own.
    own = work.prompt_tokens - BLOCK * len(parts)
    is_recorded = rest and full < len(work.blocks)
    last = work.blocks[full] if is_recorded else _OWN + work.index
    parts.append(_text(last, own))
    prompt = b"".join(parts)
    limit = b',"max_tokens":%d' % work.output_tokens if says_max_tokens else b""
    return b'{"model":"m","stream":true,"prompt":"%b"%b}' % (prompt, limit)


def _text(block: int, tokens: int) -> bytes:
    """The text of a block's first `tokens` tokens, 16 bytes for 3.6 to 4.4 of them."""
    # A multiplicative hash: neighbouring ids get unrelated lengths.
    units = 115 + block * 2_654_435_761 % 2**32 * 27 // 2**32
    return ((b"%015d " % block) * (tokens * units // BLOCK + 1))[: tokens * units * 16 // BLOCK]


_UNSHARED: Final = 1_000_000_000
"""Ids from here on are those of prompts in traces without prefix blocks."""
_OWN: Final = 10_000_000
"""Ids from here on are those of prompts' ends that no trace records."""
