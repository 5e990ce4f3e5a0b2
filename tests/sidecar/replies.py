"""What the SDKs make of every content of an answer: the parts of it, and its usage.

    reply = await REPLIES[kind](server, content, stream)

A streamed answer is put together by the SDK itself, where it can do so.
"""

import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

import openai

from tandem_contract.request_kinds import RequestKind

from .fake_vllm import ARGUMENTS, MODEL, TOOL, WORDS, Content
from .sdks import PROMPT, Server, anthropic_client, openai_client


@dataclass(frozen=True)
class Reply:
    """The parts of an answer."""

    texts: tuple[str, ...] = ()
    """Of each choice that has one."""
    reasoning: str = ""
    call: tuple[str, Any] | None = None
    """Name and arguments of the tool that is called."""
    usage: tuple[int, int] = (40, 3)
    """Tokens of the prompt and of the answer."""


_TEXT: Final = "".join(WORDS)
EXPECTED: Final[Mapping[Content, Reply]] = {
    Content.TEXT: Reply((_TEXT,)),
    Content.CHOICES: Reply((_TEXT, _TEXT)),
    Content.CALL: Reply(call=(TOOL, json.loads("".join(ARGUMENTS)))),
    Content.REASONING: Reply(reasoning=_TEXT),
}
_SCHEMA: Final = {"type": "object", "properties": {"far": {"type": "boolean"}}}
_FUNCTION: Final = {"name": TOOL, "parameters": _SCHEMA}
FIELDS: Final[Mapping[RequestKind, Mapping[Content, Mapping[str, Any]]]] = {
    RequestKind.COMPLETIONS: {Content.TEXT: {}, Content.CHOICES: {"n": 2}},
    RequestKind.CHAT: {
        Content.TEXT: {},
        Content.CHOICES: {"n": 2},
        Content.CALL: {"tools": [{"type": "function", "function": _FUNCTION}]},
        Content.REASONING: {"reasoning_effort": "low"},
    },
    RequestKind.RESPONSES: {
        Content.TEXT: {},
        Content.CALL: {"tools": [{"type": "function", "strict": False, **_FUNCTION}]},
        Content.REASONING: {"reasoning": {"effort": "low"}},
    },
    RequestKind.MESSAGES: {
        Content.TEXT: {},
        Content.CALL: {"tools": [{"name": TOOL, "input_schema": _SCHEMA}]},
        Content.REASONING: {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    },
}
"""What asks each API for each content that it has."""
_MAX_TOKENS: Final = 2048
_USAGE_AT_END: Final = {"stream_options": {"include_usage": True}}


async def _completions(server: Server, content: Content, stream: bool) -> Reply:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": _MAX_TOKENS}
    asked |= FIELDS[RequestKind.COMPLETIONS][content]
    async with openai_client(server) as client:
        if not stream:
            whole = await client.completions.create(**asked)
            return _reply(whole.usage, texts=tuple(choice.text for choice in whole.choices))
        texts: dict[int, str] = {}
        usage = None
        async for chunk in await client.completions.create(**asked, **_USAGE_AT_END, stream=True):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
            usage = chunk.usage
        return _reply(usage, texts=tuple(texts.values()))


async def _chat(server: Server, content: Content, stream: bool) -> Reply:
    messages = [{"role": "user", "content": PROMPT}]
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": _MAX_TOKENS}
    asked |= FIELDS[RequestKind.CHAT][content]
    async with openai_client(server) as client:
        if stream:
            async with client.chat.completions.stream(**asked, **_USAGE_AT_END) as events:
                await events.until_done()
                # Its final completion is an error if the answer ends by its length.
                answer: Any = events.current_completion_snapshot
        else:
            answer = await client.chat.completions.create(**asked)
    texts = tuple(c.message.content for c in answer.choices if c.message.content)
    message = answer.choices[0].message
    calls = [(call.function.name, json.loads(call.function.arguments))
             for call in message.tool_calls or ()]  # fmt: skip
    return _reply(
        answer.usage,
        texts=texts,
        reasoning=(message.model_extra or {}).get("reasoning") or "",
        call=calls[0] if calls else None,
    )


async def _responses(server: Server, content: Content, stream: bool) -> Reply:
    asked: dict[str, Any] = {"model": MODEL, "input": PROMPT, "max_output_tokens": _MAX_TOKENS}
    asked |= FIELDS[RequestKind.RESPONSES][content]
    async with openai_client(server) as client:
        if stream:
            async with client.responses.stream(**asked) as events:
                answer: Any = await events.get_final_response()
        else:
            answer = await client.responses.create(**asked)
    (item,) = answer.output
    usage = answer.usage
    if item.type == "function_call":
        return _reply(usage, call=(item.name, json.loads(item.arguments)))
    text = item.content[0].text
    return _reply(usage, reasoning=text) if item.type == "reasoning" else _reply(usage, (text,))


async def _messages(server: Server, content: Content, stream: bool) -> Reply:
    messages = [{"role": "user", "content": PROMPT}]
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": _MAX_TOKENS}
    asked |= FIELDS[RequestKind.MESSAGES][content]
    async with anthropic_client(server) as client:
        if stream:
            async with client.messages.stream(**asked) as events:
                answer: Any = await events.get_final_message()
        else:
            answer = await client.messages.create(**asked)
    (block,) = answer.content
    if block.type == "tool_use":
        return _reply(answer.usage, call=(block.name, block.input))
    if block.type == "thinking":
        return _reply(answer.usage, reasoning=block.thinking)
    return _reply(answer.usage, (block.text,))


def _reply(usage: Any, texts: tuple[str, ...] = (), **parts: Any) -> Reply:
    if isinstance(usage, openai.types.CompletionUsage):
        return Reply(texts, usage=(usage.prompt_tokens, usage.completion_tokens), **parts)
    return Reply(texts, usage=(usage.input_tokens, usage.output_tokens), **parts)


REPLIES: Final[
    Mapping[RequestKind, Callable[[Server, Content, bool], Coroutine[Any, Any, Reply]]]
] = {
    RequestKind.COMPLETIONS: _completions,
    RequestKind.CHAT: _chat,
    RequestKind.RESPONSES: _responses,
    RequestKind.MESSAGES: _messages,
}
