"""prefix-cache-affinity-filter beside token-load-scorer, as llm-d's guides list them."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tandem_contract.documents import DocumentError
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import Pod
from tandem_epp.choice.context import ChoiceContext
from tandem_epp.choice.scheduler import Scheduler
from tandem_epp.llmd.plugins.llmd_parameters import PrefixAffinityParameters
from tandem_epp.llmd.plugins.prefix_affinity import PrefixAffinityFilter
from tandem_epp.llmd.plugins.scorers import PrefixCacheScorer
from tandem_epp.process.configuration import load
from tandem_epp.request.inference import InferenceRequest

from .pods import discovered, make_pod

PROMPT = b"x" * 4 * 640
GUIDE = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: token-load-scorer
- type: inflight-load-producer
- type: approx-prefix-cache-producer
  parameters: {maxPrefixTokensToMatch: 40960}
- type: prefix-cache-affinity-filter
  parameters: %s
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: prefix-cache-affinity-filter
  - pluginRef: token-load-scorer
"""


class Trio:
    """Three pods, of which `warm` has a share of the prompt."""

    def __init__(self, share: float = 1.0) -> None:
        self.request = InferenceRequest("m", PROMPT)
        self.warm, self.cold, self.other = (make_pod(name) for name in ("warm", "cold", "other"))
        self.pods = [self.warm, self.cold, self.other]
        chain = self.request.chain
        self._prefixes = self.warm.prefixes
        self._prefixes.place(self.warm, chain[: int(share * len(chain))])

    def kept(self, **parameters: Any) -> list[str]:
        settings = PrefixAffinityParameters(**parameters)
        by = PrefixAffinityFilter(settings, PrefixCacheScorer(), Random(1))
        context = ChoiceContext(self.request, self._prefixes)
        return [pod.name for pod in by.keep(self.pods, context)]


ALL = ["warm", "cold", "other"]


def test_pods_with_most_of_the_prompt_are_kept() -> None:
    assert Trio(0.9).kept() == ["warm"]
    assert Trio(0.7).kept() == ALL
    assert Trio(0.7).kept(affinityThreshold=0.5) == ["warm"]
    assert Trio(1.0).kept(affinityThreshold=0.0) == ALL


@pytest.mark.parametrize(
    ("parameters", "limit"),
    [
        ({}, 286_704),
        ({"maxTTFTPenaltyMs": 1000.0, "peakPrefillThroughput": 500.0}, 500),
        ({"maxTTFTPenaltyMs": 0.0, "maxTokensInFlightPenalty": 300}, 300),
    ],
)
def test_warm_pods_are_left_when_they_are_too_far_behind(
    parameters: dict[str, float], limit: int
) -> None:
    trio = Trio()
    trio.cold.tokens_in_flight, trio.other.tokens_in_flight = 200, 100
    trio.warm.tokens_in_flight = 100 + limit
    assert trio.kept(**parameters) == ["warm"]
    trio.warm.tokens_in_flight += 1
    assert trio.kept(**parameters) == ALL


def test_a_penalty_of_0_keeps_warm_pods_whatever_they_have_to_compute() -> None:
    trio = Trio()
    trio.warm.tokens_in_flight = 10**9
    assert trio.kept(maxTTFTPenaltyMs=0.0) == ["warm"]


def test_some_requests_explore() -> None:
    trio = Trio()
    assert trio.kept(explorationProbability=1.0) == ALL
    assert trio.kept(explorationProbability=0.0) == ["warm"]


def scheduler(text: str, directory: Path) -> tuple[Scheduler, Fleet]:
    file = directory / "config.yaml"
    file.write_text(text)
    routing = load(file, {}, lists_backends=False).routing
    fleet = Fleet()
    fleet.apply(discovered(name, host) for host, name in enumerate("abc", 1))
    return Scheduler(fleet, routing, Random(7)), fleet


def test_the_configuration_of_llm_ds_guide_works_as_it_says(tmp_path: Path) -> None:
    text = GUIDE % (
        "{affinityThreshold: 0.80, maxTokensInFlightPenalty: 286720, maxTTFTPenaltyMs: 0}"
    )
    choice, fleet = scheduler(text, tmp_path)
    request = InferenceRequest("m", PROMPT)

    def chosen() -> Pod:
        context = ChoiceContext(request, fleet.prefixes)
        return choice.schedule(context, "m", None, 1.0).decode[0]

    first = chosen()
    fleet.prefixes.place(first, request.chain)
    first.tokens_in_flight = 100_000
    assert {chosen().name for _ in range(8)} == {first.name}
    first.tokens_in_flight = 286_721
    least = next(pod for pod in fleet if pod is not first)
    for pod in fleet:
        pod.tokens_in_flight += 10 if pod is not least else 0
    assert chosen() is least, "the pod with the fewest tokens in flight"


def test_milliseconds_may_be_the_epps_own_prediction() -> None:
    trio = Trio()
    # Tokens in flight do not count then, and what is queued counts in seconds of each pod.
    trio.warm.tokens_in_flight = 10**9
    assert trio.kept(ttftSource="latencyPredictor", maxTTFTPenaltyMs=1000.0) == ["warm"]
    seconds = trio.cold.estimates.prefill.best.seconds(trio.request.prompt_tokens, 0)
    trio.warm.estimates.queue.add(0.9 + seconds, 0.0)
    trio.warm.estimates.changed()
    assert trio.kept(ttftSource="latencyPredictor", maxTTFTPenaltyMs=1000.0) == ["warm"]
    trio.warm.estimates.queue.add(0.2, 0.0)
    trio.warm.estimates.changed()
    assert trio.kept(ttftSource="latencyPredictor", maxTTFTPenaltyMs=1000.0) == ALL
    assert trio.kept(ttftSource="latencyPredictor", maxTTFTPenaltyMs=0.0) == ["warm"]


def test_a_throughput_is_needed_only_for_milliseconds_of_tokens_in_flight(tmp_path: Path) -> None:
    for parameters in (
        "{ttftSource: latencyPredictor, peakPrefillThroughput: 0}",
        "{maxTTFTPenaltyMs: 0, maxTokensInFlightPenalty: 286720, peakPrefillThroughput: 0}",
    ):
        scheduler(GUIDE % parameters, tmp_path)
    with pytest.raises(DocumentError, match="peakPrefillThroughput must be above 0"):
        scheduler(GUIDE % "{peakPrefillThroughput: 0}", tmp_path)


def test_a_burst_that_it_names_learns_where_requests_went(tmp_path: Path) -> None:
    file = tmp_path / "epp.yaml"
    burst = "- {type: burst-prefix-cache-producer, name: burst}\nschedulingProfiles:"
    text = GUIDE % "{prefixMatchInfoProducerName: burst}"
    file.write_text(text.replace("schedulingProfiles:", burst))
    chooser = load(file, {}, lists_backends=False).routing.scheduling.chooser
    assert chooser is not None
    assert len(chooser.learners) == 1
