"""The decider: every row of its table and the boundaries between them."""

from dataclasses import replace

import pytest

from tandem_contract.paths import RoutingPath
from tandem_epp.choice.result import SplitImpossible
from tandem_epp.llmd.plugins.decider import DeciderInputs, DeciderSettings, decide_path
from tandem_planner.storage import Load

LONG = DeciderInputs(
    prompt_tokens=1000,
    cached_tokens=0,
    block_tokens=16,
    is_disaggregated=True,
    has_prefill_candidate=True,
)
SETTINGS = DeciderSettings(non_cached_tokens=100)


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
        ({"is_disaggregated": False}, RoutingPath.UNIFIED, "not_disaggregated"),
        ({"is_enabled": False}, RoutingPath.UNIFIED, "split_off"),
        ({"single_engine_reason": "batch"}, RoutingPath.UNIFIED, "batch"),
        ({"has_prefill_candidate": False}, RoutingPath.FALLBACK, "no_prefill_backend"),
        ({"has_prefill_candidate": False, "cached_tokens": 992}, RoutingPath.FAST_DECODE, "cached"),
    ],
)
def test_every_row_of_the_decision_table(
    change: dict[str, object], path: RoutingPath, reason: str
) -> None:
    verdict = decide_path(replace(LONG, **change), SETTINGS)  # type: ignore[arg-type] # of its fields
    assert (verdict.path, verdict.reason) == (path, reason)


def test_a_prompt_of_fewer_blocks_than_may_be_missing_is_cached_only_if_some_of_it_is() -> None:
    short = replace(LONG, prompt_tokens=20)
    settings = replace(SETTINGS, non_cached_tokens=1)
    assert decide_path(short, settings).path is RoutingPath.PREFILL_THEN_DECODE
    cached = decide_path(replace(short, cached_tokens=16), settings)
    assert cached.path is RoutingPath.FAST_DECODE


def test_no_prefill_backend_and_no_fallback_is_an_error() -> None:
    with pytest.raises(SplitImpossible):
        decide_path(
            replace(LONG, has_prefill_candidate=False), replace(SETTINGS, fallback_to_unified=False)
        )


@pytest.mark.parametrize(
    "settings", [DeciderSettings(split=False), DeciderSettings(non_cached_tokens=0)]
)
def test_the_split_can_be_off(settings: DeciderSettings) -> None:
    assert decide_path(LONG, settings).reason == "split_off"


@pytest.mark.parametrize(
    ("change", "path", "reason"),
    [
        ({"cached_tokens": 950}, RoutingPath.UNIFIED, "mostly_cached"),
        ({"cached_tokens": 949}, RoutingPath.PREFILL_THEN_DECODE, "prefill_limit"),
        ({"prompt_tokens": 51}, RoutingPath.PREFILL_THEN_DECODE, "prefill_limit"),
        ({"prompt_tokens": 50}, RoutingPath.UNIFIED, "short_prompt"),
        ({"cached_tokens": 949, "is_unified": True}, RoutingPath.UNIFIED, "mostly_cached"),
        ({"load": Load(950, 0.1)}, RoutingPath.FAST_DECODE, "stored"),
        ({"is_enabled": False}, RoutingPath.UNIFIED, "split_off"),
    ],
)
def test_more_tokens_than_a_decode_pod_may_compute_are_split(
    change: dict[str, object], path: RoutingPath, reason: str
) -> None:
    settings = replace(SETTINGS, max_prefill_on_decode=50)
    verdict = decide_path(replace(LONG, **change), settings)  # type: ignore[arg-type] # its fields
    assert (verdict.path, verdict.reason) == (path, reason)


def test_always_splits_short_and_cached_prompts_but_no_single_engine_request() -> None:
    always = DeciderSettings(always=True)
    short = replace(LONG, prompt_tokens=1, cached_tokens=1)
    assert decide_path(short, always).path is RoutingPath.PREFILL_THEN_DECODE
    assert decide_path(replace(short, single_engine_reason="n"), always).path is RoutingPath.UNIFIED
