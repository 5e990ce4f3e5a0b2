"""Clients as users have them: OpenAI's and Anthropic's own SDKs, and the load client.

    text = await SDKS[kind].ask(server, stream=True)

The text of the whole answer, or the error that the client raises; an SDK must raise one of its own
types (`SDK_ERRORS`).
"""

import ssl
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import anthropic
import openai

from tandem_contract.request_kinds import RequestKind
from tandem_loadtest.calls import Call, Prompt
from tandem_loadtest.client import Client, ClientSettings
from tandem_loadtest.records import Outcome

from .fake_vllm import MODEL, TOKEN_IDS, WORDS

PROMPT: Final = "How far is the harbour? " * 10
SECONDS: Final = 20.0
"""More than any answer takes; a client that waits for so long hangs."""
SDK_ERRORS: Final = (openai.APIError, anthropic.APIError)


class LoadClientError(Exception):
    """The load client counts the answer as failed."""


@dataclass(frozen=True)
class Server:
    """Where the client sends its request."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


Ask = Callable[[Server, str, int, bool], Coroutine[Any, Any, str]]
"""Server, prompt, tokens to generate and whether to stream; returns the text."""


async def _completions(server: Server, prompt: str, tokens: int, stream: bool) -> str:
    async with openai_client(server) as client:
        answer = await client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            stream=stream,
            extra_body=_IGNORE_EOS,
        )
        if not isinstance(answer, openai.AsyncStream):
            return answer.choices[0].text
        return "".join([c.choices[0].text async for c in answer if c.choices])


async def _chat(server: Server, prompt: str, tokens: int, stream: bool) -> str:
    async with openai_client(server) as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=tokens,
            temperature=0,
            stream=stream,
            extra_body=_IGNORE_EOS,
        )
        if not isinstance(answer, openai.AsyncStream):
            return answer.choices[0].message.content or ""
        return "".join([c.choices[0].delta.content or "" async for c in answer if c.choices])


async def _responses(server: Server, prompt: str, tokens: int, stream: bool) -> str:
    async with openai_client(server) as client:
        answer = await client.responses.create(
            model=MODEL,
            input=prompt,
            max_output_tokens=tokens,
            temperature=0,
            stream=stream,
            extra_body=_IGNORE_EOS,
        )
        if not isinstance(answer, openai.AsyncStream):
            return answer.output_text
        return "".join(
            [event.delta async for event in answer if event.type == "response.output_text.delta"]
        )


async def _messages(server: Server, prompt: str, tokens: int, stream: bool) -> str:
    async with anthropic_client(server) as client:
        answer = await client.messages.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=tokens,
            stream=stream,
            extra_body={"temperature": 0},
        )
        if not isinstance(answer, anthropic.AsyncStream):
            return "".join(block.text for block in answer.content if block.type == "text")
        return "".join(
            [
                event.delta.text
                async for event in answer
                if event.type == "content_block_delta" and event.delta.type == "text_delta"
            ]
        )


_IGNORE_EOS: Final = {"ignore_eos": True}
_TLS: Final = ssl.create_default_context()
"""Unused. Each client would make one, which takes longer than its request."""


def anthropic_client(server: Server) -> anthropic.AsyncAnthropic:
    """A client that asks once, and waits for SECONDS."""
    return anthropic.AsyncAnthropic(
        base_url=server.url,
        api_key="none",
        default_headers=server.headers,
        max_retries=0,
        timeout=SECONDS,
        http_client=anthropic.DefaultAsyncHttpxClient(verify=_TLS),
    )


def openai_client(server: Server) -> openai.AsyncOpenAI:
    """The same."""
    return openai.AsyncOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        default_headers=server.headers,
        max_retries=0,
        timeout=SECONDS,
        http_client=openai.DefaultAsyncHttpxClient(verify=_TLS),
    )


SDKS: Final[Mapping[RequestKind, Ask]] = {
    RequestKind.COMPLETIONS: _completions,
    RequestKind.CHAT: _chat,
    RequestKind.RESPONSES: _responses,
    RequestKind.MESSAGES: _messages,
}
"""The SDK of each API that has one."""


async def ask_load_client(server: Server, kind: RequestKind, *, stream: bool) -> str:
    """The text of the scripted answer as the load client reads it. Raises LoadClientError."""
    prompt: Prompt = tuple(range(40)) if kind is RequestKind.GENERATE else PROMPT
    settings = ClientSettings(
        url=server.url, model=MODEL, timeout=SECONDS, headers=server.headers,
        return_token_ids=False,
    )  # fmt: skip
    async with Client(settings) as client:
        result = await client.send(Call(prompt, len(WORDS), stream=stream, kind=kind))
    if result.outcome is Outcome.TIMEOUT:
        raise TimeoutError(result.error)
    if result.outcome is not Outcome.OK:
        raise LoadClientError(result.error)
    if kind is not RequestKind.GENERATE:
        return result.answer.text
    assert result.answer.token_ids is not None
    return "".join(WORDS[TOKEN_IDS.index(token)] for token in result.answer.token_ids)
