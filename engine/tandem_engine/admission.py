"""Which requests can run on this engine at all: pure checks against fixed limits."""

from dataclasses import dataclass

from .types import Request, RequestRejected


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request; known once the model is loaded."""

    max_model_len: int
    """Most tokens of prompt and answer together."""
    vocab_size: int
    """Token ids are from 0 to one below this."""
    num_blocks: int
    """KV blocks of the cache."""
    block_size: int
    """Tokens per KV block."""

    def check(self, request: Request) -> None:
        """Raise RequestRejected when `request` can never run on this engine."""
        prompt, max_tokens = request.prompt_token_ids, request.sampling.max_tokens
        if not prompt:
            raise RequestRejected("the prompt is empty: it needs at least one token")
        if max_tokens < 1:
            raise RequestRejected(f"max_tokens is {max_tokens}: it must be at least 1")
        total = len(prompt) + max_tokens
        if total > self.max_model_len:
            raise RequestRejected(
                f"{len(prompt)} prompt tokens and max_tokens {max_tokens} are more than the "
                f"{self.max_model_len} tokens this model takes"
            )
        if not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            raise RequestRejected(
                f"the prompt has a token id outside the vocabulary of {self.vocab_size}"
            )
        # A request that needs more would wait in the queue for ever and block those behind it.
        blocks = -(-total // self.block_size)
        if blocks > self.num_blocks:
            raise RequestRejected(
                f"{total} tokens need {blocks} KV blocks, this engine has {self.num_blocks}"
            )
