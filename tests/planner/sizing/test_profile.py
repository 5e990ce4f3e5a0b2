"""Fits of what a client measured."""

import pytest

from tandem_planner.sizing.profile import DecodePoint, PrefillPoint, fitted
from tandem_planner.step_cost import LinearStep

STEP = LinearStep(0.02, 5e-4, 1e-7, 2e-4, 1e-9)
REQUEST = 0.004


def prefill(tokens: int) -> PrefillPoint:
    return PrefillPoint(tokens, REQUEST + STEP.seconds(0, 0, tokens, float(tokens) ** 2))


def decode(decodes: int, context: float) -> DecodePoint:
    return DecodePoint(decodes, context, STEP.seconds(decodes, decodes * context))


def test_the_fit_of_exact_points_is_the_engines_step() -> None:
    engine = fitted(
        [prefill(n) for n in (64, 128, 256, 512, 1024, 2048, 4096)] * 3,
        [decode(b, c) for b in (1, 4, 16, 32) for c in (100.0, 2000.0)],
    )
    for work in ((1, 100), (8, 4000), (32, 64_000), (0, 0, 300, 9e4), (0, 0, 4000, 1.6e7)):
        assert engine.step.seconds(*work) == pytest.approx(STEP.seconds(*work), rel=0.03)
    assert engine.request == pytest.approx(REQUEST, rel=0.2)
    assert (engine.longest_prompt, engine.most_decodes) == (4096, 32)


def test_beyond_the_measured_prompts_nothing_is_known() -> None:
    engine = fitted([prefill(64), prefill(1000)], [decode(1, 100), decode(8, 100)])
    assert engine.unknown(1200) is None
    assert engine.unknown(2000) == (
        "unknown: the workload has prompts of 2,000 tokens, and the profile none above 1,000: "
        "measure with --longest 2000"
    )


def test_a_profile_without_decodes_is_not_complete() -> None:
    with pytest.raises(ValueError, match="a decode"):
        fitted([prefill(64)], [])
