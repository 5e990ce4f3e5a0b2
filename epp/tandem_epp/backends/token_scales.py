"""How many tokens a text has: learned per model from the prompt tokens that engines report.

The EPP has no tokenizer: it assumes BYTES_PER_TOKEN bytes of JSON per token. What engines count
differs by model and by what clients send, for instance 1 byte per token for a tokenizer of bytes,
and 3 for source code. The scale is the tokens counted over those assumed, of the latest prompts;
long prompts weigh more, because it is they whose prefill takes long.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Final

MAX_MODELS: Final = 64
"""Models remembered; beyond them the one learned first is forgotten. Clients may choose names where
a backend lists none."""
_DECAY: Final = 0.98
"""What a sample keeps of its weight with each further one: the latest 50 prompts count."""
_PRIOR_TOKENS: Final = 100.0
"""Weight of the assumption, as a prompt of this many tokens."""
_MIN, _MAX = 0.05, 20.0


@dataclass(slots=True)
class _Sums:
    assumed: float = _PRIOR_TOKENS
    counted: float = _PRIOR_TOKENS


class TokenScales:
    """Model → tokens per assumed token."""

    def __init__(self) -> None:
        self._sums: dict[str | None, _Sums] = {}

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """Models and their scales."""
        return ((model or "", self.scale(model)) for model in self._sums)

    @property
    def sums(self) -> Iterator[tuple[str | None, float, float]]:
        """Models with the tokens assumed and counted of their latest texts."""
        return ((model, sums.assumed, sums.counted) for model, sums in self._sums.items())

    def take_over(self, model: str | None, assumed: float, counted: float) -> None:
        """Use the sums of another replica, unless more is known here."""
        if not (0 < assumed < inf and 0 < counted < inf):
            return
        sums = self._sums_of(model)
        if assumed > sums.assumed:
            sums.assumed, sums.counted = assumed, counted

    def scale(self, model: str | None) -> float:
        """Tokens per assumed token; 1 before the first sample."""
        sums = self._sums.get(model)
        return 1.0 if sums is None else min(_MAX, max(_MIN, sums.counted / sums.assumed))

    def learn(self, model: str | None, assumed: int, counted: int) -> None:
        """A prompt of `assumed` tokens has `counted` ones."""
        if assumed <= 0 or counted <= 0:
            return
        sums = self._sums_of(model)
        sums.assumed = sums.assumed * _DECAY + assumed
        sums.counted = sums.counted * _DECAY + counted

    def _sums_of(self, model: str | None) -> _Sums:
        if (sums := self._sums.get(model)) is None:
            if len(self._sums) >= MAX_MODELS:
                del self._sums[next(iter(self._sums))]
            sums = self._sums[model] = _Sums()
        return sums
