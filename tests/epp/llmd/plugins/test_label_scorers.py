"""Scorers that compare a request with labels."""

import pytest

from tandem_epp.choice.context import ChoiceContext
from tandem_epp.llmd.plugins.label_scorers import (
    ContextLengthFilter,
    ContextLengthScorer,
    HeaderLabelScorer,
)
from tandem_epp.request.inference import InferenceRequest

from .pods import make_pod


def test_a_header_prefers_pods_with_its_value() -> None:
    pods = [make_pod("a", labels={"tier": "a"}), make_pod("b", labels={"tier": "b"}), make_pod()]
    scorer = HeaderLabelScorer("x-tier", "tier")
    assert scorer.score(pods, ChoiceContext(None, headers={"x-tier": "b"})) == [0, 1, 0]
    assert scorer.score(pods, ChoiceContext(None, headers={"x-tier": ""})) == [0, 0, 0]
    assert scorer.score(pods, ChoiceContext(None)) == [0, 0, 0]


LABELS = ("0-1000", "0-10000", "2000-4000", "1000-1000", "no range", "9-1", None)


def test_lengths_prefer_narrow_ranges_then_near_ones() -> None:
    pods = [make_pod(labels={"range": text} if text is not None else {}) for text in LABELS]
    context = ChoiceContext(InferenceRequest("m", b"x" * 4 * 1000))
    scores = ContextLengthScorer("range").score(pods, context)
    assert scores == pytest.approx(
        [
            0.3 + 0.7 * 0.7 / 1.1,
            0.3 + 0.7 * (0.7 / 2 + 0.3 * 0.9),
            0.3 / 2,
            1.0,
            0.0,
            0.0,
            0.5,
        ]
    )
    filtered = ContextLengthFilter("range").keep(pods, context)
    assert [pods.index(pod) for pod in filtered] == [0, 1, 3, 6]
