"""The model of a pod: durations, batching, the prefix cache and preemption."""

import pytest

from tandem_planner.kv_size import KvSize
from tandem_planner.simulation.block_pool import BLOCK
from tandem_planner.simulation.engine import BATCHING, Batching, Engine
from tandem_planner.simulation.link import Link
from tandem_planner.simulation.store import Store
from tandem_planner.simulation.work import Work
from tandem_planner.step_cost import LinearStep
from tandem_planner.transfer import TransferCost

_SPEED = LinearStep(0.008, 1e-4, 2e-8, 1e-4, 2.5e-10)


def engine(*, blocks: int = 100) -> Engine:
    return Engine(_SPEED, cache_tokens=blocks * BLOCK, seed=1)


def work(index: int, blocks: range, *, arrived: float = 0.0, output: int = 1) -> Work:
    return Work(index, arrived, len(blocks) * BLOCK, output, tuple(blocks))


def finish(pod: Engine) -> None:
    pod.advance(1e9)
    assert not pod.running
    assert not pod.waiting
    # Nothing is used any more, whatever happened to the requests.
    assert (pod.pool.used, pod.context) == (0, 0)


def test_a_prompt_takes_its_tokens_at_the_rate() -> None:
    pod, request = engine(), work(0, range(20))
    pod.add(request)
    finish(pod)
    assert request.first_token is not None
    # A noise of 10 % on each step.
    assert 0.9 < request.first_token / engine().prefill_seconds(0, 20 * BLOCK) < 1.1
    assert request.first_token > 20 * BLOCK * _SPEED.per_token * 0.9


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


def test_what_another_pod_computed_is_loaded_if_that_takes_at_most_half_as_long() -> None:
    for rate, loaded in ((10e9, 20 * BLOCK), (1e9, 0)):
        store = Store(rate)
        first, second = (
            Engine(_SPEED, cache_tokens=100 * BLOCK, seed=1, store=store) for _ in range(2)
        )
        first.add(work(0, range(20)))
        finish(first)
        request, other = work(1, range(21), output=20), work(2, range(50, 60), output=20)
        second.add(request)
        second.add(other)
        finish(second)
        assert (request.loaded_tokens, request.hit_tokens) == (loaded, loaded)
        assert second.totals["loaded_tokens"] == loaded
        assert request.first_token is not None
        assert other.first_token is not None
        # It waits for its load, and the other one does not.
        assert request.first_token >= store.seconds(loaded)
        assert not loaded or other.first_token < engine().prefill_seconds(0, 31 * BLOCK)


def test_a_prompt_finds_what_the_one_before_it_in_the_queue_computed() -> None:
    pod, first, second = engine(), work(0, range(20)), work(1, range(20))
    pod.add(first)
    pod.add(second)
    finish(pod)
    assert second.hit_tokens > 0


def test_a_whole_prompt_in_the_cache_computes_its_last_token() -> None:
    pod = engine()
    again = work(1, range(4), arrived=100.0)
    pod.add(work(0, range(4)))
    pod.advance(100.0)
    pod.add(again)
    finish(pod)
    assert again.hit_tokens == again.prompt_tokens - 1


def test_a_prompt_whose_kv_was_transferred_computes_its_last_token() -> None:
    pod, request = engine(), work(0, range(40))
    request.is_remote = True
    pod.add(request)
    finish(pod)
    assert request.first_token is not None
    assert request.first_token < 2 * _SPEED.fixed
    assert pod.totals["computed_tokens"] == 1


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
    assert alone.itl is not None
    assert beside.itl is not None
    assert beside.itl > alone.itl + BATCHING.budget * _SPEED.per_token / 20


def test_without_chunks_decodes_wait_for_whole_prompts() -> None:
    pod = Engine(
        _SPEED, cache_tokens=100 * BLOCK, seed=1, batching=Batching(is_chunked=False), noise=0.0
    )
    answer, prompt = work(0, range(1), output=20), work(1, range(50, 90))
    pod.add(answer)
    pod.advance(1e-3)
    pod.add(prompt)
    finish(pod)
    stall = _SPEED.seconds(0, 0, 40 * BLOCK, (40.0 * BLOCK) ** 2)
    # One of the answer's gaps is the whole prompt, the others are decode steps.
    assert sum(count for _, count in pod.gaps) == 19
    longest = max(seconds for seconds, count in pod.gaps if count)
    assert longest == pytest.approx(stall + _SPEED.seconds(1, 512), rel=1e-3)
    assert min(seconds for seconds, count in pod.gaps if count) < 2 * _SPEED.fixed


def test_a_transfer_takes_its_blocks_when_it_begins() -> None:
    link = Link(TransferCost(0.5, 1e-9), KvSize(100_000.0))
    pod = Engine(_SPEED, cache_tokens=30 * BLOCK, seed=1, link=link, noise=0.0)
    first, second = work(0, range(20), output=2), work(1, range(50, 70), output=2)
    for each in (first, second):
        each.is_remote = True
        pod.add(each)
    pod.advance(0.1)
    assert pod.pool.used == 20 * BLOCK
    finish(pod)
    seconds = link.cost.seconds(20 * BLOCK * 100_000.0)
    assert first.first_token == pytest.approx(seconds + _SPEED.fixed, rel=0.01)
    # There was no room for both.
    assert second.first_token is not None
    assert first.ended is not None
    assert second.first_token > first.ended + seconds
    assert link.busy == pytest.approx(2 * seconds)


def test_a_streamed_transfer_moves_within_the_prefill() -> None:
    link = Link(TransferCost(0.0, 1e-9), KvSize(1e6), streamed=0.9)
    prompt = work(0, range(2))
    prompt.prefill_seconds = 10.0
    assert link.receive(prompt, 1000, now=5.0) == pytest.approx(5.1)
    prompt.prefill_seconds = 0.5
    assert link.receive(prompt, 1000, now=5.1) == pytest.approx(5.6)


def test_decodes_slow_each_other() -> None:
    def itl(decodes: int) -> float:
        pod = engine()
        works = [work(i, range(1), output=101) for i in range(decodes)]
        for each in works:
            pod.add(each)
        finish(pod)
        assert works[0].itl is not None
        return works[0].itl

    assert itl(40) > itl(1) + 35 * _SPEED.per_decode


def test_a_request_that_does_not_fit_waits() -> None:
    pod = engine(blocks=12)
    first, second = work(0, range(8), output=50), work(1, range(20, 28))
    pod.add(first)
    pod.add(second)
    finish(pod)
    assert first.ended is not None
    assert second.started is not None
    assert second.started >= first.ended
    assert pod.totals["preemptions"] == 0


def test_an_answer_that_outgrows_the_cache_costs_another_request_its_kv() -> None:
    pod = engine(blocks=10)
    first, second = work(0, range(4), output=1500), work(1, range(20, 24), output=1500)
    pod.add(first)
    pod.add(second)
    finish(pod)
    assert first.preemptions == 0
    assert second.preemptions > 0
    assert second.ended is not None
    assert pod.totals["generated_tokens"] == 3000
    computed = pod.totals["computed_tokens"]
    assert computed is not None
    assert computed > 8 * BLOCK


def test_counters_describe_requests_that_ended() -> None:
    pod = engine()
    pod.add(work(0, range(20), output=100))
    pod.advance(1.5)
    assert (pod.totals["prefills"], pod.totals["computed_tokens"]) == (0, 20 * BLOCK)
    finish(pod)
    assert pod.totals["prefills"] == 1
    assert pod.totals["prefill_tokens"] == 20 * BLOCK
