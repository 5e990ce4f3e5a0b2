"""The simulated engine: what it computes, caches and batches."""

from .engine import BLOCK, BUDGET, STEP, Engine, PrefixCache, Work


def engine(rate: float = 10_000.0) -> Engine:
    return Engine(rate=rate, cache_tokens=100 * BLOCK, seed=1)


def work(index: int, blocks: range, *, arrived: float = 0.0, output: int = 1) -> Work:
    return Work(index, arrived, len(blocks) * BLOCK, output, tuple(blocks))


def finish(pod: Engine) -> None:
    pod.advance(1e9)
    assert not pod.running
    assert not pod.waiting


def test_a_prompt_takes_its_tokens_at_the_rate() -> None:
    pod, request = engine(), work(0, range(20))
    pod.add(request)
    finish(pod)
    assert request.first_token is not None
    # A noise of 10 % on each step, and the attention of 10,000 tokens.
    assert 0.9 < request.first_token / (20 * BLOCK / 10_000) < 1.3


def test_a_cached_prefix_is_not_computed_again() -> None:
    pod = engine()
    first, second = work(0, range(20)), work(1, range(21), arrived=100.0)
    pod.add(first)
    pod.advance(100.0)
    pod.add(second)
    finish(pod)
    assert (first.hit_tokens, second.hit_tokens) == (0, 20 * BLOCK)
    assert second.first_token is not None
    assert second.first_token - 100.0 < 0.2


def test_a_whole_prompt_in_the_cache_computes_its_last_token() -> None:
    pod = engine()
    again = work(1, range(4), arrived=100.0)
    pod.add(work(0, range(4)))
    pod.advance(100.0)
    pod.add(again)
    finish(pod)
    assert again.hit_tokens == again.prompt_tokens - 1


def test_prompts_are_computed_in_the_order_of_their_arrival() -> None:
    pod, long, short = engine(), work(0, range(50)), work(1, range(100, 101))
    pod.add(long)
    pod.add(short)
    changes = pod.advance(1e9)
    assert [change.work.index for change in changes if not change.is_end] == [0, 1]
    assert [change.time for change in changes] == sorted(change.time for change in changes)


def test_a_long_prefill_slows_the_decodes_beside_it() -> None:
    alone, beside = work(0, range(1), output=20), work(0, range(1), output=20)
    pod = engine()
    pod.add(alone)
    finish(pod)
    pod = engine()
    pod.add(beside)
    pod.add(work(1, range(100, 150)))
    finish(pod)
    assert alone.ended is not None
    assert beside.ended is not None
    assert beside.ended > alone.ended + BUDGET / 10_000


def test_decode_steps_take_no_prompt_time() -> None:
    pod, request = engine(), work(0, range(1), output=101)
    pod.add(request)
    finish(pod)
    assert request.first_token is not None
    assert request.ended is not None
    assert 100 * STEP <= request.ended - request.first_token < 110 * STEP


def test_the_cache_drops_the_end_of_the_oldest_prompt_first() -> None:
    cache = PrefixCache(5 * BLOCK)
    cache.use([1, 2, 3])
    cache.use([7, 8, 9])
    assert cache.match([1, 2, 3]) == 2 * BLOCK
    assert cache.match([7, 8, 9]) == 3 * BLOCK
    assert cache.match([2]) == BLOCK
