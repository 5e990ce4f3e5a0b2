"""How long the steps of the paced engine last."""

import pytest
from benchmarks.paced_engine import PER_PAIR, PER_TOKEN, STEP, step_seconds


def test_a_step_lasts_by_its_tokens_and_by_what_they_attend_to() -> None:
    assert step_seconds([]) == STEP
    whole = step_seconds([(0, 1000)])
    assert whole == pytest.approx(STEP + 1000 * PER_TOKEN + 1_000_000 * PER_PAIR)
    # In two chunks only the time of the second step is added; a longer context takes longer.
    assert step_seconds([(0, 500)]) + step_seconds([(500, 1000)]) == pytest.approx(whole + STEP)
    assert step_seconds([(500, 1000)]) > step_seconds([(0, 500)])
    assert step_seconds([(0, 1), (7, 8)]) > step_seconds([(0, 1)])
