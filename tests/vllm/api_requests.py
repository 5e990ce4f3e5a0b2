"""Client for every API endpoint that generates tokens: request bodies and response texts.

    kind = KINDS["chat"]
    answer = await ask(http, url + kind.path, kind.body("Tell me"), headers)
    kind.text(answer)

Decoding is greedy and deterministic: two engines of one model give the same text.
"""

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from tandem_loadtest.client.sse import EventParser

from .engines import MODEL_NAME

COUNT: Final = 24
"""Tokens of each answer."""
DONE: Final = "[DONE]"


@dataclass(frozen=True)
class Answer:
    """A complete response; `events` is filled if it was a stream."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    events: list[str] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The events' JSON objects, without the final `[DONE]`."""
        return [json.loads(event) for event in self.events if event != DONE]


@dataclass(frozen=True)
class RequestKind:
    """One API endpoint: how to build a request and read a response."""

    path: str
    fields: Callable[[str], dict[str, Any]]
    """Request fields for a prompt."""
    of_whole: Callable[[Any], str]
    of_chunk: Callable[[Any], str]

    def body(self, prompt: str, **more: Any) -> dict[str, Any]:
        return {"model": MODEL_NAME, **self.fields(prompt), **more}

    def text(self, answer: Answer) -> str:
        """The generated text. Fails unless the status is 200."""
        assert answer.status == 200, answer.body
        if answer.events:
            return "".join(self.of_chunk(chunk) for chunk in answer.chunks)
        return self.of_whole(answer.json)


def _completion(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}


def _chat(prompt: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}


def _responses(prompt: str) -> dict[str, Any]:
    return {"input": prompt, "max_output_tokens": COUNT, "temperature": 0, "ignore_eos": True}


def _messages(prompt: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages, "max_tokens": COUNT, "temperature": 0}


def _generate(prompt: str) -> dict[str, Any]:
    sampling = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    return {"token_ids": [4 + byte for byte in prompt.encode()], "sampling_params": sampling}


def _first(value: Any) -> Any:
    return value["choices"][0] if value.get("choices") else {}


def _joined(choice: Any) -> str:
    return "".join(f"{token} " for token in choice.get("token_ids") or ())


KINDS: Final = {
    "completions": RequestKind(
        "/v1/completions",
        _completion,
        lambda whole: str(_first(whole)["text"]),
        lambda chunk: _first(chunk).get("text") or "",
    ),
    "chat": RequestKind(
        "/v1/chat/completions",
        _chat,
        lambda whole: str(_first(whole)["message"]["content"]),
        lambda chunk: _first(chunk).get("delta", {}).get("content") or "",
    ),
    "responses": RequestKind(
        "/v1/responses",
        _responses,
        lambda whole: "".join(p["text"] for o in whole["output"] for p in o["content"]),
        lambda chunk: chunk["delta"] if chunk["type"] == "response.output_text.delta" else "",
    ),
    "messages": RequestKind(
        "/v1/messages",
        _messages,
        lambda whole: "".join(part["text"] for part in whole["content"]),
        lambda chunk: chunk.get("delta", {}).get("text") or "",
    ),
    "generate": RequestKind(
        "/inference/v1/generate",
        _generate,
        lambda whole: _joined(_first(whole)),
        lambda chunk: _joined(_first(chunk)),
    ),
}


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any] | bytes,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """POST `body` and read the whole response. Raises aiohttp.ClientError if it is cut."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    all_headers = {"content-type": "application/json", **(headers or {})}
    # A file: aiohttp warns of long bytes.
    async with http.post(url, data=io.BytesIO(data), headers=all_headers) as answer:
        content = await answer.read()
    events: list[str] = []
    if answer.content_type == "text/event-stream":
        events = [event.data.decode() for event in EventParser().feed(content)]
    return Answer(answer.status, answer.headers, content, events)


def logprobs(answer: Answer) -> list[float]:
    """The logprob of each token of a completion, whole or streamed."""
    parts = answer.chunks if answer.events else [answer.json]
    choices = [_first(part).get("logprobs") or {} for part in parts]
    return [value for choice in choices for value in choice.get("token_logprobs", ())]


def usage(answer: Answer) -> dict[str, Any]:
    """The usage object at the end of a response."""
    parts = answer.chunks if answer.events else [answer.json]
    [counts] = [part["usage"] for part in parts if part.get("usage")]
    return dict(counts)
