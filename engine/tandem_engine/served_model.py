"""The model as clients know it: its names, its limits, its tokenizer and chat template."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .body import ApiError
from .chat import ChatTemplate
from .protocol import Call
from .text import Tokenizer

_THREAD_CHARACTERS: Final = 20_000
"""Longer prompts are tokenized off the event loop: running streams go on meanwhile."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model a server answers for."""

    names: tuple[str, ...]
    """What requests may call it; answers to requests that name none use the first."""
    root: str
    """Where it was loaded from."""
    max_model_len: int
    """Tokens, prompt and answer together."""
    vocab_size: int
    tokenizer: Tokenizer
    template: ChatTemplate

    def check_name(self, name: str | None) -> str:
        """The name to answer under. Raises ApiError 404."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(
                404, f"the model {name!r} does not exist: this engine serves {known}", param="model"
            )
        return name

    async def prompt_ids(self, call: Call) -> list[tuple[int, ...]]:
        """Token ids of every prompt of `call`. Raises ApiError when messages cannot be rendered."""
        prompts: Sequence[str | tuple[int, ...]] = call.prompts
        if call.messages is not None:
            prompts = (self.render(call.messages, call.template_kwargs),)
        return [
            await self.encode(prompt, add_special_tokens=call.add_special_tokens)
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Chat messages as a prompt. Raises ApiError."""
        return self.template.render(messages, options)

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of `text`."""
        if len(text) > _THREAD_CHARACTERS:
            return await asyncio.to_thread(
                self.tokenizer.encode, text, add_special_tokens=add_special_tokens
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
