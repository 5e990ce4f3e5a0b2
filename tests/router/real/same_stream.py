"""Streams of completions and chats, and whether two are the same to their client."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import pytest

from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_loadtest.client.sse import EventParser

CANARY: Final = "canary-7f3a"
"""A part of prompts that no answer may have."""


def as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """A chat whose only message is the prompt of these completions."""
    chat = {name: value for name, value in body.items() if name != "prompt"}
    return {**chat, "messages": [{"role": "user", "content": body["prompt"]}]}


def _text(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["delta"]["content"]
    return text


@dataclass(frozen=True)
class Streamed:
    """A complete stream."""

    events: Sequence[str]

    @property
    def is_complete(self) -> bool:
        return self.events[-1] == "[DONE]"

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(event) for event in self.events if event != "[DONE]"]

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"]]

    @property
    def text(self) -> str:
        return "".join(map(_text, self.choices))

    @property
    def ends(self) -> list[tuple[object, object]]:
        """What the events say of the answer's end."""
        return [(c["finish_reason"], c["stop_reason"]) for c in self.choices if c["finish_reason"]]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens of prompt, answer and both. How many were cached is the engine's matter."""
        last = [chunk["usage"] for chunk in self.chunks if chunk.get("usage")][-1]
        return last["prompt_tokens"], last["completion_tokens"], last["total_tokens"]

    @property
    def usages(self) -> list[tuple[int, int]]:
        """For each event with a usage: the answer's characters and tokens so far."""
        made, length = [], 0
        for chunk in self.chunks:
            length += sum(len(_text(choice)) for choice in chunk["choices"])
            if chunk.get("usage"):
                made.append((length, chunk["usage"]["completion_tokens"]))
        return made

    def joined(self, name: str) -> list[Any]:
        """The entries of a list of the choices, of all events; a chat has one beside them."""
        return [v for each in (*self.choices, *self.chunks) for v in each.get(name) or ()]

    @property
    def roles(self) -> list[str]:
        """The roles that the deltas of a chat name."""
        deltas = [choice.get("delta", {}) for choice in self.choices]
        return [delta["role"] for delta in deltas if "role" in delta]

    def logprobs(self, name: str) -> list[Any]:
        """The entries of a list of the logprobs, of all events."""
        choices = [choice.get("logprobs") or {} for choice in self.choices]
        return [value for choice in choices for value in choice.get(name, ())]


async def stream(
    http: aiohttp.ClientSession,
    server: str,
    body: dict[str, Any],
    path: str = "",
    headers: Mapping[str, str] | None = None,
) -> Streamed:
    """The answer of the server with this URL. `path`: of the request; empty: that of completions or
    chats, as the body says. `headers`: more than the content's type."""
    data = io.BytesIO(json.dumps(body).encode())
    head = {"content-type": "application/json", **(headers or {})}
    path = path or PATHS[RequestKind.CHAT if "messages" in body else RequestKind.COMPLETIONS]
    async with http.post(server + path, data=data, headers=head) as response:
        content = await response.content.read()
        assert response.status == 200, content
    return read_stream(content)


def read_stream(content: bytes) -> Streamed:
    """The stream with these bytes."""
    return Streamed([event.data.decode() for event in EventParser().feed(content)])


def check_same(got: Streamed, whole: Streamed, case: str) -> None:
    """Fail unless the stream is the one that no engine broke off."""
    assert got.is_complete, (case, got.events[-2:])
    assert len({(chunk["id"], chunk["created"]) for chunk in got.chunks}) == 1, case
    assert got.text == whole.text, case
    assert CANARY not in got.text, case
    for name in ("token_ids", "prompt_token_ids"):
        assert got.joined(name) == whole.joined(name), case
    for name in ("text_offset", "tokens"):
        assert got.logprobs(name) == whole.logprobs(name), case
    numbers = whole.logprobs("token_logprobs")
    assert got.logprobs("token_logprobs") == pytest.approx(numbers, abs=1e-3), case
    assert got.roles == whole.roles, case
    of_chat, expected = got.logprobs("content"), whole.logprobs("content")
    assert [each["token"] for each in of_chat] == [each["token"] for each in expected], case
    numbers = [each["logprob"] for each in expected]
    assert [each["logprob"] for each in of_chat] == pytest.approx(numbers, abs=1e-3), case
    assert got.ends == whole.ends, case
    assert got.counts == whole.counts, case
