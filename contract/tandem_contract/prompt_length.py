"""Whether the text of a prompt can fit a model. Pure.

    length = engine_length(models)                                  by an engine's /v1/models
    problem = length_problem(kind, members, len(body), length)      the error, or None

The rule is vLLM's own (`TokenizeParams._text_len_check`): a text of more characters than
`max_model_len` of the longest tokens is refused without being tokenized. The EPP, the router and
the sidecar apply it before an engine gets the request. Who has a tokenizer knows its longest token;
others assume `LONGEST_TOKEN`. Images and other media are no text.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw

from .request_kinds import RequestKind

LONGEST_TOKEN: Final = 256
"""Characters of the longest token of any model. The vocabularies of Llama 3, Qwen, DeepSeek and
gpt-oss end at 128 characters: runs of spaces or of one sign. Too low: prompts that fit are refused.
Too high: more prompts that cannot fit reach an engine, which refuses them itself."""


EXHAUSTING: Final = 1024 * 1024
"""Characters of a text, about 250,000 tokens, that may keep an engine's tokenizer busy until its
health check fails. Smaller bodies are not searched for their text. Too low: long prompts get no
second chance when a pod hangs for another reason. Too high: one request can hang a pod of each
pool."""


LIST_SECONDS: Final = 60.0
"""Seconds between two looks at the list of models of an engine that stays healthy. Too long: a text
is not refused for that long after a list that did not come."""


class PromptText(NamedTuple):
    """Characters of a prompt; of several prompts in one request, of the longest."""

    total: int = 0
    """In all turns of the conversation."""
    certain: int = 0
    """Those that every chat template renders: of the system and of users, without white space at
    the ends. Templates may leave out what models said before, such as their thoughts."""


class _Model(msgspec.Struct):
    max_model_len: int | None = None
    parent: str | None = None
    """The model of a LoRA adapter."""


class _Models(msgspec.Struct):
    data: list[_Model]


class _Part(msgspec.Struct):
    text: str = ""


class _Turn(msgspec.Struct):
    role: str = "user"
    content: str | list[_Part | str] | None = None


_TURNS_IN: Final = {
    RequestKind.CHAT: ("messages",),
    RequestKind.RESPONSES: ("instructions", "input"),
    RequestKind.MESSAGES: ("system", "messages"),
}
"""The members that hold a conversation, or a text that stands for one turn."""
_models: Final = (msgspec.json.Decoder(_Models),)
_RENDERED: Final = frozenset({"system", "developer", "user"})
_prompt: Final = (msgspec.json.Decoder(str), msgspec.json.Decoder(list[str]))
_turns: Final = (msgspec.json.Decoder(str), msgspec.json.Decoder(list[_Turn]))
_parts: Final = (msgspec.json.Decoder(str), msgspec.json.Decoder(list[_Part]))
_SHORTENED: Final = frozenset(
    {"chat_template", "prompt_embeds", "truncate_prompt_tokens", "truncation"}
)
"""Members with which an engine may compute less than the text of the request."""


def prompt_text(kind: RequestKind, members: Mapping[str, Raw]) -> PromptText:
    """The text in a request's body. What cannot be read counts nothing: the engine refuses it."""
    text = _text(kind, members)
    if _SHORTENED.isdisjoint(members):
        return text
    return text._replace(certain=0)


def _text(kind: RequestKind, members: Mapping[str, Raw]) -> PromptText:
    match kind:
        case RequestKind.COMPLETIONS:
            return _longest(_decode(_prompt, members.get("prompt")))
        case RequestKind.GENERATE:
            # Its prompt is token ids, which no tokenizer reads.
            return PromptText()
        case _:
            total = certain = 0
            for name in _TURNS_IN[kind]:
                for role, text in _texts(name, members.get(name)):
                    total += len(text)
                    certain += len(text.strip()) if role in _RENDERED else 0
            return PromptText(total, certain)


def certain_text(kind: RequestKind, members: Mapping[str, Raw], size: int) -> int:
    """`PromptText.certain` of a body of `size` bytes; 0 if it is too small to hold up an engine."""
    return prompt_text(kind, members).certain if size > EXHAUSTING else 0


def length_problem(
    kind: RequestKind, members: Mapping[str, Raw], size: int, max_model_len: int | None
) -> str | None:
    """The error for a body of `size` bytes whose text cannot fit; None: it may. Only a body that is
    itself longer than the longest text is searched for it."""
    if over_length(size, max_model_len) is None:
        return None
    return over_length(certain_text(kind, members, size), max_model_len)


def over_length(
    characters: int, max_model_len: int | None, longest_token: int = LONGEST_TOKEN
) -> str | None:
    """The error for a prompt with a text of so many characters; None: it may fit.

    `max_model_len` is in tokens (None: not known), `longest_token` in characters.
    """
    if max_model_len is None or characters <= (limit := max_model_len * longest_token):
        return None
    return (
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt"
        f" contains {characters} characters, and {max_model_len} tokens have at most {limit}."
        " Please reduce the length of the prompt."
    )


def engine_length(models: bytes) -> int | None:
    """Tokens of the longest prompt and answer that an engine takes, by its list of models; None:
    not known, because a model has no `max_model_len`. LoRA adapters have that of their model."""
    listed = _decode(_models, Raw(models))
    if listed is None:
        return None
    return longest_length(model.max_model_len for model in listed.data if model.parent is None)


def longest_length(lengths: Iterable[int | None]) -> int | None:
    """The longest of the lengths; None: one is not known, or there is none."""
    longest = 0
    for length in lengths:
        if length is None:
            return None
        longest = max(longest, length)
    return longest or None


def _decode(decoders: tuple[msgspec.json.Decoder[Any], ...], raw: Raw | None) -> Any:
    """What the first decoder that can read `raw` makes of it; None: none can."""
    if raw is None:
        return None
    for decoder in decoders:
        try:
            return decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    return None


def _longest(prompts: str | list[str] | None) -> PromptText:
    texts = prompts if isinstance(prompts, list) else [prompts or ""]
    longest = max(map(len, texts), default=0)
    return PromptText(longest, longest)


def _texts(member: str, raw: Raw | None) -> list[tuple[str, str]]:
    """Role and text of each turn, or part of one, of a member."""
    if member in ("instructions", "system"):
        content = _decode(_parts, raw)
        turns = [_Turn("system", content)] if isinstance(content, str | list) else []
    else:
        value = _decode(_turns, raw)
        turns = [_Turn(content=value)] if isinstance(value, str) else value
        turns = turns if isinstance(turns, list) else []
    return [
        (turn.role, part if isinstance(part, str) else part.text)
        for turn in turns
        for part in ([turn.content] if isinstance(turn.content, str) else turn.content or ())
    ]
