"""The types of what is read of an event that is compared or edited.

    check_chunk(data)     an event of completions or a chat
    check_typed(data)     one of messages or responses
    check_usage(data)     the usage in a chunk

    read_rendered(data)   what an engine makes of a chat
    read_tokens(data)     an event of tokens that are not parsed
    read_parsed(data)     what such tokens are parsed to; `read_delta`, `read_state`: parts of it

They raise one of `bodies.parse.UNREADABLE`. Code that reads the event's dictionary afterwards finds
what the API says, so that it needs no handler for what an engine may write instead. Not compiled:
msgspec needs the annotations of the structs, which a compiled class loses.
"""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw


class _FunctionShape(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallShape(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _FunctionShape | None = None


class _DeltaShape(msgspec.Struct):
    tool_calls: list[_CallShape] | None = None


class _ChoiceShape(msgspec.Struct):
    index: int
    text: str | None = None
    delta: _DeltaShape | None = None
    token_ids: list[int] | None = None
    logprobs: dict[str, Any] | list[Any] | None = None
    finish_reason: str | None = None


class _ChunkShape(msgspec.Struct):
    choices: list[_ChoiceShape]


class _TypedShape(msgspec.Struct):
    type: str
    delta: str | dict[str, Any] | None = None
    content_block: dict[str, Any] | None = None
    item: dict[str, Any] | None = None
    part: dict[str, Any] | None = None
    response: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    logprobs: dict[str, Any] | list[Any] | None = None
    sequence_number: int = 0


TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]


class _RenderedShape(msgspec.Struct):
    token_ids: list[TokenId]
    sampling_params: Raw
    features: Any = None


class _DetailsShape(msgspec.Struct):
    cached_tokens: int | None = None


class _UsageShape(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _DetailsShape | None = None


class _TokensShape(msgspec.Struct):
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    stop_reason: TokenId | str | None = None


class _TokensChunkShape(msgspec.Struct):
    choices: list[_TokensShape] | None = None
    usage: _UsageShape | None = None


class _ParsedShape(msgspec.Struct):
    chunk: Raw
    stream_state: Raw


class _ParsedChoiceShape(msgspec.Struct):
    delta: dict[str, Any]


class _ParsedChunkShape(msgspec.Struct):
    choices: Annotated[list[_ParsedChoiceShape], Meta(min_length=1, max_length=1)]


class _StateShape(msgspec.Struct):
    tools_streamed: bool


check_chunk: Final = msgspec.json.Decoder(_ChunkShape).decode
check_typed: Final = msgspec.json.Decoder(_TypedShape).decode
check_usage: Final = msgspec.json.Decoder(_UsageShape).decode
read_rendered: Final = msgspec.json.Decoder(_RenderedShape).decode
read_tokens: Final = msgspec.json.Decoder(_TokensChunkShape).decode
read_parsed: Final = msgspec.json.Decoder(_ParsedShape).decode
read_delta: Final = msgspec.json.Decoder(_ParsedChunkShape).decode
read_state: Final = msgspec.json.Decoder(_StateShape).decode
