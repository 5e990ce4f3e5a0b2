"""Tokenizes with the files of a model directory: tokenizer.json, and the chat template.

Runs in worker threads: while the tokenizer works, it releases the interpreter's lock. Content is
text or a list of text parts; other parts need a render endpoint, because only the engine knows
which placeholder tokens a medium becomes.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jinja2
from tokenizers import Tokenizer

from tandem_contract.chat_messages import template_message
from tandem_contract.chat_templates import (
    CONFIG_FILE,
    TEMPLATE_FILE,
    special_tokens,
    template_environment,
    template_source,
)
from tandem_contract.prompt_length import token_sizes

from ..block_keys import TokenizedPrompt
from . import NotTokenized, TokenizerUnusable
from .source import ChatPrompt, TextPrompt

_LISTS_PARTS: Final = re.compile(r"for\s+\w+\s+in\s+message(\.content|\[['\"]content['\"]\])")
"""In a template: it takes content as a list of parts, so that vLLM gives it one even for text."""


_TEMPLATE_ERRORS: Final = (
    *(jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError),
    *(AttributeError, RecursionError),
)


class LocalTokenizer:
    """The tokenizer and the chat template of one model directory."""

    def __init__(self, directory: Path) -> None:
        """Raises TokenizerUnusable."""
        file = directory / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as err:
            raise TokenizerUnusable(f"{file}: cannot read it: {err}") from err
        # tokenizers raises nothing narrower than Exception for a malformed file.
        except Exception as err:
            raise TokenizerUnusable(f"{file}: not a tokenizer: {err}") from err
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.sizes: Final = token_sizes(self._tokenizer.get_vocab(with_added_tokens=True))
        config = _read_config(directory / CONFIG_FILE)
        self._special = special_tokens(config)
        source = template_source(directory / TEMPLATE_FILE, config)
        self._has_part_lists = source is not None and _LISTS_PARTS.search(source) is not None
        try:
            self._template = None if source is None else template_environment().from_string(source)
        except jinja2.TemplateSyntaxError as err:
            message = f"{directory}: chat template, line {err.lineno}: {err.message}"
            raise TokenizerUnusable(message) from err

    def tokenize(self, prompt: TextPrompt | ChatPrompt) -> TokenizedPrompt:
        """Token ids of the prompt. Raises NotTokenized."""
        text = prompt.text if isinstance(prompt, TextPrompt) else self._render(prompt)
        # The batch releases the interpreter's lock, `encode` does not.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=prompt.add_special_tokens
        )
        return TokenizedPrompt(encoding.ids, cache_salt=prompt.cache_salt)

    def _render(self, prompt: ChatPrompt) -> str:
        if self._template is None:
            raise NotTokenized("the model directory has no chat template")
        messages = [self._message(message) for message in prompt.messages]
        try:
            return self._template.render({**self._special, **prompt.options, "messages": messages})
        # A template may fail on any unexpected message; the engine then refuses the request.
        except _TEMPLATE_ERRORS as err:
            raise NotTokenized("the chat template refused the messages") from err

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message as the engine gives it to the template. Raises NotTokenized."""
        content = message.get("content")
        parts = [content] if isinstance(content, str) else content or []
        if not isinstance(message.get("role"), str) or not isinstance(parts, list):
            raise NotTokenized("a message without a role, or with content of another kind")
        texts = [_text(part) for part in parts]
        try:
            return template_message(message, texts, has_part_lists=self._has_part_lists)
        except ValueError as err:
            raise NotTokenized(str(err)) from err


def _text(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
    if not isinstance(text, str):
        raise NotTokenized("messages with media need a render endpoint")
    return text


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as err:
        raise TokenizerUnusable(f"{file}: cannot read it: {err}") from err
    return config if isinstance(config, dict) else {}
