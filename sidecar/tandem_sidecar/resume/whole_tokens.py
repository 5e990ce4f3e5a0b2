"""Tokens known to be whole characters, so that a text ends at a character wherever they end it.

A token may be a part of a character: then an engine holds its text back until the rest comes. One
that came alone, right after a character, and had text at once is a string of whole characters by
itself, and that in every text. Of an event with several tokens only this tells whether its last one
ends a character.
"""

from typing import Final

MAX_ID: Final = 1 << 20
"""Ids from here on are not noted."""
MAX_MODELS: Final = 64
MAX_NAME: Final = 512
"""Bytes of a model's name: a client may make one up."""


class WholeTokens:
    """The tokens of one model's vocabulary."""

    def __init__(self) -> None:
        self._is_whole = bytearray()

    def add(self, token: int) -> None:
        """Note that `token` is whole."""
        known = self._is_whole
        if token >= len(known):
            if token >= MAX_ID:
                return
            known.extend(bytes(token + 1 - len(known)))
        known[token] = 1

    def __contains__(self, token: int) -> bool:
        return token < len(self._is_whole) and self._is_whole[token] == 1


class Vocabularies:
    """What is known of each model's tokens."""

    def __init__(self) -> None:
        self._of_models: dict[bytes, WholeTokens] = {}

    def of(self, model: bytes) -> WholeTokens:
        """The tokens of `model`, its encoded name; beyond MAX_MODELS the one that was asked for
        least lately is forgotten. A name of more than MAX_NAME bytes is not kept."""
        tokens = self._of_models.pop(model, None) or WholeTokens()
        if len(model) <= MAX_NAME:
            self._of_models[model] = tokens
        if len(self._of_models) > MAX_MODELS:
            del self._of_models[next(iter(self._of_models))]
        return tokens
