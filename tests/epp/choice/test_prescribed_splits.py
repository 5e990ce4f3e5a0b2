"""`split: always` and `max_prefill_on_decode`: pairs that the configuration prescribes."""

import pytest

from tandem_contract.config import DisaggregatedServing
from tandem_contract.documents import parse_documents
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import Plan
from tandem_epp.exchange import ResponseHeaders
from tandem_epp.llmd.plugins.config import load_routing

from ..placement.test_picker import NOW, PickerSetup

SCORES = "plugins: [{type: queue-scorer}]"
CHOICES = ("{}", SCORES)
"""By cost, and by llm-d's scores."""
SPLIT, UNIFIED = RoutingPath.PREFILL_THEN_DECODE, RoutingPath.UNIFIED
FAST, FALLBACK = RoutingPath.FAST_DECODE, RoutingPath.FALLBACK
LIMIT = {"max_prefill_on_decode": 36}
SHORT, MEDIUM, LONG = "a", "word " * 30, "word " * 400
"""Some 1, 40 and 500 tokens."""


def setup_with(scheduling: str, serving: dict[str, object], **roles: str) -> PickerSetup:
    setup = PickerSetup(scheduling, **roles)
    document = parse_documents(scheduling, "router.yaml")[0]
    split = DisaggregatedServing(**{"enabled": True, **serving})  # type: ignore[arg-type] # fields
    setup.picker.routing = load_routing(document, document.data, split)
    return setup


def outcome(plan: Plan) -> tuple[RoutingPath, str]:
    return plan.path, plan.reason


@pytest.mark.parametrize("scheduling", CHOICES)
def test_always_splits_short_and_cached_prompts(scheduling: str) -> None:
    setup = setup_with(scheduling, {"split": "always"}, d="decode", p="prefill")
    for prompt in (SHORT, MEDIUM, MEDIUM, LONG, LONG):
        plan = setup.place_alone(prompt)
        assert outcome(plan) == (SPLIT, "always")
        assert (plan.decode.name, [pod.name for pod in plan.prefill]) == ("d", ["p"])


@pytest.mark.parametrize("scheduling", CHOICES)
def test_always_leaves_alone_what_one_engine_must_serve(scheduling: str) -> None:
    setup = setup_with(scheduling, {"split": "always"}, d="decode", p="prefill")
    assert setup.place(LONG, n=2)[1].path is UNIFIED


@pytest.mark.parametrize("scheduling", CHOICES)
def test_always_has_no_effect_without_prefill_pods(scheduling: str) -> None:
    setup = setup_with(scheduling, {"split": "always"}, u="unified", v="unified")
    assert outcome(setup.place_alone(LONG)) == (UNIFIED, "not_disaggregated")


@pytest.mark.parametrize("serving", [{"split": "always"}, LIMIT])
@pytest.mark.parametrize("scheduling", CHOICES)
def test_a_prescribed_split_falls_back_without_a_healthy_prefill_pod(
    scheduling: str, serving: dict[str, object]
) -> None:
    setup = setup_with(scheduling, serving, d="decode", p="prefill")
    setup.down("p")
    plan = setup.place_alone(LONG)
    assert outcome(plan) == (FALLBACK, "no_prefill_backend")
    assert (plan.decode.name, plan.prefill) == ("d", ())


@pytest.mark.parametrize("serving", [{"split": "always"}, LIMIT])
@pytest.mark.parametrize("scheduling", CHOICES)
def test_without_the_fallback_it_is_refused(scheduling: str, serving: dict[str, object]) -> None:
    strict = {**serving, "fallback_to_unified": False}
    setup = setup_with(scheduling, strict, d="decode", p="prefill")
    setup.down("p")
    status, error = setup.refusal(b'{"model": "m", "prompt": "%b"}' % LONG.encode())
    assert (status, error["message"]) == (503, "no prefill backend is healthy: try again")


