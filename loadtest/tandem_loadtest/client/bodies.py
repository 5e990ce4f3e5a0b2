"""The JSON body of a request, for each API.

Fields that only vLLM has: `ignore_eos` and `return_token_ids`, sent if asked for; the messages API
has neither, the responses API no token ids.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from tandem_contract.request_kinds import SAMPLING_PARAMS, RequestKind

from ..calls import Call, Message, Prompt
from .settings import ClientSettings

_Members = dict[str, Any]
_USAGE: Final = {"include_usage": True}


def body_of(call: Call, kind: RequestKind, settings: ClientSettings) -> _Members:
    """The JSON object to post to the API `kind`."""
    members: _Members = {"model": call.model or settings.model}
    members |= _MEMBERS[kind](call, settings)
    if call.stream:
        members["stream"] = True
    extra = settings.extra_body
    if SAMPLING_PARAMS in members and isinstance(extra.get(SAMPLING_PARAMS), Mapping):
        extra = {**extra, SAMPLING_PARAMS: members[SAMPLING_PARAMS] | extra[SAMPLING_PARAMS]}
    return members | dict(extra)


def asks_usage(settings: ClientSettings) -> bool:
    """Whether streams are asked for usage, where the API sends it only then."""
    options = settings.extra_body.get("stream_options", _USAGE)
    return isinstance(options, Mapping) and options.get("include_usage") is True


def _completions(call: Call, settings: ClientSettings) -> _Members:
    return {"prompt": call.prompt, **_openai(call, settings)}


def _chat(call: Call, settings: ClientSettings) -> _Members:
    return {"messages": _as_messages(call.prompt), **_openai(call, settings)}


def _responses(call: Call, settings: ClientSettings) -> _Members:
    # Nothing is stored: the server's store of responses would grow with every request.
    members: _Members = {"input": call.prompt, "max_output_tokens": call.max_tokens, "store": False}
    return members | _sampling(call)


def _messages(call: Call, settings: ClientSettings) -> _Members:
    prompt = _as_messages(call.prompt)
    # This API has the system prompt outside of the messages.
    system = [m.content for m in prompt if isinstance(m, Message) and m.role == "system"]
    members: _Members = {"system": "\n".join(system)} if system else {}
    messages = [m for m in prompt if not (isinstance(m, Message) and m.role == "system")]
    return members | {"messages": messages, "max_tokens": call.max_tokens, "temperature": 0}


def _generate(call: Call, settings: ClientSettings) -> _Members:
    sampling = {"max_tokens": call.max_tokens, **_sampling(call)}
    return {"token_ids": call.prompt, SAMPLING_PARAMS: sampling, **_usage(call)}


def _as_messages(prompt: Prompt) -> tuple[Message, ...] | tuple[int, ...]:
    return (Message("user", prompt),) if isinstance(prompt, str) else prompt


def _openai(call: Call, settings: ClientSettings) -> _Members:
    members: _Members = {"max_tokens": call.max_tokens, **_sampling(call), **_usage(call)}
    if settings.return_token_ids:
        members["return_token_ids"] = True
    return members


def _sampling(call: Call) -> _Members:
    return {"temperature": 0, "ignore_eos": True} if call.ignore_eos else {"temperature": 0}


def _usage(call: Call) -> _Members:
    return {"stream_options": _USAGE} if call.stream else {}


_MEMBERS: Final[Mapping[RequestKind, Callable[[Call, ClientSettings], _Members]]] = {
    RequestKind.COMPLETIONS: _completions,
    RequestKind.CHAT: _chat,
    RequestKind.RESPONSES: _responses,
    RequestKind.MESSAGES: _messages,
    RequestKind.GENERATE: _generate,
}
