"""A chat whose engine reads reasoning and tool calls goes on at an engine that parses tokens."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tandem_contract.request_kinds import RequestKind
from tandem_http1.answers import MAX_ANSWER
from tandem_sidecar.settings import Patience

from ..conftest import Harness
from ..peers import Turn, hangs
from . import answers
from .answers import TOOL, read
from .parsing import DERENDER, GENERATE, LENGTH, RENDER, FailsWhile, ParsingEngine
from .test_alternates import Pods, pods, two_pods

__all__ = ["pods"]
ERROR = b'data: {"error"'


async def ask(pods: Pods, **more: Any) -> bytes:
    body = {"tools": [TOOL], "max_tokens": 50, "temperature": 1.0, **more}
    status, stream = await pods.ask(RequestKind.CHAT, **body)
    assert status == 200
    return stream


def as_read(stream: bytes) -> answers.Json:
    return answers.comparable(read([stream]))


@pytest.mark.parametrize("joined", [(1,), (2, 1, 3)])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"keeps_ids": True},
        {"max_tokens": 11},
        {"max_tokens": 16},
        {"stream_options": None},
        {"tools": []},
    ],
    ids=["plain", "ids", "cut in the call", "default limit", "without usage", "without tools"],
)
async def test_it_goes_on_after_any_token(
    pods: Pods, joined: tuple[int, ...], more: dict[str, Any]
) -> None:
    first, second = pods.first.decode, pods.second.decode
    first.script = ParsingEngine("first", joined=joined)
    whole = as_read(await ask(pods, **more))
    second.script = ParsingEngine("other", joined=joined)
    for after in range(1, min(LENGTH, more.get("max_tokens", LENGTH))):
        first.script = ParsingEngine("first", after=after, joined=joined)
        got = as_read(await ask(pods, **more))
        assert got == whole, after
    asked = [request.target for request in second.requests]
    assert asked.count(RENDER) == asked.count(GENERATE) > 0
    assert asked.count(DERENDER) > asked.count(GENERATE)


async def test_an_engine_that_does_not_parse_tokens_generates_the_answer_again(pods: Pods) -> None:
    first, second = pods.first.decode, pods.second.decode
    first.script = ParsingEngine("first")
    whole = as_read(await ask(pods, temperature=0))
    for refusing in (
        ParsingEngine("other", refuses=RENDER),
        ParsingEngine("other", more=(("structured_outputs", {"structural_tag": "{}"}),)),
        ParsingEngine("other", more=(("a_parameter_of_tomorrow", 1),)),
        ParsingEngine("other", more=(("skip_special_tokens", True),)),
    ):
        second.script = refusing
        first.script = ParsingEngine("first", after=10)
        assert as_read(await ask(pods, temperature=0)) == whole
        assert second.requests[-1].target == "/v1/chat/completions"


@pytest.mark.parametrize("refused", [RENDER, GENERATE, DERENDER])
async def test_without_that_a_drawn_answer_ends_with_the_reason(pods: Pods, refused: str) -> None:
    pods.second.decode.script = ParsingEngine("other", refuses=refused)
    pods.first.decode.script = ParsingEngine("first", after=10)
    stream = await ask(pods)
    assert ERROR in stream
    if refused == RENDER:
        assert b"the engine does not parse tokens (403" in stream
    assert b"data: [DONE]" not in stream


async def test_what_derender_cannot_do_is_generated_again(pods: Pods) -> None:
    first, second = pods.first.decode, pods.second.decode
    second.script = ParsingEngine("other")
    for more in ({"logprobs": True}, {"stop": ["z"]}):
        first.script = ParsingEngine("first", after=10)
        assert ERROR not in await ask(pods, temperature=0, **more)
        assert [each.target for each in second.requests] == ["/v1/chat/completions"]
        second.requests.clear()


@pytest.mark.parametrize("wrong", [b"[]", b'{"sampling_params":{}}'])
@pytest.mark.parametrize("temperature", [0, 1])
async def test_a_rendered_chat_of_another_shape_is_not_continued(
    pods: Pods, wrong: bytes, temperature: float
) -> None:
    pods.first.decode.script = ParsingEngine("first", after=10)
    pods.second.decode.script = ParsingEngine("other", wrong=(RENDER, wrong))
    stream = await asyncio.wait_for(ask(pods, temperature=temperature), 20)
    assert (ERROR in stream) == bool(temperature)
    assert (b"cannot be read" in stream) == bool(temperature)


@pytest.mark.parametrize(
    "wrong", [b"[]", b'{"chunk":{"choices":[{"index":0,"delta":{}}]}}', b'{"stream_state":{}}']
)
async def test_parsed_tokens_of_another_shape_end_the_stream(pods: Pods, wrong: bytes) -> None:
    pods.first.decode.script = ParsingEngine("first", after=10)
    pods.second.decode.script = ParsingEngine("other", wrong=(DERENDER, wrong))
    stream = await asyncio.wait_for(ask(pods), 20)
    assert ERROR in stream
    assert b"cannot be read" in stream


@pytest.mark.parametrize("path", [RENDER, DERENDER])
async def test_a_client_that_leaves_ends_all_requests(pods: Pods, path: str) -> None:
    pods.first.decode.script = ParsingEngine("first", after=10)
    pods.second.decode.script = failing = FailsWhile(path)
    asking = asyncio.create_task(ask(pods))
    await asyncio.wait_for(failing.asked.wait(), 10)
    asking.cancel()
    await asyncio.wait_for(failing.is_left.wait(), 10)


async def test_an_answer_above_the_limit_is_not_read_to_its_end(pods: Pods) -> None:
    is_left = asyncio.Event()

    async def sends_without_end(turn: Turn) -> None:
        if turn.request.target != RENDER:
            await ParsingEngine("other")(turn)
            return
        turn.stream()
        try:
            while not turn.gone.is_set():
                turn.chunk(bytes(MAX_ANSWER // 8))
                await turn.writer.drain()
        finally:
            is_left.set()

    pods.first.decode.script = ParsingEngine("first", after=10)
    pods.second.decode.script = sends_without_end
    assert b"exceeds" in await asyncio.wait_for(ask(pods), 30)
    await asyncio.wait_for(is_left.wait(), 10)


@pytest.mark.parametrize("path", [RENDER, DERENDER])
async def test_an_engine_with_an_error_is_named_as_such(pods: Pods, path: str) -> None:
    pods.first.decode.script = ParsingEngine("first", after=10)
    pods.second.decode.script = ParsingEngine("other", refuses=path, status=500)
    stream = await ask(pods)
    assert ERROR in stream
    assert b"answered with an error (500 for " in stream


@pytest.mark.parametrize("path", [RENDER, DERENDER])
async def test_an_engine_that_hangs_is_left(harness: Harness, tmp_path: Path, path: str) -> None:
    quick = {"silence_timeout": 0.5, "resume_patience": Patience(0.2, 0.2)}
    async with two_pods(harness, tmp_path, resume=True, **quick) as pods:
        pods.first.decode.script = ParsingEngine("first", after=10)
        pods.second.decode.script = failing = FailsWhile(path)
        pods.second.decode.health = hangs
        assert ERROR in await asyncio.wait_for(ask(pods), 20)
        await asyncio.wait_for(failing.is_left.wait(), 10)
