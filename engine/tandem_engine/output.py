"""Turns one sequence's tokens into text: a `Delta` of the engine in, a `Piece` for the client out.

No I/O. Stop strings end a sequence here, and the token that ended a sequence adds no text.
"""

from dataclasses import dataclass

from .text import Detokenizer, StopStrings, Tokenizer
from .types import Delta, FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class TextOptions:
    """A request's options for its text, under vLLM's names."""

    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Used only to tell a client's stop token from the model's end-of-sequence token."""
    min_tokens: int = 0
    """A stop string ends the sequence only after this many tokens."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of the answer that one delta adds. `finish_reason` is set on the last one only."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or the client's stop token id that ended the sequence."""


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
        """Tokens generated so far, the last one included."""

    def push(self, delta: Delta) -> Piece:
        """The piece for `delta`; its tokens after a stop string are dropped."""
        texts = []
        for position, token_id in enumerate(delta.token_ids):
            self.tokens += 1
            # A stop token ends the answer and is not part of its text.
            if position == len(delta.token_ids) - 1 and self._is_silent_stop(delta):
                break
            out = self._stops.push(
                self._detokenizer.push((token_id,)),
                can_stop=self._can_stop(),
            )
            texts.append(out.text)
            if out.stop is not None:
                end = position + 1
                return Piece(
                    "".join(texts), delta.token_ids[:end], delta.logprobs[:end], "stop", out.stop
                )
        stop_reason: str | int | None = None
        finish_reason = delta.finish_reason
        if finish_reason is not None:
            # Text that was held back for incomplete characters may still complete a stop string.
            last = self._stops.push(self._detokenizer.flush(), can_stop=self._can_stop())
            texts.append(last.text)
            if last.stop is not None:
                finish_reason, stop_reason = "stop", last.stop
            elif delta.stop_token in self._options.stop_token_ids:
                stop_reason = delta.stop_token
            # The sequence is over: what looked like the start of a stop string is plain text.
            texts.append(self._stops.flush())
        return Piece("".join(texts), delta.token_ids, delta.logprobs, finish_reason, stop_reason)

    def _can_stop(self) -> bool:
        return self.tokens > self._options.min_tokens

    def _is_silent_stop(self, delta: Delta) -> bool:
        return delta.stop_token is not None and not self._options.include_stop_str_in_output
