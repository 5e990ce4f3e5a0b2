"""A client that asks learns how often its stream moved, and gets the rest as it is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem_contract import headers
from tandem_contract.request_kinds import PATHS, RequestKind

from ..conftest import Harness
from ..peers import Script, Turn
from .scripted import asked, dies
from .test_alternates import two_pods

TOOL = {
    "type": "function",
    "name": "count",
    "parameters": {"type": "object", "properties": {"usage": {"type": "integer"}}},
}
USAGE = {"input_tokens": 3, "output_tokens": 1}
RESPONSE = {"id": "resp-1", "created_at": 1, "tools": [TOOL], "usage": None}
TEXT = {"output_index": 0, "item_id": "text-1"}
STREAMS: dict[RequestKind, list[dict[str, Any]]] = {
    RequestKind.MESSAGES: [
        {"type": "message_start", "message": {"id": "m-1", "content": [], "usage": USAGE}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": '"usage":{"input_tokens":1'},
        },
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": USAGE},
        {"type": "message_stop"},
    ],
    RequestKind.RESPONSES: [
        {"type": "response.created", "response": RESPONSE, "sequence_number": 0},
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {"id": "text-1", "type": "text"},
            "sequence_number": 1,
        },
        {"type": "response.text.delta", **TEXT, "delta": "hi", "sequence_number": 2},
        {
            "type": "response.completed",
            "response": {**RESPONSE, "usage": USAGE},
            "sequence_number": 3,
        },
    ],
}
"""As vLLM writes them: without spaces, members of a usage in this order."""


def sends(kind: RequestKind, after: int | None = None) -> Script:
    """An engine that sends the stream; it dies after so many events."""

    async def script(turn: Turn) -> None:
        turn.stream()
        for event in STREAMS[kind][:after]:
            turn.chunk(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event)))
        await turn.writer.drain()
        if after is None:
            turn.end()
        else:
            dies(turn, b"")

    return script


encode = msgspec.json.encode


def usages(value: Any) -> Iterator[dict[str, Any]]:
    """The usages in an event, removed from it."""
    usage = value.pop("usage", None)
    if usage is not None:
        yield usage
    for name in ("message", "response"):
        if name in value:
            yield from usages(value[name])


@pytest.mark.parametrize("moves", [0, 1])
@pytest.mark.parametrize("kind", STREAMS)
async def test_each_usage_says_it_and_nothing_else_does(
    harness: Harness, tmp_path: Path, kind: RequestKind, moves: int
) -> None:
    async with two_pods(harness, tmp_path, resume=True) as pods:
        pods.first.decode.script = sends(kind, 3 if moves else None)
        pods.second.decode.script = sends(kind)
        asks = {**pods.plan(), headers.RESUMED: "usage"}
        body = {**asked(is_chat=True), "temperature": 0}
        if kind is RequestKind.RESPONSES:
            body = {"model": "m", "input": "hi", "stream": True, "temperature": 0}
        url = pods.first.url(PATHS[kind])
        async with pods.first.http.post(url, json=body, headers=asks) as response:
            stream = await response.read()
    got = [msgspec.json.decode(each.partition(b"data: ")[2]) for each in stream.split(b"\n\n")[:-1]]
    expected = msgspec.json.decode(encode(STREAMS[kind]))
    usages_got = [usage for event in got for usage in usages(event)]
    told = [usage.pop("tandem_resumed") for usage in usages_got]
    assert usages_got == [usage for event in expected for usage in usages(event)]
    assert told[-1] == moves
    assert got == expected
