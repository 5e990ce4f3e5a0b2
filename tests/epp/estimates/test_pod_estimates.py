"""What the estimates of a pod take from its metrics."""

import pytest

from tandem_epp.estimates.engine_figures import EngineCounters, Gauges
from tandem_epp.estimates.pod_estimates import PodEstimates


def test_the_length_of_answers_counts_the_tokens_of_windows_in_which_none_ends() -> None:
    estimates = PodEstimates()
    for second in range(41):
        # Ten tokens per second, and an answer every ten seconds.
        counters = EngineCounters(generated_tokens=10.0 * second, prefills=float(second // 10))
        estimates.on_counters(counters, Gauges(running=1.0), None, float(second))
    assert estimates.answers.average == pytest.approx(100.0)
