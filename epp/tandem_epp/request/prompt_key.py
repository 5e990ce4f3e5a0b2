"""The input of the prefix hash: what makes two prompts share KV in an engine, in the same places.

The salt separates from the first block on: the model (a LoRA adapter is a model to clients), the
cache salt, and what chat templates and processors use anywhere in the prompt. The data is hashed
block by block, in the order in which chat templates render it. vLLM's key has the adapter in every
block, the cache salt in the first, and the hash of each media part in the blocks that it covers.

Errors: `BadBody`.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Final

import msgspec
from msgspec import Raw, Struct

from tandem_contract.prefix import token_bytes
from tandem_contract.request_kinds import RequestKind

from .body_fields import BadBody, Members
from .field_types import whole_numbers, wrong_type
from .media import Pieces, read_conversation
from .media_placeholders import with_media

SALT_FIELDS: Final = (
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "add_special_tokens",
    # Effort of reasoning, as chat, responses and messages name it.
    "reasoning_effort",
    "reasoning",
    "thinking",
    "output_config",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "prompt_embeds",
    "truncate_prompt_tokens",
    # Media of a generate request whose place in the prompt only the engine knows.
    "content_parts",
)
"""Members that are part of the salt if they are given and not null."""
_SALT_FIELDS: Final = frozenset(SALT_FIELDS)


class PromptForm(Enum):
    """What a prompt was read from."""

    TEXTS = "texts"
    """Messages that hold texts only, so no rule about media can apply."""
    IDS = "ids"
    """One list of token ids: the data is exact."""
    MEDIA = "media"
    """Messages with media."""
    POOLED = "pooled"
    """The prompts of a request that generates nothing; only their length is read."""
    OTHER = "other"


class PromptKey(Struct, frozen=True):
    """The input of the prefix hash."""

    data: bytes
    """Text as JSON writes it, or four bytes per token id."""
    salt: bytes
    form: PromptForm
    media_parts: int = 0
    """Media in a prompt of the form MEDIA."""


class _Prompt(Struct, frozen=True):
    """A `PromptKey` without the salt."""

    data: bytes
    form: PromptForm
    media_parts: int = 0


def prompt_key(kind: RequestKind, model: str | None, members: Members) -> PromptKey:
    """The key of the request with these members. Raises BadBody, msgspec.DecodeError,
    UnicodeDecodeError or RecursionError for a prompt that cannot be decoded."""
    prompt = _DATA[kind](members)
    return PromptKey(prompt.data, _salt(model, members), prompt.form, prompt.media_parts)


def _salt(model: str | None, members: Members) -> bytes:
    pieces: Pieces = [(model or "").encode()]
    for name in SALT_FIELDS if not _SALT_FIELDS.isdisjoint(members) else ():
        if name in members and bytes(raw := members[name]) != _NULL:
            pieces += (b"\0", name.encode(), b"\0", raw)
    return b"".join(pieces)


_token_ids: Final = msgspec.json.Decoder(list[int])
_list: Final = msgspec.json.Decoder(list[Raw])
_NONE: Final = Raw()
_NULL: Final = b"null"


def _completion_data(members: Members) -> _Prompt:
    return _Prompt(*prompts_data(members, "prompt"))


def prompts_data(members: Members, name: str) -> tuple[bytes, PromptForm]:
    """The data of the member `name`: a text, token ids, or a list of either. Raises as
    `prompt_key`."""
    raw = bytes(members.get(name, _NONE))
    if not raw.startswith(b"["):
        # Without the quotes: the closing one would end the prefix that a longer prompt shares.
        return raw[1:-1], PromptForm.OTHER
    if raw[1:].lstrip()[:1] not in (b'"', b"["):
        return _token_bytes(members, name), PromptForm.IDS
    # Several prompts: hashed one behind the other. `single_engine_reason` keeps them together.
    prompts = (bytes(prompt) for prompt in _list.decode(raw))
    # Whichever of the two the first one is, all are.
    are_texts = raw[1:].lstrip()[:1] == b'"'
    return b"".join(
        _prompt_of_several(prompt, f"{name}[{i}]", are_texts) for i, prompt in enumerate(prompts)
    ), PromptForm.OTHER


def _prompt_of_several(prompt: bytes, name: str, is_text: bool) -> bytes:
    if not prompt.startswith(b'"' if is_text else b"["):
        raise wrong_type(name, prompt, "a text" if is_text else "a list of token ids")
    return prompt[1:-1] if is_text else _token_bytes({name: Raw(prompt)}, name)


def _conversation(*before: str, turns: str) -> Callable[[Members], _Prompt]:
    """Reads the members `before` the turns, in the order in which chat templates render them, and
    the turns."""

    def data(members: Members) -> _Prompt:
        given = (members[name] for name in before if name in members)
        pieces: Pieces = [value for value in given if bytes(value) != _NULL]
        if turns not in members:
            return _Prompt(b"".join(pieces), PromptForm.TEXTS)
        conversation = read_conversation(members[turns], turns)
        form = PromptForm.TEXTS if conversation.is_plain else PromptForm.OTHER
        if conversation.media_parts:
            form = PromptForm.MEDIA
        return _Prompt(b"".join(pieces + conversation.pieces), form, conversation.media_parts)

    return data


def _generate_data(members: Members) -> _Prompt:
    if "token_ids" not in members:
        return _Prompt(b"", PromptForm.OTHER)
    data = _token_bytes(members, "token_ids")
    if "features" in members:
        data = with_media(data, members["features"])
    return _Prompt(data, PromptForm.IDS)


_DATA: Final[Mapping[RequestKind, Callable[[Members], _Prompt]]] = {
    RequestKind.COMPLETIONS: _completion_data,
    RequestKind.CHAT: _conversation("tools", "documents", turns="messages"),
    RequestKind.RESPONSES: _conversation("instructions", "tools", turns="input"),
    RequestKind.MESSAGES: _conversation("system", "tools", turns="messages"),
    RequestKind.GENERATE: _generate_data,
}


def _token_bytes(members: Members, name: str) -> bytes:
    try:
        try:
            ids = _token_ids.decode(members[name])
        except msgspec.ValidationError:
            # The engine also takes ids as 5.0 or "5".
            ids = whole_numbers(name, members[name])
        return token_bytes(ids)
    except OverflowError as err:
        raise BadBody(f"{name}: token ids are whole numbers from 0 to 4294967295") from err
