"""Tokens per assumed token, learned from what engines count."""

import pytest

from tandem_epp.backends.token_scales import MAX_MODELS, TokenScales


def test_the_scale_converges_on_what_engines_count() -> None:
    scales = TokenScales()
    assert scales.scale("m") == 1.0
    for _ in range(30):
        scales.learn("m", 1000, 4000)
    assert scales.scale("m") == pytest.approx(4.0, rel=0.02)
    assert (scales.scale("other"), scales.scale(None)) == (1.0, 1.0)
    for _ in range(300):
        scales.learn("m", 1000, 500)
    assert scales.scale("m") == pytest.approx(0.5, rel=0.05)


def test_a_short_prompt_changes_little_and_nonsense_nothing() -> None:
    scales = TokenScales()
    scales.learn("m", 10_000, 12_000)
    before = scales.scale("m")
    scales.learn("m", 3, 30)
    assert scales.scale("m") == pytest.approx(before, rel=0.01)
    scales.learn("m", 0, 30)
    scales.learn("m", 30, 0)
    scales.learn("n", 10**6, 1)
    assert scales.scale("n") == 0.05


def test_models_are_bounded() -> None:
    scales = TokenScales()
    for number in range(MAX_MODELS + 1):
        scales.learn(str(number), 1000, 2000)
    assert len(list(scales)) == MAX_MODELS
    assert scales.scale("0") == 1.0
