"""Differences of counters between two scrapes as samples."""

from dataclasses import replace

import pytest

from tandem_epp.estimates.engine_counters import CounterWindow
from tandem_epp.estimates.engine_figures import EngineCounters
from tandem_planner.prefill_fit import PrefillSample

START = EngineCounters(
    prefill_seconds=10.0, prefills=5.0, prefill_tokens=1000.0, computed_tokens=1000.0,
    itl_seconds=3.0, itls=100.0, transfer_bytes=1e6, transfer_seconds=1.0, transfers=2.0,
    generated_tokens=500.0,
)  # fmt: skip


def window() -> CounterWindow:
    made = CounterWindow()
    assert made.advance(START, 100.0) is None
    return made


def test_an_idle_engine_tells_the_duration_of_its_prefills() -> None:
    after = replace(START, prefill_seconds=10.4, prefills=7.0, prefill_tokens=1400.0)
    samples = window().advance(after, 101.0)
    assert samples is not None
    assert samples.prefill is not None
    assert samples.prefill == PrefillSample(2, 400.0, 80_000.0, after.prefill_seconds - 10.0)  # type: ignore[operator]


@pytest.mark.parametrize("seconds", [1.0, 6.0])
def test_where_prefills_may_overlap_nothing_is_known(seconds: float) -> None:
    after = replace(START, prefill_seconds=10.0 + seconds, prefills=9.0, prefill_tokens=3000.0)
    samples = window().advance(after, 101.0)
    assert samples is not None
    assert samples.prefill is None


def test_prompts_that_came_from_another_engine_say_nothing() -> None:
    after = replace(START, prefill_seconds=10.05, prefills=10.0, prefill_tokens=1005.0)
    samples = window().advance(after, 101.0)
    assert samples is not None
    assert samples.prefill is None


def test_itl_transfers_and_lengths_of_answers() -> None:
    after = replace(
        START, itl_seconds=5.0, itls=200.0, transfer_bytes=3e6, transfer_seconds=1.5, transfers=3.0,
        generated_tokens=800.0, prefills=8.0, computed_tokens=1500.0,
    )  # fmt: skip
    samples = window().advance(after, 101.0)
    assert samples is not None
    assert samples.itl == 0.02
    assert (samples.generated, samples.answers) == (300.0, 3.0)
    assert samples.transfer == (1.0, 2e6, 0.5)
    assert samples.tokens_per_second == 500.0


def test_a_short_window_and_a_restart_say_nothing() -> None:
    counters = window()
    after = replace(START, itl_seconds=5.0, itls=200.0)
    assert counters.advance(after, 100.1) is None
    counters.restart()
    assert counters.advance(EngineCounters(), 102.0) is None
    samples = counters.advance(EngineCounters(), 103.0)
    assert samples is not None
    assert (samples.prefill, samples.itl, samples.answers, samples.transfer) == (
        None, None, 0.0, None,
    )  # fmt: skip
