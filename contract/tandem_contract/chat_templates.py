"""Chat templates of model directories, as engines and tokenizers run them.

If engine and EPP rendered a template differently, the same messages would give two prompts, and the
EPP would look for KV that does not exist.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_FILE: Final = "chat_template.jinja"
"""The template, in a model directory."""
CONFIG_FILE: Final = "tokenizer_config.json"
"""Special tokens, and the template if it has no file of its own."""
_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


def template_source(file: Path, config: Mapping[str, Any]) -> str | None:
    """The template's text, from `file` or from the content of tokenizer_config.json; None without
    one. Of several named ones, the default. Raises OSError, UnicodeDecodeError."""
    # As in transformers, a file of its own wins over the field of tokenizer_config.json.
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name → text of the special tokens that templates use, from tokenizer_config.json."""
    return {name: _token(config[name]) for name in _TOKENS if config.get(name)}


def template_environment() -> ImmutableSandboxedEnvironment:
    """The Jinja environment with the names that chat templates use."""
    # A template comes with the model: the sandbox keeps it from reaching Python's internals.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    # transformers provides these names.
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %} … {% endgeneration %}`, by which training finds the assistant's tokens. A
    prompt has the text of the block; as in transformers, what is set in it is not seen outside."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _token(value: Any) -> str:
    """A special token's text: the configuration has a string or an object with `content`."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escapes, which would reach the model."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)
