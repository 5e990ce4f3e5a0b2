"""llm-d's plugins that choose by predicted latencies, on the EPP's own predictions."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tandem_epp.backends.pods import Pod
from tandem_epp.choice.context import ChoiceContext
from tandem_epp.llmd.plugins.latency_parameters import LatencyScorerParameters, TierParameters
from tandem_epp.llmd.plugins.predicted_latency import (
    LatencyScorer,
    TierFilter,
    headroom,
    predicted_itl,
    predicted_ttft,
)
from tandem_epp.process.configuration import load
from tandem_epp.request.inference import InferenceRequest

from .pods import make_pod

REQUEST = InferenceRequest("m", b"x" * 4000)
CHART = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: predicted-latency-producer
- {name: strict, type: prefix-cache-affinity-filter,
   parameters: {affinityThreshold: 0.99, ttftSource: latencyPredictor, maxTTFTPenaltyMs: 5000}}
- {name: loose, type: prefix-cache-affinity-filter,
   parameters: {affinityThreshold: 0.8, ttftSource: latencyPredictor, maxTTFTPenaltyMs: 5000}}
- type: latency-scorer
- type: weighted-random-picker
- type: slo-headroom-tier-filter
- type: latency-slo-admitter
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: predicted-latency-producer
  - pluginRef: strict
  - pluginRef: slo-headroom-tier-filter
  - pluginRef: loose
  - pluginRef: latency-scorer
  - pluginRef: weighted-random-picker
"""
"""The plugins that llm-d's chart lists with its latency predictor."""


def queued(seconds: float, decodes: int = 0) -> Pod:
    """A pod with prefills of `seconds` before the next one, and decodes."""
    pod = make_pod(f"{seconds}-{decodes}")
    pod.in_flight = 1
    pod.estimates.queue.add(seconds, 0.0)
    pod.estimates.decodes = decodes
    pod.estimates.changed()
    return pod


def context(ttft: float | None = None, itl: float | None = None, **rest: Any) -> ChoiceContext:
    """A request with targets in milliseconds."""
    headers = {"x-llm-d-slo-ttft-ms": ttft, "x-slo-tpot-ms": itl}
    given = {name: str(value) for name, value in headers.items() if value is not None}
    return ChoiceContext(REQUEST, headers=given, **rest)


def scores(pods: list[Pod], asked: ChoiceContext, **parameters: Any) -> list[float]:
    return LatencyScorer(LatencyScorerParameters(**parameters), 1.0).score(pods, asked)


def test_headroom_is_what_the_prediction_leaves_of_the_target() -> None:
    pod = queued(1.0, decodes=7)
    prefill = pod.estimates.prefill.best.seconds(REQUEST.prompt_tokens, 0)
    assert predicted_ttft(pod, context()) == pytest.approx(1.0 + prefill)
    step, slope = pod.estimates.best_decode
    assert predicted_itl(pod) == pytest.approx(step + 8 * slope)
    room = headroom(pod, context(2000.0, 50.0), 0.8)
    assert room.ttft == pytest.approx(2000.0 - 1000 * (1.0 + prefill))
    assert room.itl == pytest.approx(40.0 - 1000 * (step + 8 * slope))
    assert headroom(pod, context(peer=pod)).itl == 0.0, "a pod that prefills has no ITL"
    nothing = ChoiceContext(None, headers={"x-slo-ttft-ms": "soon"})
    assert headroom(pod, nothing).ttft == 0.0


def test_pods_that_meet_both_targets_are_kept_but_for_few_requests() -> None:
    fast, late, slow = queued(0.1), queued(3.0), queued(0.1, decodes=1000)
    pods = [fast, late, slow]
    asked = context(2000.0, 50.0)
    never, always = TierParameters(epsilonExploreNeg=0.0), TierParameters(epsilonExploreNeg=1.0)
    assert TierFilter(never, 1.0, Random(1)).keep(pods, asked) == [fast]
    assert TierFilter(always, 1.0, Random(1)).keep(pods, asked) == [late, slow]
    assert TierFilter(never, 1.0).keep([late, slow], asked) == [late, slow]
    assert TierFilter(never, 1.0).keep(pods, context()) is pods, "no targets"


def test_of_pods_that_meet_the_targets_the_closest_is_the_best_or_the_farthest() -> None:
    pods = [queued(0.1), queued(1.0), queued(3.0)]
    far, close, miss = scores(pods, context(2000.0, 50.0))
    assert close > far > miss == 0.0
    far, close, miss = scores(pods, context(2000.0, 50.0), headroomSelectionStrategy="most")
    assert far > close > miss == 0.0


def test_without_targets_the_least_predictions_are_the_best() -> None:
    pods = [queued(0.1), queued(1.0), queued(3.0)]
    best, middle, worst = scores(pods, context())
    assert (best, worst) == (1.01, 0.01)
    assert best > middle > worst
    even = [queued(1.0, decodes=5), queued(1.0)]
    more, fewer = scores(even, context())
    assert fewer > more, "equal TTFT leaves the choice to the ITL"


def test_where_no_pod_meets_the_targets_some_misses_are_better() -> None:
    idle, late = queued(9.0), queued(3.0)
    idle.in_flight = 0
    assert scores([idle, late], context(100.0, 50.0))[1] == 0.0
    slow = queued(0.0, decodes=10_000)
    assert scores([late, slow], context(1000.0, 50.0))[0] == 0.0, "TTFT matters more"


def test_the_configuration_of_llm_ds_chart_loads(tmp_path: Path) -> None:
    file = tmp_path / "epp.yaml"
    file.write_text(CHART)
    assert load(file, {}, lists_backends=False).routing.scheduling.chooser is not None
