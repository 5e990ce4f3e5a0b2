"""What a request's body gives to tokenize. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Raw

from tandem_contract.request_kinds import RequestKind

from ..block_keys import TokenizedPrompt
from . import NotTokenized

_TEMPLATE_OPTIONS: Final = ("documents", "reasoning_effort")
"""Members of a chat request that its template reads beside messages and tools, in vLLM."""
_TEXT_PARTS: Final = ("input_text", "output_text", "text")


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """The prompt of a completion."""

    text: str
    add_special_tokens: bool
    cache_salt: str | None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The messages of a chat request, and the variables of its template."""

    messages: tuple[Mapping[str, Any], ...]
    options: Mapping[str, Any]
    add_special_tokens: bool
    cache_salt: str | None


class _Ids(msgspec.Struct):
    prompt: Raw = Raw()
    token_ids: Raw = Raw()
    cache_salt: str | None = None
    truncate_prompt_tokens: Raw | None = None


class _Named(msgspec.Struct):
    model: str | None = None


class _Completion(msgspec.Struct):
    prompt: str
    add_special_tokens: bool = True
    cache_salt: str | None = None
    truncate_prompt_tokens: Raw | None = None


class _Chat(msgspec.Struct):
    messages: tuple[dict[str, Any], ...]
    tools: list[Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[Any] | None = None
    reasoning_effort: str | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: Raw | None = None


class _InputPart(msgspec.Struct):
    type: str
    text: str


class _InputItem(msgspec.Struct):
    """An input item of a request for a response that is a message."""

    role: str
    content: str | tuple[_InputPart, ...]
    type: str = "message"
    status: str = "completed"


class _Response(msgspec.Struct):
    input: str | tuple[_InputItem, ...]
    instructions: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    previous_response_id: str | None = None
    prompt: Raw | None = None
    reasoning: Raw | None = None
    tools: tuple[Raw, ...] | None = None
    truncation: str | None = "disabled"


_named: Final = msgspec.json.Decoder(_Named)
_response: Final = msgspec.json.Decoder(_Response)
_ids: Final = msgspec.json.Decoder(_Ids)
_id_list: Final = msgspec.json.Decoder(list[int])
_completion: Final = msgspec.json.Decoder(_Completion)
_chat: Final = msgspec.json.Decoder(_Chat)


def named_model(body: bytes) -> str | None:
    """The model that the body names."""
    try:
        return _named.decode(body).model
    except _UNREADABLE:
        return None


def given_ids(kind: RequestKind, body: bytes) -> TokenizedPrompt | None:
    """The prompt, if the body holds it as token ids. Raises NotTokenized."""
    if kind not in (RequestKind.COMPLETIONS, RequestKind.GENERATE):
        return None
    try:
        fields = _ids.decode(body)
        raw = bytes(fields.prompt if kind is RequestKind.COMPLETIONS else fields.token_ids)
        if not raw.startswith(b"["):
            return None
        _refuse_truncation(fields)
        return TokenizedPrompt(_id_list.decode(raw), cache_salt=fields.cache_salt)
    except _UNREADABLE as err:
        # Several prompts, or a body that the engine will refuse.
        raise NotTokenized("the prompt is not one list of token ids") from err


def text_prompt(kind: RequestKind, body: bytes) -> TextPrompt | ChatPrompt:
    """The text to tokenize with a model directory's files. Raises NotTokenized."""
    try:
        if kind is RequestKind.COMPLETIONS:
            completion = _completion.decode(body)
            _refuse_truncation(completion)
            return TextPrompt(
                completion.prompt, completion.add_special_tokens, completion.cache_salt
            )
        if kind is RequestKind.CHAT:
            return _chat_prompt(_chat.decode(body))
        if kind is RequestKind.RESPONSES:
            return _response_prompt(_response.decode(body))
    except _UNREADABLE as err:
        raise NotTokenized("the body is not understood") from err
    raise NotTokenized(f"requests of kind {kind} need a render endpoint")


def _refuse_truncation(fields: _Ids | _Completion | _Chat) -> None:
    """Raises NotTokenized where the engine computes another prompt than the body's."""
    if fields.truncate_prompt_tokens is not None:
        raise NotTokenized("how much the engine cuts off depends on its limits")


def _chat_prompt(chat: _Chat) -> ChatPrompt:
    _refuse_truncation(chat)
    if chat.chat_template is not None or chat.continue_final_message:
        raise NotTokenized("the request has a chat template or an unfinished message of its own")
    options = {name: value for name in _TEMPLATE_OPTIONS if (value := getattr(chat, name))}
    options |= chat.chat_template_kwargs or {}
    options["add_generation_prompt"] = chat.add_generation_prompt
    options["tools"] = chat.tools
    return ChatPrompt(chat.messages, options, chat.add_special_tokens, chat.cache_salt)


def _response_prompt(request: _Response) -> ChatPrompt:
    """The messages that vLLM makes of a request for a response (its `construct_input_messages`)."""
    if request.previous_response_id is not None or request.prompt is not None:
        raise NotTokenized("only the engine has what the request refers to")
    if request.truncation != "disabled":
        raise NotTokenized("how much the engine cuts off depends on its limits")
    if request.reasoning is not None or request.tools:
        raise NotTokenized("how tools and reasoning are rendered is known to the engine alone")
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        messages += map(_response_message, request.input)
    options = {**(request.chat_template_kwargs or {}), "add_generation_prompt": True, "tools": None}
    return ChatPrompt(tuple(messages), options, False, request.cache_salt)


def _response_message(item: _InputItem) -> dict[str, Any]:
    if item.type != "message" or item.status != "completed":
        raise NotTokenized("only complete messages are rendered here")
    if isinstance(item.content, str):
        return {"role": item.role, "content": item.content}
    if any(part.type not in _TEXT_PARTS for part in item.content):
        raise NotTokenized("messages with media need a render endpoint")
    if item.role == "assistant" and len(item.content) != 1:
        raise NotTokenized("which part of an answer the engine takes is known to it alone")
    texts = [{"type": "text", "text": part.text} for part in item.content]
    return {"role": item.role, "content": texts if item.role != "assistant" else texts[0]["text"]}


_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The exceptions that decoding JSON raises."""
