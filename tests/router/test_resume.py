"""A stream whose engine fails goes on at another one, and the client cannot tell (--resume)."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tandem_sidecar.settings import Settings

from ..sidecar.peers import Script, Turn
from ..sidecar.resume.events import DONE, event, usage_event
from .conftest import LOOPBACK, PROMPT, Harness

TOKENS = 8
RESUMES = Settings(listen=LOOPBACK, admin=LOOPBACK, resume=True)
ERROR = b'data: {"error":{"message":"the core died","code":500}}\n\n'
End = Callable[[Turn, bytes], None]
"""Sends the last event, and ends in some way."""


def dies(turn: Turn, last: bytes) -> None:
    turn.chunk(last)
    turn.die()


def reports_an_error(turn: Turn, last: bytes) -> None:
    turn.chunk(last)
    turn.chunk(ERROR)
    turn.chunk(DONE)
    turn.end()


def reports_an_error_at_once(turn: Turn, last: bytes) -> None:
    turn.chunk(last + ERROR + DONE)
    turn.end()


def aborts(turn: Turn, last: bytes) -> None:
    turn.chunk(last)
    turn.chunk(event("", [], finish="abort"))
    turn.chunk(DONE)
    turn.end()


def breaks_within_an_event(turn: Turn, last: bytes) -> None:
    turn.chunk(last + event("lost", [1])[:40])
    turn.die()


def ends_too_early(turn: Turn, last: bytes) -> None:
    turn.chunk(last)
    turn.end()


ENDS = [
    dies,
    reports_an_error,
    reports_an_error_at_once,
    aborts,
    breaks_within_an_event,
    ends_too_early,
]


def generates(after: int | None = None, end: End = dies, *, id: str = "cmpl-a") -> Script:
    """An engine whose next token follows from the one before it; after so many tokens it ends as
    `end` does. Every third token has no text: it is the beginning of the next one's character."""

    async def script(turn: Turn) -> None:
        body = turn.request.json
        prompt, asked = body["prompt"], body.get("return_token_ids")
        last, wanted, pending, unsent = prompt[-1], body["max_tokens"], "", b""
        turn.stream()
        for number in range(wanted):
            if number == after:
                await turn.writer.drain()
                end(turn, unsent)
                return
            if unsent:
                turn.chunk(unsent)
            last = (last * 7 + 3) % 1000
            pending += f"<{last}>"
            is_last = number == wanted - 1
            text = pending if last % 3 or is_last else ""
            pending = "" if text else pending
            ids, first = ([last], prompt if number == 0 else None) if asked else (None, None)
            finish = "length" if is_last else None
            unsent = event(text, ids, first, finish=finish, id=id, created=len(id))
        turn.chunk(unsent)
        if (body.get("stream_options") or {}).get("include_usage"):
            turn.chunk(usage_event(len(prompt), wanted, id=id))
        turn.chunk(DONE)
        turn.end()

    return script


def asked(**more: Any) -> dict[str, Any]:
    options = {"include_usage": True}
    body = {"model": "m", "prompt": PROMPT, "max_tokens": TOKENS, "stream": True}
    return {**body, "stream_options": options, **more}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("split", [False, True])
async def test_the_client_gets_the_stream_of_one_engine(
    harness: Harness, end: End, split: bool
) -> None:
    if split:
        await harness.prefill("p")
    engines = [await harness.decode(f"d-{number}") for number in range(2)]
    await harness.start({"enabled": split}, settings=RESUMES)
    for body in (asked(), asked(return_token_ids=True)):
        for engine in engines:
            engine.script = generates()
        _, whole = await harness.ask(body)
        for after in range(1, TOKENS):
            scripts = [generates(after, end), generates(id="cmpl-of-another")]

            async def fails_first(turn: Turn, scripts: list[Script] = scripts) -> None:
                await scripts.pop(0)(turn)

            for engine in engines:
                engine.script = fails_first
            response, resumed = await harness.ask(body)
            assert not scripts
            assert response.status == 200
            assert without_head(events(resumed)) == without_head(events(whole)), after


@pytest.mark.parametrize("after", [2, 4])
async def test_a_stream_without_another_engine_ends_with_an_error(
    harness: Harness, after: int
) -> None:
    await harness.decode("d-0", generates(after))
    await harness.start({"enabled": False}, settings=RESUMES)
    response, body = await harness.ask(asked())
    assert response.status == 200
    assert "decode failed" in events(body)[-1]["error"]["message"]


async def test_a_stream_that_fails_every_engine_ends_with_an_error(harness: Harness) -> None:
    engines = [await harness.decode(f"d-{n}", generates(2)) for n in range(5)]
    await harness.start({"enabled": False}, settings=RESUMES)
    _, body = await harness.ask(asked())
    assert "error" in events(body)[-1]
    # Its own and two others: none is left to a request that crashes them all.
    assert sum(bool(engine.requests) for engine in engines) == 3


@pytest.mark.parametrize("split", [False, True])
async def test_an_answer_that_is_no_stream_passes_as_it_came(harness: Harness, split: bool) -> None:
    async def refuses(turn: Turn) -> None:
        turn.answer(400, b'{"error": {"message": "no"}}')

    if split:
        await harness.prefill("p")
    await harness.decode("d-0", refuses)
    await harness.start({"enabled": split}, settings=RESUMES)
    response, body = await harness.ask(asked())
    assert (response.status, body) == (400, b'{"error": {"message": "no"}}')


async def test_a_compressed_stream_passes_unread(harness: Harness) -> None:
    async def compresses(turn: Turn) -> None:
        turn.stream("content-encoding: x-test")
        turn.chunk(b"no event")
        turn.end()

    await harness.decode("d-0", compresses)
    await harness.start({"enabled": False}, settings=RESUMES)
    response, body = await harness.ask(asked())
    assert (response.status, body) == (200, b"no event")


async def test_a_refused_continuation_ends_with_an_error(harness: Harness) -> None:
    async def refuses_the_rest(turn: Turn) -> None:
        if len(turn.request.json["prompt"]) == len(PROMPT):
            await generates(3)(turn)
        else:
            turn.answer(400, b'{"error": {"message": "no"}}')

    for number in range(2):
        await harness.decode(f"d-{number}", refuses_the_rest)
    await harness.start({"enabled": False}, settings=RESUMES)
    _, body = await harness.ask(asked())
    got = events(body)
    assert len(got) > 1
    assert "400" in got[-1]["error"]["message"]


async def test_what_cannot_be_continued_is_as_before(harness: Harness) -> None:
    engines = [await harness.decode(f"d-{number}", generates(3)) for number in range(2)]
    await harness.start({"enabled": False}, settings=RESUMES)
    _, body = await harness.ask(asked(seed=4))
    assert "error" in events(body)[-1]
    assert sum(len(engine.requests) for engine in engines) == 1


def without_head(stream: list[Any]) -> list[Any]:
    """The events without id and time, which are those of the engine that sent the first."""
    assert len({(each["id"], each["created"]) for each in stream[:-1]}) == 1
    return [{**each, "id": "", "created": 0} for each in stream]


def events(stream: bytes) -> list[Any]:
    """The JSON of the events of a stream, which is complete."""
    *whole, rest = stream.decode().split("\n\n")
    assert not rest
    data = [text.removeprefix("data: ") for text in whole]
    return [json.loads(text) for text in data if text != "[DONE]"]
