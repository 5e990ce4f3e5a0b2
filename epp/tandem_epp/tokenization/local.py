"""Tokenizes with the files of a model directory: tokenizer.json, and the chat template.

Runs in worker threads: the tokenizer itself releases the interpreter's lock. Content is text or a
list of text parts; other parts need a render endpoint, because only the engine knows which
placeholder tokens a medium becomes.
"""

import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from ..backends.block_keys import TokenizedPrompt
from . import NotTokenized, TokenizerUnusable
from .source import ChatPrompt, TextPrompt

_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
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
        config = _read_config(directory / "tokenizer_config.json")
        self._special = {name: _token(config.get(name)) for name in _TOKENS if config.get(name)}
        source = _template_source(directory / "chat_template.jinja", config)
        self._has_part_lists = source is not None and _LISTS_PARTS.search(source) is not None
        try:
            self._template = _environment().from_string(source) if source is not None else None
        except jinja2.TemplateSyntaxError as err:
            message = f"{directory}: chat template, line {err.lineno}: {err.message}"
            raise TokenizerUnusable(message) from err

    def tokenize(self, prompt: TextPrompt | ChatPrompt) -> TokenizedPrompt:
        """Token ids of the prompt. Raises NotTokenized."""
        text = prompt.text if isinstance(prompt, TextPrompt) else self._render(prompt)
        encoding = self._tokenizer.encode(text, add_special_tokens=prompt.add_special_tokens)
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
        """The message with its content in the form that the template takes."""
        content = message.get("content")
        if isinstance(content, str):
            parts = [content]
        elif isinstance(content, list):
            parts = [_text(part) for part in content]
        else:
            return dict(message)
        if self._has_part_lists:
            return {**message, "content": [{"type": "text", "text": text} for text in parts]}
        return {**message, "content": "\n".join(parts)}


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


def _template_source(file: Path, config: Mapping[str, Any]) -> str | None:
    """As in transformers: the file wins over the configuration; of several, the default."""
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _token(value: Any) -> str:
    """A special token's text: the configuration has a string or an object with `content`."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)


def _environment() -> ImmutableSandboxedEnvironment:
    # A template comes with the model: the sandbox keeps it from reaching Python's internals.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # Chat templates use these names, which transformers provides.
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(value: Any, indent: int | None = None) -> str:
    """JSON without Jinja's HTML escapes, which would reach the model."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)
