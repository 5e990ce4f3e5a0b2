"""Answers compared with a reference's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_loadtest.calls import Answer
from tandem_loadtest.client.reference import AnswerDifference, compare


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        (Answer("a", (1, 2)), Answer("b", (1, 2)), None),
        (Answer("a", (1, 2)), Answer("a", (1, 3)), AnswerDifference(1, "token")),
        (Answer("a", (1, 2)), Answer("a", (1,)), AnswerDifference(1, "token")),
        (Answer("a", ()), Answer("a", (7,)), AnswerDifference(0, "token")),
        (Answer("abc", (1,)), Answer("abc"), None),
        (Answer("abc"), Answer("abd", (1,)), AnswerDifference(3, "character")),
        (Answer("abc"), Answer("ab"), AnswerDifference(3, "character")),
        (Answer("b", reasoning="a"), Answer("ab"), AnswerDifference(0, "character")),
        (Answer("a", tool_calls="f{}"), Answer("a"), AnswerDifference(3, "character")),
        (Answer("a", finish_reason="stop"), Answer("a", finish_reason="length"), None),
    ],
)
def test_token_ids_decide_if_both_have_them_else_all_text(
    answer: Answer, reference: Answer, expected: AnswerDifference | None
) -> None:
    assert compare(answer, reference) == expected


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_position_is_the_length_of_the_common_prefix(a: list[int], b: list[int]) -> None:
    difference = compare(Answer(token_ids=tuple(a)), Answer(token_ids=tuple(b)))
    assert (difference is None) == (a == b)
    if difference is not None:
        i = difference.position
        assert a[:i] == b[:i]
        assert a[i : i + 1] != b[i : i + 1]


def test_a_difference_is_reported_without_text() -> None:
    difference = compare(Answer("secret"), Answer("sesame"))
    assert str(difference) == "differs from the reference at character 3"
