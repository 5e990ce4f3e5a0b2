"""The model that the server offers: its names, limits, tokenizer and chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem_contract.prompt_length import over_length, plain_text

from .body import ApiError
from .chat import ChatTemplate
from .protocol import Call
from .text import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of this server; an engine has exactly one."""

    names: tuple[str, ...]
    """Names that requests may use; answers to requests without a name have the first."""
    root: str
    """Directory it was loaded from."""
    max_model_len: int
    """Most tokens of prompt and answer together."""
    vocab_size: int
    tokenizer: Tokenizer
    template: ChatTemplate

    def check_name(self, name: str | None) -> str:
        """The model name of the answer. Raises ApiError 404 for another model."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(
                404, f"the model {name!r} does not exist: this engine serves {known}", param="model"
            )
        return name

    def prompt_ids(self, call: Call) -> list[tuple[int, ...]]:
        """Token ids of every prompt of `call`. Raises ApiError when messages cannot be rendered, or
        a prompt cannot fit the model's length."""
        prompts: Sequence[str | tuple[int, ...]] = call.prompts
        if call.messages is not None:
            prompts = (self.render(call.messages, call.template_kwargs),)
        return [
            self.encode(prompt, add_special_tokens=call.add_special_tokens)
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Chat messages as a prompt. Raises ApiError."""
        return self.template.render(messages, options)

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of `text`. Raises ApiError when it cannot fit the model's length."""
        # Before the tokenizer, which takes a second and 300 MB for a million tokens.
        problem = over_length(plain_text(text), self.max_model_len, self.tokenizer.sizes)
        if problem is not None:
            raise ApiError(400, problem, param="prompt")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
