"""Every scorer's range, direction, ties and missing data, as its docstring says."""

import pytest

from tandem_contract.config import Backend
from tandem_contract.paths import Role
from tandem_epp.backends.adapters import AdapterSlots
from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.backends.pods import Pod
from tandem_epp.choice.context import ChoiceContext
from tandem_epp.estimates.engine_figures import Gauges
from tandem_epp.llmd.plugins.profile import Scorer
from tandem_epp.llmd.plugins.scorers import (
    ActiveRequestScorer,
    KvCacheUtilizationScorer,
    LoadAwareScorer,
    LoraAffinityScorer,
    PrefixCacheScorer,
    QueueScorer,
    RunningRequestsSizeScorer,
    TokenLoadScorer,
)
from tandem_epp.request.inference import InferenceRequest

NOTHING = ChoiceContext(None)


def pod(gauges: Gauges | None = None, *, weight: int = 1, role: Role = Role.UNIFIED) -> Pod:
    scored_pod = Pod(
        Backend(name=str(id(gauges)), url="http://127.0.0.1:1", weight=weight, role=role)
    )
    if gauges is not None:
        scored_pod.apply_scrape(ScrapeResult(gauges, b""))
    return scored_pod


@pytest.mark.parametrize(
    ("scorer", "gauge"), [(QueueScorer(), "waiting"), (RunningRequestsSizeScorer(), "running")]
)
def test_loads_are_normalized_between_lowest_and_highest(scorer: Scorer, gauge: str) -> None:
    loads = [pod(Gauges(**{gauge: load})) for load in (0.0, 1.0, 4.0)]
    assert scorer.score(loads, NOTHING) == [1, 0.75, 0]
    assert scorer.score([pod(Gauges(**{gauge: 4.0}))] * 2, NOTHING) == [1, 1]
    assert scorer.score([pod(Gauges(**{gauge: 4.0})), pod(None)], NOTHING) == [0, 1]
    heavy = [pod(Gauges(**{gauge: 4.0}), weight=4), pod(Gauges(**{gauge: 2.0}))]
    assert scorer.score(heavy, NOTHING) == [1, 0]
    assert scorer.score([], NOTHING) == []


def test_kv_usage_is_not_compared_with_other_backends() -> None:
    pods = [pod(Gauges(kv_usage=0.25)), pod(None)]
    assert KvCacheUtilizationScorer().score(pods, NOTHING) == [0.75, 1]


def test_lora_affinity_compares_only_requests_for_an_adapter() -> None:
    pods = [pod(Gauges()) for _ in range(3)]
    scorer = LoraAffinityScorer()
    request = ChoiceContext(InferenceRequest("x", b""))
    assert scorer.score(pods, request) == [1, 1, 1], "no backend has it"
    for each, running in zip(pods, ("x", "ab", "a"), strict=True):
        each.adapters.apply(AdapterSlots(frozenset(running), slots=2))
    assert scorer.score(pods, request) == [1, 0, 0.8]
    assert scorer.score(pods, NOTHING) == [1, 1, 1]


def test_in_flight_is_relative_to_the_highest_count() -> None:
    pods = [pod(), pod(), pod(weight=2)]
    scorer = ActiveRequestScorer()
    assert scorer.score(pods, NOTHING) == [1, 1, 1]
    for busy, count in zip(pods, (0, 4, 4), strict=True):
        busy.in_flight = count
    assert scorer.score(pods, NOTHING) == [1, 0, 0.5]


def test_idle_backends_score_best_and_busy_ones_below_a_limit() -> None:
    pods = [pod() for _ in range(4)]
    for each, count in zip(pods, (0, 2, 3, 6), strict=True):
        each.in_flight = count
    scorer = ActiveRequestScorer(idle_threshold=2, max_busy_score=0.5)
    assert scorer.score(pods, NOTHING) == [1, 1, 0.25, 0]
    assert scorer.score(pods[:2], NOTHING) == [1, 1]


def test_load_aware_scores_do_not_depend_on_the_other_backends() -> None:
    scorer = LoadAwareScorer(threshold=8)
    pods = [pod(Gauges(waiting=waiting)) for waiting in (0.0, 2.0, 8.0, 100.0)]
    assert scorer.score(pods, NOTHING) == [0.5, 0.375, 0, 0]
    assert scorer.score(pods[1:2], NOTHING) == [0.375]
    assert scorer.score([pod(None), pod(Gauges(waiting=4.0), weight=2)], NOTHING) == [0.5, 0.375]
    assert LoadAwareScorer().score([pod(Gauges(waiting=64.0))], NOTHING) == [0.25]


def test_token_load_counts_what_is_to_be_computed_with_this_request() -> None:
    request = InferenceRequest("m", b"x" * 4 * 64)
    pods = [pod(), pod(), pod(weight=2)]
    pods[1].tokens_in_flight, pods[2].tokens_in_flight = 96, 64
    scorer = TokenLoadScorer(threshold=128)
    assert scorer.score(pods, ChoiceContext(request)) == [0.5, 0, 0.5]
    assert scorer.score(pods, NOTHING) == [1, 0.25, 0.75]
    prefixes = pods[0].prefixes
    prefixes.place(pods[0], request.chain)
    assert scorer.score(pods[:1], ChoiceContext(request, prefixes)) == [1]


def test_a_match_scores_by_its_length_too() -> None:
    request = InferenceRequest("m", b"x" * 4 * 64)
    warm, cold = pod(), pod()
    warm.prefixes.place(warm, request.chain[:2])
    context = ChoiceContext(request, warm.prefixes)
    half = PrefixCacheScorer(length_weight=0.5, scale_tokens=64)
    assert half.score([warm, cold], context) == [0.5 * 0.5 + 0.5 * 0.25, 0]
    assert PrefixCacheScorer(1.0, scale_tokens=16).score([warm], context) == [1]


def test_a_match_counts_up_to_a_number_of_tokens() -> None:
    request = InferenceRequest("m", b"x" * 4 * 64)
    whole, half = pod(), pod()
    prefixes = whole.prefixes
    prefixes.place(whole, request.chain)
    prefixes.place(half, request.chain[:2])
    context = ChoiceContext(request, prefixes)
    assert PrefixCacheScorer(max_tokens=32).score([whole, half], context) == [1, 1]
    assert PrefixCacheScorer(max_tokens=48).score([whole, half], context) == [1, 32 / 48]


def test_prefix_hits_are_shares_of_the_prompt_in_each_backends_own_blocks() -> None:
    request = InferenceRequest("m", b"x" * 256)
    fine = Pod(Backend(name="fine", url="http://127.0.0.1:1"), block_tokens=16)
    coarse = Pod(Backend(name="coarse", url="http://127.0.0.1:2"), block_tokens=32)
    cold = Pod(Backend(name="cold", url="http://127.0.0.1:3"))
    prefixes = fine.prefixes
    for warm in (fine, coarse):
        prefixes.place(warm, request.chain[:3])
    context = ChoiceContext(request, prefixes)
    pods = [fine, coarse, cold]
    assert PrefixCacheScorer().score(pods, context) == [0.75, 0.5, 0]
    assert [context.cached_tokens(pod) for pod in pods] == [0, 0, 0]
    prefixes.confirm(prefixes.place(coarse, request.chain))
    again = ChoiceContext(request, prefixes)
    assert [again.cached_tokens(pod) for pod in pods] == [0, 64, 0]
    assert PrefixCacheScorer().score(pods, ChoiceContext(request)) == [0, 0, 0]
    assert PrefixCacheScorer().score(pods, NOTHING) == [0, 0, 0]
