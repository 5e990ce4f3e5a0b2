"""How many tokens a pod's answers have, on average over the latest."""

from typing import Final

_ANSWERS: Final = 100
"""Answers of which the average is taken, at most."""


class AnswerLengths:
    """The average of one pod."""

    def __init__(self) -> None:
        self.average: float | None = None
        """Tokens per answer; None: not known."""
        self._generated = self._answers = 0.0
        """Tokens and answers of the average; old ones are halved again and again."""

    def add(self, generated: float, answers: float) -> None:
        """Between two scrapes, so many tokens were generated and answers ended."""
        # Sums, not a mean per window: an answer's tokens are generated in many windows, of which
        # only one has its end.
        self._generated += generated
        self._answers += answers
        if self._answers:
            self.average = self._generated / self._answers
        if self._answers > _ANSWERS:
            self._generated, self._answers = self._generated / 2, self._answers / 2
