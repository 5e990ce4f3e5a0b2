"""What a server adds to prompts: `calibrated(prompts, samples)`. Pure."""

from collections.abc import Sequence
from typing import Final

import msgspec

from .settings import Prompts

Sample = tuple[int, int, int]
"""Units and messages of a prompt, as `PromptWriter.size` counts them, and the server's tokens."""

_SINGULAR: Final = 1e-9
"""Samples whose determinant is below this share of its largest value do not tell words from
messages apart."""


def calibrated(prompts: Prompts, samples: Sequence[Sample]) -> Prompts:
    """`prompts` with the tokens per word and per message that the samples show.

    Style `words`: both, by `calibrate`. Style `tokenizer`: the mean of what the server counted more
    than the tokenizer, per message; what a chat template adds once counts as part of it. Style
    `token-ids`: nothing, as the server adds nothing.

    Raises ValueError when the samples do not suffice.
    """
    if prompts.style == "token-ids":
        return prompts
    if prompts.style == "words":
        per_word, per_message = calibrate(samples)
        return msgspec.structs.replace(
            prompts, tokens_per_word=per_word, tokens_per_message=per_message
        )
    messages = sum(m for _, m, _ in samples)
    if not messages:
        raise ValueError("to calibrate prompts, at least one must be answered")
    added = sum(t - w for w, _, t in samples)
    return msgspec.structs.replace(prompts, tokens_per_message=max(0.0, added / messages))


def calibrate(samples: Sequence[Sample]) -> tuple[float, float]:
    """Tokens per word and tokens per message, from samples of (words, messages, prompt tokens).

    Least squares of tokens = a × words + b × messages, weighted by 1/words, since the variance of
    a text's tokens grows with its words. Where the samples do not tell the two apart, or b would be
    below 0, b is 0 and a = Σ tokens / Σ words.

    Raises ValueError without a sample that has words, or when a would not be above 0.
    """
    worded = [(w, m, t) for w, m, t in samples if w > 0]
    words, tokens = sum(w for w, _, _ in worded), sum(t for _, _, t in worded)
    if not words or not tokens:
        raise ValueError(
            "to calibrate prompts, at least one must have words, be answered, and have its tokens"
            " counted by the server"
        )
    messages = sum(m for _, m, _ in worded)
    squares = sum(m * m / w for w, m, _ in worded)
    products = sum(m * t / w for w, m, t in worded)
    determinant = words * squares - messages * messages
    if determinant > _SINGULAR * words * squares:
        per_word = (tokens * squares - products * messages) / determinant
        per_message = (products * words - tokens * messages) / determinant
        if per_word > 0 and per_message >= 0:
            return per_word, per_message
    return tokens / words, 0.0
