"""What may run on this engine at all: pure checks of one request against fixed limits."""

from dataclasses import dataclass

from .types import Request, RequestRejected


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What no request may exceed."""

    max_model_len: int
    """Prompt and answer together, in tokens."""
    vocab_size: int
    """Token ids are below it."""
    num_blocks: int
    block_size: int

    def check(self, request: Request) -> None:
        """Raise RequestRejected when `request` can never run here."""
        prompt, wanted = request.prompt_token_ids, request.sampling.max_tokens
        if not prompt:
            raise RequestRejected("the prompt is empty: it needs at least one token")
        if wanted < 1:
            raise RequestRejected(f"max_tokens is {wanted}: it must be at least 1")
        total = len(prompt) + wanted
        if total > self.max_model_len:
            raise RequestRejected(
                f"{len(prompt)} prompt tokens and max_tokens {wanted} are more than the "
                f"{self.max_model_len} tokens this model takes"
            )
        if not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            raise RequestRejected(
                f"the prompt has a token id outside the vocabulary of {self.vocab_size}"
            )
        blocks = -(-total // self.block_size)
        if blocks > self.num_blocks:
            raise RequestRejected(
                f"{total} tokens need {blocks} KV blocks, this engine has {self.num_blocks}"
            )
