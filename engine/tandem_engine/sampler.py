"""Samples tokens from logits, all rows of a step together.

A draw's random number is a hash of the request's seed and the token's index. It depends neither on
the other requests of the batch, nor on preemption, nor on the engine that decodes.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .step import Draw, SampledToken
from .types import TokenLogprobs


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[SampledToken]:
    """The next token of each row of `logits` [rows, vocabulary].

    Log-probabilities are those before temperature, top_k and top_p, as in vLLM.
    """
    raw = logits
    if any(draw.banned for draw in draws):
        # A copy: log-probabilities are those before the ban.
        logits = logits.clone()
        for row, draw in enumerate(draws):
            logits[row, list(draw.banned)] = -torch.inf
    chosen = logits.argmax(-1)
    random = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if random:
        chosen[random] = _draw(logits[random], [draws[row] for row in random])
    tokens: list[int] = chosen.tolist()
    with_logprobs = [row for row, draw in enumerate(draws) if draw.sampling.logprobs is not None]
    if not with_logprobs:
        return [SampledToken(token) for token in tokens]
    logprobs = dict(
        zip(with_logprobs, torch.log_softmax(_wide(raw[with_logprobs]), -1), strict=True)
    )
    return [
        SampledToken(token, _report(logprobs[row], token, draw.sampling.logprobs or 0))
        if row in logprobs
        else SampledToken(token)
        for row, (token, draw) in enumerate(zip(tokens, draws, strict=True))
    ]


def _draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """One token for each row: inverse transform sampling from what top_k and top_p leave.

    top_p keeps the most probable tokens, up to and including the one that reaches it.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=scaled.dtype, device=scaled.device).unsqueeze(1)

    scaled = _wide(logits)
    scaled = scaled / column([draw.sampling.temperature for draw in draws])
    # Stable, so that equal logits give equal tokens on every engine.
    probs, order = scaled.softmax(-1).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    ks = [draw.sampling.top_k for draw in draws]
    top_k = column([k if k > 0 else probs.shape[1] for k in ks])
    probs = probs.masked_fill(rank >= top_k, 0)
    probs = probs / probs.sum(-1, keepdim=True)
    # Exclusive: the token that reaches top_p has less than top_p before it and stays.
    before = probs.cumsum(-1) - probs
    top_p = column([draw.sampling.top_p for draw in draws])
    probs = probs.masked_fill((before >= top_p) & (rank > 0), 0)
    reached = probs.cumsum(-1)
    # Scaled to the mass that is left, so no second normalization is needed.
    point = column([_uniform(draw) for draw in draws]) * reached[:, -1:]
    last = (probs > 0).sum(-1, keepdim=True) - 1
    # A row of NaNs, or of banned tokens only, has no last token: take any index rather than fail.
    index = (reached <= point).sum(-1, keepdim=True).minimum(last).clamp_min(0)
    return order.gather(1, index).squeeze(1)


def _uniform(draw: Draw) -> float:
    """A number in [0, 1) from 53 bits of a hash."""
    digest = hashlib.blake2b(f"{draw.seed}:{draw.index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def _wide(logits: Tensor) -> Tensor:
    """At least float32: half precision is too coarse for cumulative sums over a vocabulary."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _report(logprobs: Tensor, token: int, count: int) -> TokenLogprobs:
    values, ids = logprobs.topk(min(count, len(logprobs)))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(chosen=float(logprobs[token]), top=top)
