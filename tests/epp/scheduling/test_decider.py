"""The split decision at every corner of its table."""

from dataclasses import replace

import pytest

from tandem_contract.paths import RoutingPath
from tandem_epp.scheduling.decider import Rules, Situation, SplitImpossible, decide

LONG = Situation(
    prompt_tokens=1000, cached_tokens=0, block_tokens=16, configured=True, prefill_ready=True
)
RULES = Rules(non_cached_tokens=100)


@pytest.mark.parametrize(
    ("change", "path", "reason"),
    [
        ({}, RoutingPath.PREFILL_THEN_DECODE, "worth_it"),
        ({"prompt_tokens": 99}, RoutingPath.UNIFIED, "short_prompt"),
        ({"prompt_tokens": 99, "cached_tokens": 96}, RoutingPath.UNIFIED, "short_prompt"),
        ({"cached_tokens": 992}, RoutingPath.FAST_DECODE, "cached"),
        ({"cached_tokens": 968}, RoutingPath.FAST_DECODE, "cached"),
        ({"cached_tokens": 967}, RoutingPath.UNIFIED, "mostly_cached"),
        ({"cached_tokens": 901}, RoutingPath.UNIFIED, "mostly_cached"),
        ({"cached_tokens": 900}, RoutingPath.PREFILL_THEN_DECODE, "worth_it"),
        ({"configured": False}, RoutingPath.UNIFIED, "not_disaggregated"),
        ({"one_engine": "batch"}, RoutingPath.UNIFIED, "batch"),
        ({"prefill_ready": False}, RoutingPath.FALLBACK, "no_prefill_backend"),
        ({"prefill_ready": False, "cached_tokens": 992}, RoutingPath.FAST_DECODE, "cached"),
    ],
)
def test_the_table(change: dict[str, object], path: RoutingPath, reason: str) -> None:
    verdict = decide(replace(LONG, **change), RULES)  # type: ignore[arg-type] # of its fields
    assert (verdict.path, verdict.reason) == (path, reason)


def test_no_prefill_backend_and_no_fallback_is_an_error() -> None:
    with pytest.raises(SplitImpossible):
        decide(replace(LONG, prefill_ready=False), replace(RULES, fallback_to_unified=False))


@pytest.mark.parametrize("rules", [Rules(split=False), Rules(non_cached_tokens=0)])
def test_the_split_can_be_off(rules: Rules) -> None:
    assert decide(LONG, rules).reason == "split_off"


def test_always_splits_short_and_cached_prompts_but_not_what_one_engine_must_do() -> None:
    always = Rules(always=True)
    short = replace(LONG, prompt_tokens=1, cached_tokens=1)
    assert decide(short, always).path is RoutingPath.PREFILL_THEN_DECODE
    assert decide(replace(short, one_engine="n"), always).path is RoutingPath.UNIFIED
