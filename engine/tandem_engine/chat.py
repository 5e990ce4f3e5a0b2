"""Renders chat messages to a prompt with the Jinja template of the model directory.

The template is read from `chat_template.jinja` or `tokenizer_config.json` and runs in a sandbox.
Content is text or a list of text parts; other parts are refused.

Errors: `ApiError` for messages that cannot be rendered; `ChatTemplateUnusable` at start.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from tandem_contract.chat_messages import template_message
from tandem_contract.chat_templates import (
    CONFIG_FILE,
    TEMPLATE_FILE,
    special_tokens,
    template_environment,
    template_source,
)

from .body import ApiError
from .types import EngineError


class ChatTemplateUnusable(EngineError):
    """The model's chat template or tokenizer_config.json is malformed; the message says where."""


class ChatTemplate:
    """The chat template of a model directory; without one, every chat request is refused."""

    def __init__(self, directory: Path) -> None:
        """Raises ChatTemplateUnusable."""
        config = _read_config(directory / CONFIG_FILE)
        self._tokens = special_tokens(config)
        source = template_source(directory / TEMPLATE_FILE, config)
        try:
            self._template = None if source is None else template_environment().from_string(source)
        except jinja2.TemplateSyntaxError as err:
            raise ChatTemplateUnusable(
                f"{directory}: chat template, line {err.lineno}: {err.message}"
            ) from err

    @property
    def exists(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """The prompt of `messages`; `options` are further variables of the template.

        Raises ApiError when there is no template, a message has no role or a part that is not
        text, or the template refuses.
        """
        if self._template is None:
            raise ApiError(
                400,
                f"this model has no chat template: use /v1/completions, or put {TEMPLATE_FILE}"
                " in the model's directory",
            )
        plain = [_plain(index, message) for index, message in enumerate(messages)]
        try:
            return self._template.render({**self._tokens, **options, "messages": plain})
        # A template may fail on any unexpected message: that is the request's error, not ours.
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as err:
            raise ApiError(400, f"the chat template refused: {err}", param="messages") from err


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as err:
        raise ChatTemplateUnusable(f"{file}: cannot read it: {err}") from err
    if not isinstance(config, dict):
        raise ChatTemplateUnusable(f"{file}: not a JSON object")
    return config


def _plain(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as the template takes it, with its content as one string."""
    where = f"messages[{index}]"
    if not isinstance(message.get("role"), str):
        raise ApiError(400, f"{where}.role is missing or not a string", param="messages")
    content = message.get("content")
    parts = [content] if isinstance(content, str) else content or []
    if not isinstance(parts, list):
        raise ApiError(
            400, f"{where}.content is neither a string nor a list of parts", param="messages"
        )
    texts = [_part(f"{where}.content[{i}]", part) for i, part in enumerate(parts)]
    try:
        return template_message(message, texts, has_part_lists=False)
    except ValueError as err:
        raise ApiError(400, f"{where}: {err}", param="messages") from err


def _part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(text, str):
        problem = f"of type {kind!r}" if isinstance(kind, str) and kind != "text" else "malformed"
        raise ApiError(
            400, f'{where} is {problem}: this engine takes {{"type": "text", "text": …}} only',
            param="messages",
        )  # fmt: skip
    return text