@pytest.mark.parametrize("scheduling", CHOICES)
def test_always_and_a_limit_split_nothing_where_splitting_is_off(scheduling: str) -> None:
    off = {"enabled": False, "split": "always", **LIMIT}
    setup = setup_with(scheduling, off, d="decode", p="prefill")
    assert outcome(setup.place_alone(LONG)) == (UNIFIED, "split_off")


def test_a_decode_pod_computes_no_more_uncached_tokens_than_the_limit() -> None:
    free = setup_with("{}", {}, d="decode", p="prefill")
    setup = setup_with("{}", LIMIT, d="decode", p="prefill")
    assert outcome(free.place_alone(MEDIUM)) == (UNIFIED, "cheaper_here")
    assert outcome(setup.place_alone(MEDIUM)) == (SPLIT, "prefill_limit")
    assert setup.place_alone(SHORT).path is UNIFIED
    placement, _ = setup.place(MEDIUM)
    placement.on_response_headers(ResponseHeaders(None, 200), NOW)
    placement.end(NOW)
    # Now it is cached on the decode pod.
    assert outcome(setup.place_alone(MEDIUM)) == (FAST, "cached")


def test_without_a_pair_a_pod_that_caches_enough_does_not_get_all() -> None:
    setup = setup_with("{}", LIMIT, d="decode", e="decode", p="prefill")
    setup.down("p")
    placement, first = setup.place(LONG)
    placement.on_response_headers(ResponseHeaders(None, 200), NOW)
    placement.end(NOW)
    # Each leaves less than the limit to compute there, and the queue grows.
    plans = [setup.place(f"{LONG} {number}")[1] for number in range(40)]
    others = [plan for plan in plans if plan.decode.name != first.decode.name]
    assert 0 < len(others) < 40
    assert {plan.reason for plan in others[:1]} == {"no_prefill_backend"}


def test_a_limit_below_what_the_decider_splits_from_holds() -> None:
    long = "plugins: [{type: prefix-based-pd-decider, parameters: {nonCachedTokens: 4000}}]"
    free = setup_with(long, {}, d="decode", p="prefill")
    setup = setup_with(long, LIMIT, d="decode", p="prefill")
    assert outcome(free.place_alone(LONG)) == (UNIFIED, "short_prompt")
    assert outcome(setup.place_alone(LONG)) == (SPLIT, "prefill_limit")
    assert outcome(setup.place_alone(SHORT)) == (UNIFIED, "short_prompt")


@pytest.mark.parametrize("scheduling", CHOICES)
def test_a_unified_pod_has_no_limit(scheduling: str) -> None:
    setup = setup_with(scheduling, LIMIT, u="unified", p="prefill")
    assert setup.place_alone(MEDIUM).path is UNIFIED


def test_what_a_plugin_says_counts_where_the_section_is_silent() -> None:
    always = "plugins: [{type: predicted-cost, parameters: {split: always}}]"
    both = "{disaggregated_serving: {enabled: true, split: auto}, " + always + "}"
    limit = "plugins: [{type: predicted-cost, parameters: {split: auto, maxPrefillOnDecode: 64}}]"
    alone = "plugins: [{type: predicted-cost, parameters: {maxPrefillOnDecode: 64}}]"
    for text, expected in (
        (always, (True, "always", None)),
        (alone, (True, "auto", 64)),
        (both, (True, "auto", None)),
        (limit, (True, "auto", 64)),
        ("plugins: [{type: predicted-cost}]", (False, "auto", None)),
        ("{disaggregated_serving: {enabled: false}, " + always + "}", (False, "always", None)),
    ):
        document = parse_documents(text, "router.yaml")[0]
        section = document.data.get("disaggregated_serving", {})
        fields = {"plugins": document.data["plugins"]}
        routing = load_routing(document, fields, DisaggregatedServing(**section))
        cost = routing.scheduling.cost
        assert (routing.serving.enabled, cost.split, cost.max_prefill_on_decode) == expected
