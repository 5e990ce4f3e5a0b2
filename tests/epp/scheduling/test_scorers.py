"""Every scorer's range, direction, ties and missing data, as its docstring says."""

from math import inf

import pytest

from tandem_contract.config import Backend
from tandem_contract.paths import Role
from tandem_epp.backends.adapters import AdapterSlots
from tandem_epp.backends.engine_page import Gauges, ScrapeResult
from tandem_epp.backends.pods import Pod
from tandem_epp.request import InferenceRequest
from tandem_epp.scheduling.profile import Scorer, ScoringContext
from tandem_epp.scheduling.scorers import (
    ActiveRequestScorer,
    KvCacheUtilizationScorer,
    LoraAffinityScorer,
    PrefixCacheScorer,
    QueueScorer,
    RoleFilter,
    RunningRequestsSizeScorer,
)

NOTHING = ScoringContext(None)


def pod(gauges: Gauges | None = None, *, weight: int = 1, role: Role = Role.UNIFIED) -> Pod:
    scored_pod = Pod(
        Backend(name=str(id(gauges)), url="http://127.0.0.1:1", weight=weight, role=role)
    )
    if gauges is not None:
        scored_pod.apply_scrape(ScrapeResult(gauges, b""))
    return scored_pod


def test_roles() -> None:
    pods = [pod(role=role) for role in (Role.UNIFIED, Role.PREFILL, Role.DECODE)]
    assert RoleFilter(Role.DECODE).score(pods, NOTHING) == [0, -inf, 0]
    assert RoleFilter(Role.PREFILL).score(pods, NOTHING) == [0, 0, -inf]


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
    request = ScoringContext(InferenceRequest("x", b""))
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


def test_prefix_hits_are_shares_of_the_prompt_in_each_backends_own_blocks() -> None:
    request = InferenceRequest("m", b"x" * 256)
    fine = Pod(Backend(name="fine", url="http://127.0.0.1:1"), block_tokens=16)
    coarse = Pod(Backend(name="coarse", url="http://127.0.0.1:2"), block_tokens=32)
    cold = Pod(Backend(name="cold", url="http://127.0.0.1:3"))
    prefixes = fine.prefixes
    for warm in (fine, coarse):
        prefixes.place(warm, request.chain[:3])
    context = ScoringContext(request, prefixes)
    pods = [fine, coarse, cold]
    assert PrefixCacheScorer().score(pods, context) == [0.75, 0.5, 0]
    assert [context.cached_tokens(pod) for pod in pods] == [0, 0, 0]
    prefixes.confirm(prefixes.place(coarse, request.chain))
    again = ScoringContext(request, prefixes)
    assert [again.cached_tokens(pod) for pod in pods] == [0, 64, 0]
    assert PrefixCacheScorer().score(pods, ScoringContext(request)) == [0, 0, 0]
    assert PrefixCacheScorer().score(pods, NOTHING) == [0, 0, 0]
