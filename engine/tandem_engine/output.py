"""What one sequence's tokens say: a `Delta` of the engine in, a `Piece` for the client out.

No I/O. Here stop strings end a sequence, and the token that stopped it leaves no text.
"""

from dataclasses import dataclass

from .text import Detokenizer, StopStrings, Tokenizer
from .types import Delta, FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a request wants its tokens turned into text (vLLM's names)."""

    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Only to tell a client's own stop token from the model's end of sequence."""
    min_tokens: int = 0
    """No stop string counts before this many tokens."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """What one delta means to the client. `finish_reason` is set on the last piece."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or the client's stop token id that ended it."""


class OutputText:
    """One sequence's detokenizer and stop strings."""

    def __init__(
        self, tokenizer: Tokenizer, options: TextOptions, prompt_ids: tuple[int, ...] = ()
    ) -> None:
        self._options = options
        self._detokenizer = Detokenizer(
            tokenizer, prompt_ids=prompt_ids, skip_special_tokens=options.skip_special_tokens
        )
        self._stops = StopStrings(options.stop, keep=options.include_stop_str_in_output)
        self.tokens = 0
        """Tokens said so far, the stopping one included."""

    def push(self, delta: Delta) -> Piece:
        """What `delta` adds; its tokens past a stop string are dropped."""
        texts = []
        for position, token_id in enumerate(delta.token_ids):
            self.tokens += 1
            if position == len(delta.token_ids) - 1 and self._is_silent_stop(delta):
                break
            out = self._stops.push(
                self._detokenizer.push((token_id,)),
                can_stop=self._can_stop(),
            )
            texts.append(out.text)
            if out.stop is not None:
                kept = position + 1
                return Piece(
                    "".join(texts), delta.token_ids[:kept], delta.logprobs[:kept], "stop", out.stop
                )
        stop_reason: str | int | None = None
        finish_reason = delta.finish_reason
        if finish_reason is not None:
            last = self._stops.push(self._detokenizer.flush(), can_stop=self._can_stop())
            texts.append(last.text)
            if last.stop is not None:
                finish_reason, stop_reason = "stop", last.stop
            elif delta.stop_token in self._options.stop_token_ids:
                stop_reason = delta.stop_token
            texts.append(self._stops.flush())
        return Piece("".join(texts), delta.token_ids, delta.logprobs, finish_reason, stop_reason)

    def _can_stop(self) -> bool:
        return self.tokens > self._options.min_tokens

    def _is_silent_stop(self, delta: Delta) -> bool:
        return delta.stop_token is not None and not self._options.include_stop_str_in_output
