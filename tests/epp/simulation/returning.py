"""Conversations that go on after the caches of all pods were emptied, with and without knowledge of
what external storage has of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from statistics import fmean
from typing import Final

from tandem_planner.simulation.block_pool import BLOCK
from tandem_planner.simulation.engine import Engine
from tandem_planner.simulation.loop import Simulation
from tandem_planner.simulation.measures import Outcome, percentile
from tandem_planner.simulation.store import Store
from tandem_planner.simulation.work import Request

from .pods import CACHE_TOKENS, SPEED
from .real_picker import PickerSettings, RealPicker

_CONVERSATIONS: Final = 40
_FIRST_BLOCKS: Final = 39
"""Blocks of the first prompt of a conversation: 20,000 tokens."""
_ADDED_BLOCKS: Final = 2
_EMPTIED: Final = 60.0
"""Seconds after which the caches are emptied; the first turns have ended then."""
_OTHERS: Final = 80
"""Other requests, of one or two thousand tokens, while the conversations go on."""


@dataclass(frozen=True, slots=True)
class Returning:
    """What clients saw from the second turns on."""

    ttft: float
    """Mean of the conversations, in seconds."""
    ttft_p99: float
    others: float
    """p99 of the other requests' TTFT."""
    loaded: float
    """Share of the conversations' tokens that pods loaded."""


def returning(seed: int, bytes_per_second: float, *, knows_stores: bool) -> Returning:
    """Four pods, of which two share one store and two another; each store is as fast as
    `bytes_per_second`. Pods load where it pays, whether the picker knows of it or not."""
    stores = [Store(bytes_per_second) for _ in range(2)]
    pods = [
        Engine(SPEED, cache_tokens=CACHE_TOKENS, seed=seed * 10 + i, store=stores[i // 2])
        for i in range(4)
    ]
    settings = PickerSettings(has_exact_caches=True, knows_stores=knows_stores)
    simulation = Simulation(pods, RealPicker(pods, seed, settings))
    ids, first, second = count(), list[Request](), list[Request]()
    for i in range(_CONVERSATIONS):
        blocks = _blocks(ids, _FIRST_BLOCKS)
        first.append(_request(float(i), blocks))
        second.append(_request(_EMPTIED + i, (*blocks, *_blocks(ids, _ADDED_BLOCKS))))
    others = [_request(_EMPTIED + i / 2, _blocks(ids, 2 + i % 3)) for i in range(_OTHERS)]
    simulation.at(_EMPTIED, lambda: [pod.pool.forget() for pod in pods] and None)
    requests = sorted((*first, *second, *others), key=lambda request: request.at)
    return _returning(simulation.run(requests).served[_CONVERSATIONS:])


def _returning(served: Sequence[Outcome]) -> Returning:
    is_long = [each.work.prompt_tokens > BLOCK * _FIRST_BLOCKS for each in served]
    turns = [each for each, long in zip(served, is_long, strict=True) if long]
    others = [each.ttft for each, long in zip(served, is_long, strict=True) if not long]
    ttft = [each.ttft for each in turns]
    loaded = sum(each.work.loaded_tokens for each in turns)
    return Returning(
        fmean(ttft),
        percentile(ttft, 99),
        percentile(others, 99),
        loaded / sum(each.work.prompt_tokens for each in turns),
    )


def _blocks(ids: Iterator[int], number: int) -> tuple[int, ...]:
    return tuple(islice(ids, number))


def _request(at: float, blocks: tuple[int, ...]) -> Request:
    return Request(at, BLOCK * len(blocks), 50, blocks)
