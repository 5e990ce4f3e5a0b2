"""A store whose loads take very different times: simulated requests, one after the other."""

import random
from collections.abc import Callable
from statistics import mean

import pytest

from tandem_kvstore.guard.load_guard import Decision, Hit, LoadGuard, Way

pytestmark = pytest.mark.long

CHUNKS, CHUNK_BYTES, COMPUTE = 8, 4 << 20, 0.055
"""Seconds to compute all chunks; each is computed in the same time."""


def two_times(fast: float) -> Callable[[random.Random], float]:
    """Loads of 22 ms, which are a share `fast` of all, and of 145 ms."""
    return lambda source: 0.022 if source.random() < fast else 0.145


def spread(median: float, sigma: float) -> Callable[[random.Random], float]:
    """Log-normal loads."""
    return lambda source: median * source.lognormvariate(0, sigma)


def request(guard: LoadGuard, decision: Decision, load: float, now: float) -> float:
    """Seconds to the first token, where all chunks would be loaded in `load` seconds; the guard
    learns as from the client."""
    if not decision.chunks:
        return COMPUTE
    front = COMPUTE * decision.front / CHUNKS
    count = CHUNKS - decision.front
    seconds = load * count / CHUNKS
    limit = decision.deadline
    if decision.way is Way.BOTH:
        limit = max(front, min(decision.deadline, front + decision.max_wait))
    if seconds <= limit:
        guard.observe_load(count * CHUNK_BYTES, seconds, now)
        return max(front, seconds)
    # The chunks that came in time are used, the others are computed.
    came = int(count * limit / seconds)
    guard.observe_slow_load(came * CHUNK_BYTES, limit, now)
    return limit + COMPUTE * (count - came) / CHUNKS


@pytest.mark.parametrize(
    "draw",
    [
        *(two_times(fast) for fast in (0.9, 0.7, 0.5, 0.3, 0.1)),
        *(spread(ms / 1000, sigma) for ms in (5, 20, 50, 80, 200) for sigma in (0.3, 0.6, 1.0)),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_store_that_varies_is_no_slower_than_the_better_of_both(
    draw: Callable[[random.Random], float], seed: int
) -> None:
    source, guard = random.Random(seed), LoadGuard()
    for _ in range(30):
        guard.observe_compute(CHUNKS * 256, 0, COMPUTE)
    hit = Hit(CHUNKS, 256, CHUNK_BYTES, 0, can_do_both=True)
    loads, times = [], []
    for number in range(500):
        now = number / 5
        loads.append(draw(source))
        times.append(request(guard, guard.decide(hit, now), loads[-1], now))
        assert times[-1] <= 1.51 * COMPUTE
    # The first ones learn.
    assert mean(times[50:]) <= 1.15 * min(mean(loads[50:]), COMPUTE)
