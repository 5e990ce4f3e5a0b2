"""Prefills that overlap become one sample."""

from tandem_epp.estimates.busy_period import SAMPLE_TOKENS, BusyPeriod
from tandem_planner.prefill_fit import PrefillSample, prefill_sample


def test_a_prefill_alone_is_a_sample_at_once() -> None:
    busy = BusyPeriod()
    assert busy.add(1.0, 3.0, 100, 20, is_last=True) == [prefill_sample([(100, 20)], 2.0)]


def test_overlapping_prefills_share_their_time() -> None:
    busy = BusyPeriod()
    assert busy.add(1.0, 3.0, 100, 0, is_last=False) == []
    assert busy.add(2.0, 4.0, 100, 0, is_last=True) == [prefill_sample([(100, 0)] * 2, 3.0)]


def test_a_pause_ends_a_period() -> None:
    busy = BusyPeriod()
    busy.add(1.0, 3.0, 100, 0, is_last=False)
    assert busy.add(5.0, 6.0, 50, 0, is_last=True) == [
        prefill_sample([(100, 0)], 2.0),
        prefill_sample([(50, 0)], 1.0),
    ]


def test_a_long_period_is_cut_and_a_short_rest_says_nothing() -> None:
    busy = BusyPeriod()
    n = float(SAMPLE_TOKENS)
    assert busy.add(0.0, 2.0, n, 0, is_last=False) == [PrefillSample(1, n, n * n, 2.0)]
    assert busy.add(1.0, 5.0, n, 0, is_last=False) == [PrefillSample(1, n, n * n, 3.0)]
    assert busy.add(4.0, 5.5, 10, 0, is_last=True) == []
    assert busy.add(7.0, 8.0, 10, 0, is_last=True) == [PrefillSample(1, 10, 100, 1.0)]
