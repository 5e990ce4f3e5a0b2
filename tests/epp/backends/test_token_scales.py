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


def test_what_a_prompt_has_beyond_its_texts_are_its_medias_tokens() -> None:
    scales = TokenScales()
    for _ in range(300):
        scales.learn("m", 1000, 2000)
    for _ in range(30):
        scales.learn_media("m", 500, 3, 1000 + 3 * 1200)
    assert scales.media_tokens("m") == pytest.approx(1200, rel=0.02)
    assert scales.scale("m") == pytest.approx(2.0, rel=0.01), "texts are not learned from media"
    # 100 assumed tokens of texts, and two parts that the index counts as 16 each.
    assert 132 * scales.prompt_scale("m", 100, 2) == pytest.approx(200 + 2 * 1200, rel=0.02)
    assert scales.prompt_scale("m", 100, 0) == scales.scale("m")


def test_media_of_a_model_that_was_not_counted_have_an_assumed_size() -> None:
    scales = TokenScales()
    assert 16 * scales.prompt_scale("m", 0, 1) == pytest.approx(500)
    scales.learn_media("m", 100, 0, 900)
    scales.learn_media("m", 100, 2, 0)
    assert scales.media_tokens("m") == 500
    scales.learn_media("m", 10_000, 1, 5)
    assert 0 <= scales.media_tokens("m") < 500
