"""How many tokens a text has: learned per model from the prompt tokens that engines report.

The EPP has no tokenizer: it assumes BYTES_PER_TOKEN bytes of JSON per token. What engines count
differs by model and by what clients send, for instance 1 byte per token for a tokenizer of bytes,
and 3 for source code. The scale is the tokens counted over those assumed, of the latest prompts;
long prompts weigh more, because it is they whose prefill takes long.

Media (images, sounds) have as many tokens as the engine makes of them, which their bytes do not
tell. They are learned as an average per part and model: what a prompt has beyond its texts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Final

from tandem_contract.prefix import FINE_TOKENS

MAX_MODELS: Final = 64
"""Models remembered; beyond them the one learned first is forgotten. Clients may choose names where
a backend lists none."""
_DECAY: Final = 0.98
"""What a sample keeps of its weight with each further one: the latest 50 prompts count."""
_PRIOR_TOKENS: Final = 100.0
"""Weight of the assumption, as a prompt of this many tokens."""
_MIN, _MAX = 0.05, 20.0
_MEDIA_TOKENS: Final = 500.0
"""Tokens of a media part before any is counted: about those of a small image in common models."""
_MEDIA_WEIGHT: Final = 0.2
"""Weight of the newest prompt in the moving average of tokens per media part."""


@dataclass(slots=True)
class _Sums:
    assumed: float = _PRIOR_TOKENS
    counted: float = _PRIOR_TOKENS
    media: float = _MEDIA_TOKENS
    """Tokens per media part."""


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

    def media_tokens(self, model: str | None) -> float:
        """Tokens per media part."""
        sums = self._sums.get(model)
        return _MEDIA_TOKENS if sums is None else sums.media

    def prompt_scale(self, model: str | None, text: int, media: int) -> float:
        """Tokens per assumed token of a prompt with `text` assumed tokens of texts and `media`
        parts, each of which is one block of FINE_TOKENS. One scale for the whole prompt: where in
        it the media are is not known, and what is cached of it must not exceed it."""
        scale = self.scale(model)
        if not media:
            return scale
        tokens = text * scale + media * self.media_tokens(model)
        return tokens / (text + media * FINE_TOKENS)

    def learn_media(self, model: str | None, text: int, media: int, counted: int) -> None:
        """A prompt with `text` assumed tokens of texts and `media` parts has `counted` tokens."""
        if media <= 0 or counted <= 0:
            return
        sums = self._sums_of(model)
        tokens = max(0.0, counted - text * self.scale(model)) / media
        sums.media += _MEDIA_WEIGHT * (tokens - sums.media)

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
