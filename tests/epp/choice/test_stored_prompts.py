"""Requests whose prompt is in external storage: by cost and by scores."""

import json
from random import Random

import pytest

from tandem_contract.config import Backend, DisaggregatedServing, ExternalStorage
from tandem_contract.documents import parse_documents
from tandem_contract.paths import Role, RoutingPath
from tandem_contract.request_kinds import RequestKind
from tandem_contract.trace import GPU_HOT, STORAGE_WARM, kv_tier
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend
from tandem_epp.choice.context import ChoiceContext
from tandem_epp.choice.result import SchedulingResult
from tandem_epp.choice.scheduler import Scheduler
from tandem_epp.llmd.plugins.config import load_routing
from tandem_epp.prefix.blocks import BlockMatch
from tandem_epp.prefix.kv_events.collector import PreciseMatch
from tandem_epp.prefix.kv_events.feed import Knowledge
from tandem_epp.request.inference import parse_request

STORE = ExternalStorage("file:///kv")
TOKENS, STORED = 4000, 3840
SCORES = {
    "plugins": [
        {"type": "active-request-scorer"},
        {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": 1}},
    ]
}


def _schedule(
    plugins: dict[str, object], stored: int, token_bytes: float = 1000.0, *, gpu: bool = False
) -> SchedulingResult:
    """A prompt of which the store of two pods has the first `stored` tokens; `gpu`: it is also in
    the memory of the pod that decodes."""
    fleet = Fleet()
    fleet.stores.is_enabled, fleet.stores.default = True, STORE
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    fleet.apply(
        DiscoveredBackend(Backend(name=name, url=f"http://10.0.0.{i}:8000", role=role))
        for i, (name, role) in enumerate(roles.items(), 1)
    )
    for pod in fleet:
        assert pod.estimates.loads is not None
        pod.estimates.loads.add_size(1.0, token_bytes)
    document = parse_documents("{}", "test")[0]
    routing = load_routing(document, plugins, DisaggregatedServing(enabled=True))
    request = parse_request(RequestKind.COMPLETIONS, json.dumps({"prompt": "word " * 99}).encode())
    request.set_length(TOKENS)
    if gpu:
        decode = fleet.find("d")
        assert decode is not None
        fleet.prefixes.confirm(fleet.prefixes.place(decode, request.chain))
    in_store = dict.fromkeys(roles, stored) if stored else {}
    precise = PreciseMatch(TOKENS, BlockMatch({}), {"p": Knowledge.WHOLE}, in_store)
    context = ChoiceContext(request, fleet.prefixes, precise, now=100.0)
    return Scheduler(fleet, routing, Random(0)).schedule(context, None, None, 100.0)


@pytest.mark.parametrize("plugins", [{}, SCORES], ids=["cost", "scores"])
def test_a_prompt_in_storage_needs_no_prefill_pod(plugins: dict[str, object]) -> None:
    result = _schedule(plugins, STORED)
    assert result.decision == (RoutingPath.FAST_DECODE, "stored")
    assert ([pod.name for pod in result.decode], list(result.prefill)) == (["d"], [])
    assert kv_tier(result.cached_tokens, result.loaded_tokens) == STORAGE_WARM
    assert result.loaded_tokens == STORED


@pytest.mark.parametrize("plugins", [{}, SCORES], ids=["cost", "scores"])
def test_storage_that_is_slower_than_computing_changes_nothing(plugins: dict[str, object]) -> None:
    slow, without = _schedule(plugins, STORED, 1e6), _schedule(plugins, 0)
    assert slow.decision == without.decision
    assert (slow.loaded_tokens, without.loaded_tokens) == (0, 0)
    assert without.decision.path is not RoutingPath.FAST_DECODE


@pytest.mark.parametrize("plugins", [{}, SCORES], ids=["cost", "scores"])
def test_kv_on_the_gpu_is_not_loaded(plugins: dict[str, object]) -> None:
    result = _schedule(plugins, STORED, gpu=True)
    assert result.decision == (RoutingPath.FAST_DECODE, "cached")
    assert kv_tier(result.cached_tokens, result.loaded_tokens) == GPU_HOT


def test_the_predicted_cost_has_the_load_as_a_term() -> None:
    result = _schedule({}, STORED)
    assert result.costs is not None
    chosen = next(cost for cost in result.costs.traces() if cost.chosen)
    assert (chosen.part, chosen.cached_tokens) == ("unified", STORED)
    assert chosen.terms["load"] == pytest.approx(0.02 + STORED * 1000 / 1e9)


@pytest.mark.parametrize("plugins", [{}, SCORES], ids=["cost", "scores"])
def test_the_size_of_a_request_tells_what_is_loaded(plugins: dict[str, object]) -> None:
    """Else the pod would count as busy with tokens that it does not compute."""
    size = _schedule(plugins, STORED).size
    assert (size.prompt, size.cached, size.loaded) == (TOKENS, STORED, STORED)
    assert size.cached_on_decode == 0
    assert _schedule(plugins, STORED, gpu=True).size.loaded == 0


def test_a_prefill_pod_that_scores_choose_loads_from_its_store() -> None:
    half = TOKENS // 2
    result = _schedule(SCORES, half)
    assert ([pod.name for pod in result.prefill], result.loaded_tokens) == (["p"], half)
    assert (result.size.cached, result.size.loaded) == (half, half)
    assert result.size.cached_on_decode == 0


def test_without_a_tier_nothing_is_named() -> None:
    assert (kv_tier(0, 0), kv_tier(16, 0), kv_tier(16, 16)) == ("", GPU_HOT, STORAGE_WARM)
