"""Compares an answer with a reference's answer to the same greedy request; pure."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from ..calls import Answer


class AnswerDifference(msgspec.Struct, frozen=True):
    """Where two answers differ first; no text of them."""

    position: int
    """From 0, in `unit`s; the length of the shorter answer if the longer begins with it."""
    unit: Literal["token", "character"]

    def __str__(self) -> str:
        return f"differs from the reference at {self.unit} {self.position}"


def compare(answer: Answer, reference: Answer) -> AnswerDifference | None:
    """The first difference; None if the answers are equal.

    Compares token ids if both have them, else all generated text: reasoning, text, tool calls.
    """
    if answer.token_ids is not None and reference.token_ids is not None:
        position = _first_difference(answer.token_ids, reference.token_ids)
        return None if position is None else AnswerDifference(position, "token")
    position = _first_difference(_text(answer), _text(reference))
    return None if position is None else AnswerDifference(position, "character")


def _text(answer: Answer) -> str:
    # The separator cannot be in an answer: it keeps text from being taken for reasoning.
    return "\0".join((answer.reasoning, answer.text, answer.tool_calls))


def _first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    if a == b:
        return None
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (x, y) in pairs if x != y), min(len(a), len(b)))
