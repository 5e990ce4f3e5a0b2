"""Builds vLLM's answers: one object, or one chunk for each piece of a stream.

Pure: the caller gives the id and the creation time. As in vLLM, the prompt's token ids stand in
each choice of a completion, but next to the choices of a chat.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from tandem_contract import transfer_params

from .output import Piece
from .text import Tokenizer
from .types import TokenLogprobs

DONE: Final = b"data: [DONE]\n\n"
_LOWEST: Final = -9999.0
"""Written for minus infinity, which JSON does not have; vLLM's value."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer."""

    prompt: int
    completion: int
    cached: int

    def object(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that every object and chunk of one answer repeats."""

    id: str
    created: int
    """Unix seconds."""
    model: str


@dataclass(slots=True)
class Choice:
    """One sequence's answer, collected piece by piece."""

    index: int
    prompt_token_ids: tuple[int, ...]
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    offset: int = 0
    """Characters of the tokens reported in logprobs so far; the next `text_offset`."""

    def add(self, piece: Piece) -> None:
        """Add the sequence's next piece."""
        self.texts.append(piece.text)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason
        self.stop_reason = piece.stop_reason

    def whole(self) -> Piece:
        """All pieces joined into one."""
        return Piece("".join(self.texts), tuple(self.token_ids), tuple(self.logprobs))


class Answer:
    """The common part of completion and chat answers; subclasses build the choices."""

    completion: str
    chunk: str
    id_prefix: str

    def __init__(
        self, tokenizer: Tokenizer, head: Head, *, logprobs: int | None, token_ids: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._head = {"id": self.id_prefix + head.id, "created": head.created, "model": head.model}
        self._logprobs = logprobs
        self._token_ids = token_ids

    def body(
        self, choices: Sequence[Choice], usage: Usage, kv: Mapping[str, object] | None
    ) -> bytes:
        """The body of an answer that is not streamed."""
        return msgspec.json.encode(
            {
                **self._head,
                "object": self.completion,
                "choices": [self._choice(choice) for choice in choices],
                "service_tier": None,
                "system_fingerprint": None,
                "usage": usage.object(),
                **self._prompt_ids(choices[0]),
                transfer_params.FIELD: kv,
            }
        )

    def event(self, choice: Choice, piece: Piece, usage: Usage | None, *, first: bool) -> bytes:
        """One chunk of a stream. `first`: it is the choice's first chunk."""
        return self._event([self._delta(choice, piece, first=first)], usage, choice, first=first)

    def usage_event(self, usage: Usage) -> bytes:
        """The last chunk, sent when the request asks for the stream's usage."""
        return self._event([], usage, None, first=False)

    def _event(
        self,
        choices: list[dict[str, Any]],
        usage: Usage | None,
        choice: Choice | None,
        *,
        first: bool,
    ) -> bytes:
        chunk = {**self._head, "object": self.chunk, "choices": choices}
        if choice is not None and first:
            chunk |= self._prompt_ids(choice)
        if usage is not None:
            chunk["usage"] = usage.object()
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def _prompt_ids(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, choice: Choice, piece: Piece, *, first: bool) -> dict[str, Any]:
        raise NotImplementedError


class CompletionAnswer(Answer):
    """`/v1/completions`."""

    completion = chunk = "text_completion"
    id_prefix = "cmpl-"

    def _prompt_ids(self, choice: Choice) -> dict[str, Any]:
        return {}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        whole = choice.whole()
        return {
            "index": choice.index,
            "text": whole.text,
            "logprobs": self._logprobs_object(choice, whole),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": whole.token_ids if self._token_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": choice.prompt_token_ids if self._token_ids else None,
        }

    def _delta(self, choice: Choice, piece: Piece, *, first: bool) -> dict[str, Any]:
        delta = {
            "index": choice.index,
            "text": piece.text,
            "logprobs": self._logprobs_object(choice, piece),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._token_ids:
            delta["token_ids"] = piece.token_ids
            delta["prompt_token_ids"] = choice.prompt_token_ids if first else None
        return delta

    def _logprobs_object(self, choice: Choice, piece: Piece) -> dict[str, Any] | None:
        """The four parallel lists; `text_offset` counts from the sequence's start."""
        if self._logprobs is None or not piece.logprobs:
            return None
        tokens = [self._tokenizer.token_text(i) for i in piece.token_ids]
        offsets = []
        for token in tokens:
            # Kept in the choice: a stream builds this object for each chunk anew.
            offsets.append(choice.offset)
            choice.offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.chosen) for entry in piece.logprobs],
            "top_logprobs": [
                self._top(token, entry) for token, entry in zip(tokens, piece.logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, token: str, entry: TokenLogprobs) -> dict[str, float]:
        """The sampled token first; it wins over others with its text (parts of characters)."""
        sampled = {token: _finite(entry.chosen)}
        top = {self._tokenizer.token_text(i): _finite(value) for i, value in entry.top}
        # The first `sampled` sets the order, the last one its value.
        return sampled | top | sampled


class ChatAnswer(Answer):
    """`/v1/chat/completions`."""

    completion = "chat.completion"
    chunk = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def _prompt_ids(self, choice: Choice) -> dict[str, Any]:
        return {"prompt_token_ids": choice.prompt_token_ids if self._token_ids else None}

    def event(self, choice: Choice, piece: Piece, usage: Usage | None, *, first: bool) -> bytes:
        """As in vLLM, a chunk with the role, and no token, precedes the first one."""
        event = super().event(choice, piece, usage, first=False)
        if not first:
            return event
        none = None if usage is None else replace(usage, completion=0)
        role = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._event([role], none, choice, first=True) + event

    def _choice(self, choice: Choice) -> dict[str, Any]:
        whole = choice.whole()
        return {
            "index": choice.index,
            "message": {
                "role": "assistant",
                "content": whole.text,
                "refusal": None,
                "tool_calls": [],
            },
            "logprobs": self._logprobs_object(whole),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": whole.token_ids if self._token_ids else None,
        }

    def _delta(self, choice: Choice, piece: Piece, *, first: bool) -> dict[str, Any]:
        delta = {
            "index": choice.index,
            "delta": {"content": piece.text},
            "logprobs": self._logprobs_object(piece),
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None:
            delta["stop_reason"] = piece.stop_reason
        if self._token_ids:
            delta["token_ids"] = piece.token_ids
        return delta

    def _logprobs_object(self, piece: Piece) -> dict[str, Any] | None:
        if self._logprobs is None or not piece.logprobs:
            return None
        return {
            "content": [
                {
                    **self._logprob(token_id, entry.chosen),
                    "top_logprobs": [self._logprob(i, value) for i, value in entry.top],
                }
                for token_id, entry in zip(piece.token_ids, piece.logprobs, strict=True)
            ]
        }

    def _logprob(self, token_id: int, value: float) -> dict[str, Any]:
        text = self._tokenizer.token_text(token_id)
        return {"token": text, "logprob": _finite(value), "bytes": list(text.encode())}


def _finite(value: float) -> float:
    return max(value, _LOWEST)
