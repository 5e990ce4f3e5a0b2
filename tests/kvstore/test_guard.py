"""The circuit breaker, the fits and the decision to load: pure."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_kvstore.errors import Reason
from tandem_kvstore.guard.breaker import Breaker, BreakerSettings, BreakerState
from tandem_kvstore.guard.load_guard import Decision, Hit, LoadGuard, Way
from tandem_kvstore.guard.missing_keys import MissingKeys
from tandem_kvstore.guard.rates import TwoTermFit

CHUNK, SIZE = 256, 32 << 20


@given(st.lists(st.tuples(st.sampled_from(["success", "failure", "probe"]), st.floats(0, 40))))
def test_the_breaker_never_stays_open(events: list[tuple[str, float]]) -> None:
    settings = BreakerSettings(failures=3, cool_down=1.0, longest=30.0, probe_timeout=5.0)
    breaker, now, in_a_row = Breaker(settings), 0.0, 0
    for kind, wait in events:
        now += wait
        was = breaker.state
        if kind == "probe":
            breaker.start_probe(now)
        elif kind == "success":
            breaker.record_success()
        else:
            breaker.record_failure(now)
        in_a_row = in_a_row + 1 if kind == "failure" else 0 if kind == "success" else in_a_row
        # It opens for failures in a row only.
        if was is BreakerState.CLOSED and breaker.state is BreakerState.OPEN:
            assert in_a_row >= 3
    # Whatever happened, after the longest cool-down a probe may start, and its success closes it.
    assert breaker.allows or breaker.start_probe(now + 30.0)
    breaker.record_success()
    assert breaker.allows


def test_a_fit_finds_delay_and_bandwidth() -> None:
    fit = TwoTermFit(0.005, 1 / 500e6)
    for size in (1e6, 4e6, 16e6, 64e6, 256e6) * 3:
        fit.observe(1, size, 0.02 + size / 1e9)
    assert abs(fit.predict(1, 32e6) / (0.02 + 0.032) - 1) < 0.05


def test_one_stall_does_not_make_a_store_look_slow() -> None:
    fit = TwoTermFit(0.005, 1 / 500e6)
    for size in (1e6, 4e6, 16e6) * 5:
        fit.observe(1, size, 0.01 + size / 1e9)
    before = fit.predict(1, 8e6)
    fit.observe(1, 8e6, 30.0)
    assert fit.predict(1, 8e6) < 2 * before


def guard(tokens_per_second: float, bytes_per_second: float) -> LoadGuard:
    learned = LoadGuard()
    for count in (1, 2, 4, 8) * 4:
        learned.observe_compute(count * CHUNK, 0, count * CHUNK / tokens_per_second)
        learned.observe_load(count * SIZE, 0.005 + count * SIZE / bytes_per_second, now=0.0)
    return learned


def decide(learned: LoadGuard, chunks: int, now: float, context: int = 0) -> Decision:
    """For an engine that cannot compute while it loads."""
    return learned.decide(Hit(chunks, CHUNK, SIZE, context), now)


def test_a_fast_store_is_used_whole_and_a_slow_one_not_at_all() -> None:
    fast = decide(guard(2_000, 5e9), 16, now=1.0)
    assert (fast.chunks, fast.reason) == (16, None)
    assert abs(fast.deadline / (0.5 * 16 * CHUNK / 2_000) - 1) < 0.1
    slow = decide(guard(100_000, 1e9), 16, now=1.0)
    assert (slow.chunks, slow.reason) == (0, Reason.UNPROFITABLE)
    # After a while one request tries again, and the next ones wait for what it learns.
    learned = guard(100_000, 1e9)
    assert decide(learned, 16, now=11.0).chunks == 16
    assert decide(learned, 16, now=11.1).chunks == 0


def test_98_percent_hits_at_1_7_times_the_run_time_are_computed() -> None:
    learned = LoadGuard(retry=1e9)
    learned.observe_compute(1000, 0, 1.0)
    size = 1 << 20
    # Each load of a hit took 1.7 times as long as computing its tokens.
    for chunks in (1, 4, 16) * 5:
        seconds = 1.7 * learned.compute_seconds(chunks * 256, 0)
        learned.observe_load(chunks * size, seconds, 0.0)
    for chunks in range(1, 17):
        decision = learned.decide(Hit(chunks, 256, size, 0), 1.0)
        assert (decision.chunks, decision.reason) == (0, Reason.UNPROFITABLE)


def test_what_does_not_fit_into_the_deadline_is_computed() -> None:
    # Loading takes 0.7 of computing: about half of it fits into the deadline of 0.5.
    decision = decide(guard(CHUNK / 0.1, SIZE / 0.07), 16, now=1.0)
    assert 7 <= decision.chunks <= 11


# Below four times the 8 chunks that `guard` has measured: larger loads are tried.
@given(st.floats(100, 1e6), st.floats(1e6, 1e11), st.integers(1, 31), st.integers(0, 100_000))
def test_a_decision_keeps_its_promises(
    tokens: float, bytes_: float, chunks: int, context: int
) -> None:
    learned = guard(tokens, bytes_)
    decision = decide(learned, chunks, now=1.0, context=context)
    compute = learned.compute_seconds(chunks * CHUNK, context)
    assert decision.deadline <= 0.5 * compute
    if decision.chunks:
        assert learned.loading.predict(1, decision.chunks * SIZE) <= decision.deadline
    else:
        assert decision.reason is Reason.UNPROFITABLE


def test_what_the_engine_has_of_the_first_chunk_is_no_gain() -> None:
    # A chunk is loaded in 0.035 s and computed in 0.128 s, its last 16 tokens in 0.008 s.
    learned = guard(2_000, SIZE / 0.03)
    assert learned.decide(Hit(1, CHUNK, SIZE, 0), 1.0).chunks == 1
    almost = Hit(1, CHUNK, SIZE, 0, cached=CHUNK - 16)
    assert learned.decide(almost, 1.0).reason is Reason.UNPROFITABLE
    several = replace(almost, chunks=8)
    decision = learned.decide(several, 1.0)
    saved = learned.compute_seconds(7 * CHUNK + 16, CHUNK - 16)
    assert (decision.chunks, decision.deadline) == (8, 0.5 * saved)
    # Computing chunks from the front takes as long as what is missing of them.
    _, seconds = learned.split(replace(almost, chunks=1, can_do_both=True), least=1)
    assert seconds == learned.compute_seconds(16, CHUNK - 16)


def test_misses_are_bounded_and_forgotten() -> None:
    missing = MissingKeys(capacity=3, seconds=5.0)
    for i in range(5):
        missing.add(str(i), now=float(i))
    assert len(missing) == 3
    assert [missing.has(str(i), now=5.0) for i in range(5)] == [False, False, True, True, True]
    assert not missing.has("4", now=9.5)
    missing.discard("3")
    assert not missing.has("3", now=5.0)


def decide_both(learned: LoadGuard, chunks: int, **fields: int) -> Decision:
    """For an engine that can."""
    hit = Hit(chunks, CHUNK, SIZE, 0, can_do_both=True)
    return learned.decide(replace(hit, **fields), now=1.0)


def test_each_way_is_chosen_where_it_is_fastest() -> None:
    # Loading takes a fifteenth, half and ten times of computing.
    fast, similar, slow = (guard(10_000, rate * SIZE / CHUNK) for rate in (150_000, 20_000, 1_000))
    assert decide_both(fast, 16).way is Way.LOAD
    assert decide_both(similar, 16).way is Way.BOTH
    assert decide_both(slow, 16).way is Way.COMPUTE
    # Many tokens follow the stored ones, and the store sends layer by layer.
    assert decide_both(fast, 16, groups=16, tail=CHUNK).way is Way.LAYERS
    assert decide_both(fast, 16, groups=1, tail=CHUNK).way is Way.LOAD
    assert decide_both(fast, 16, groups=16, tail=1).way is Way.LOAD
    # A third of the chunks is computed in the time that the others take to come.
    assert 5 <= decide_both(similar, 16).front <= 6


def test_kv_of_a_hand_off_is_loaded_whatever_is_predicted() -> None:
    slow = guard(100_000, 1e9)
    hit = Hit(8, CHUNK, SIZE, 0, groups=16, tail=1, can_do_both=True)
    assert slow.decide_hand_off(hit, 60.0) == Decision(8, 60.0)
    assert slow.decide_hand_off(replace(hit, tail=10_000), 60.0).way is Way.LAYERS
    for _ in range(5):
        slow.breaker.record_failure(0.0)
    assert slow.decide_hand_off(hit, 60.0).reason is Reason.BREAKER_OPEN


# Less than four times the 8 chunks that `guard` has measured: more are tried.
@given(st.floats(100, 1e6), st.floats(1e6, 1e11), st.integers(1, 31), st.integers(0, 100_000))
def test_doing_both_is_predicted_to_beat_either_alone(
    tokens: float, bytes_: float, chunks: int, context: int
) -> None:
    learned = guard(tokens, bytes_)
    decision = decide_both(learned, chunks, context=context)
    compute = learned.compute_seconds(chunks * CHUNK, context)
    load = learned.loading.predict(1, chunks * SIZE)
    if decision.way is Way.COMPUTE:
        assert decision.reason is Reason.UNPROFITABLE
    elif decision.way is Way.LOAD:
        assert load <= decision.deadline <= 0.5 * compute
    else:
        rear = learned.loading.predict(1, (chunks - decision.front) * SIZE)
        front = learned.compute_seconds(decision.front * CHUNK, context)
        assert max(front, rear) <= 0.8 * compute
        assert max(front, rear) <= load
        # Whatever the store does, computing waits for half of what it would compute instead.
        assert 0 < decision.max_wait <= 0.5 * (compute - front) * (1 + 1e-9)
    # Each hit that pays by a fourth or more is used.
    if load <= 0.75 * compute and chunks > 3 and compute > 0.1:
        assert decision.chunks == chunks


def test_a_store_is_tried_with_half_of_the_chunks_and_a_wait_for_half_of_that_half() -> None:
    slow = guard(100_000, 1e9)
    assert decide_both(slow, 8).reason is Reason.UNPROFITABLE
    hit = Hit(8, CHUNK, SIZE, 0, can_do_both=True)
    trial = slow.decide(hit, now=11.0)
    assert (trial.way, trial.chunks, trial.front) == (Way.BOTH, 8, 4)
    half = slow.compute_seconds(8 * CHUNK, 0) - slow.compute_seconds(4 * CHUNK, 0)
    assert trial.max_wait == 0.5 * half
    assert slow.decide(hit, now=11.1).reason is Reason.UNPROFITABLE


def test_slow_first_loads_do_not_keep_an_engine_from_a_fast_store() -> None:
    learned = LoadGuard()
    for _ in range(30):
        learned.observe_compute(2 * CHUNK, 0, 0.05)
    # The first load opens connections; the others take 10 ms for a chunk.
    learned.observe_slow_load(0, 0.06, now=0.0)
    for number in range(20):
        assert decide_both(learned, 2).chunks == 2
        learned.observe_load(SIZE, 0.01, now=number / 100)


def test_a_slow_store_is_tried_by_the_first_requests_only() -> None:
    learned = LoadGuard()
    for _ in range(30):
        learned.observe_compute(2 * CHUNK, 0, 0.05)
    tried = 0
    for number in range(30):
        tried += decide_both(learned, 2).chunks > 0
        # The first one is forgotten with the second; the eight do not start again.
        learned.observe_load(SIZE, 0.2 if number else 0.5, now=number / 100)
    assert tried == 8


@pytest.mark.parametrize("chunks", [2, 3, 4, 8, 32])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.42, 0.43, 0.45, 0.48, 0.5, 0.6, 0.7])
def test_a_store_that_is_faster_than_computing_is_used(chunks: int, share: float) -> None:
    learned, seconds = LoadGuard(), 0.02
    for count in (1, 2, 4, 8) * 8:
        learned.observe_compute(count * CHUNK, 0, count * seconds)
        learned.observe_load(count * SIZE, count * seconds * share, now=1.0)
    assert decide_both(learned, chunks).chunks == chunks


def test_an_unknown_store_is_used_as_the_prior_says() -> None:
    unknown = LoadGuard()
    unknown.observe_compute(1000, 0, 1.0)
    assert decide_both(unknown, 8).way is Way.LOAD
    for _ in range(30):
        unknown.observe_compute(1000, 0, 0.15)
    assert decide_both(unknown, 8).way is Way.BOTH


def test_a_stall_without_a_byte_says_nothing_of_the_rate() -> None:
    fit = TwoTermFit(0.005, 1 / 500e6)
    fit.observe(1, 0, 0.5)
    assert fit.b == 1 / 500e6
    assert fit.a > 0.4


def test_a_store_that_recovered_is_used_after_one_retry() -> None:
    slow = guard(tokens_per_second=10_000, bytes_per_second=20e6)
    assert decide(slow, 8, now=1.0).reason is Reason.UNPROFITABLE
    assert decide(slow, 8, now=11.0).chunks == 8
    slow.observe_load(8 * SIZE, 8 * SIZE / 4e9, now=11.1)
    assert decide(slow, 8, now=11.2).chunks == 8


def test_a_retry_that_is_slow_again_changes_nothing() -> None:
    slow = guard(tokens_per_second=10_000, bytes_per_second=20e6)
    assert decide(slow, 8, now=11.0).chunks == 8
    slow.observe_slow_load(SIZE, 0.1, now=11.1)
    assert decide(slow, 8, now=11.2).reason is Reason.UNPROFITABLE


def test_a_load_far_larger_than_any_before_is_tried_once() -> None:
    # A short load that its deadline ended says nothing of the rate at which many bytes come.
    learned = LoadGuard()
    for count in (1, 2, 4, 8):
        learned.observe_compute(count * CHUNK, 0, count * CHUNK / 10_000)
    assert decide(learned, 2, now=0.0).chunks == 2
    learned.observe_slow_load(0, 0.026, now=0.0)
    assert decide(learned, 2, now=0.1).reason is Reason.UNPROFITABLE
    assert decide(learned, 4, now=0.1).reason is Reason.UNPROFITABLE
    assert decide(learned, 8, now=0.1).chunks == 8
    assert decide(learned, 8, now=0.2).reason is Reason.UNPROFITABLE
    # It came in time: from now on all of that size are loaded.
    learned.observe_load(8 * SIZE, 0.05, now=0.2)
    assert decide(learned, 8, now=0.3).chunks == 8
    assert decide(learned, 32, now=0.4).chunks == 32


def test_larger_and_larger_loads_from_a_slow_store_are_tried_a_few_times_only() -> None:
    learned = guard(tokens_per_second=100_000, bytes_per_second=1e9)
    decisions = [decide(learned, count, now=1.0) for count in range(1, 1025)]
    assert sum(1 for decision in decisions if decision.chunks) <= 4
