"""A stream whose engine fails goes on at another one, and the client cannot tell (--resume)."""

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tandem_cli.trace import trace
from tandem_contract import headers
from tandem_contract.paths import Role
from tandem_contract.plan_verification import says_resume
from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_router.configuration import load
from tandem_sidecar.settings import Settings

from ..sidecar.peers import Script, Turn
from ..sidecar.resume import answers
from ..sidecar.resume.answers import TOOL
from ..sidecar.resume.events import DONE
from ..sidecar.resume.parsing import DERENDER, LENGTH, RENDER, FailsWhile, ParsingEngine
from ..sidecar.resume.scripted import (
    ENDS,
    PROMPT,
    TOKENS,
    End,
    asked,
    dies,
    ends_too_early,
    events,
    generates,
    text_of,
    without_head,
)
from .conftest import LOOPBACK, Harness, until

RESUMES = Settings(listen=LOOPBACK, admin=LOOPBACK, resume=True)


@pytest.mark.parametrize(("most", "served"), [(1, 2), (2, 3)])
async def test_the_file_says_that_streams_are_resumed_and_how_often(
    harness: Harness, most: int, served: int
) -> None:
    engines = [await harness.decode(f"d-{number}") for number in range(4)]
    await harness.start(resume={"enabled": True, "max_moves": most})
    for engine in engines:
        engine.script = generates(2)
    _, body = await harness.ask(asked(is_chat=False))
    assert "error" in events(body)[-1]
    assert sum(len(engine.requests) for engine in engines) == served
    harness.write({}, resume={"enabled": False})
    harness.router.components.apply(load(harness.file, os.environ))
    _, body = await harness.ask(asked(is_chat=False))
    assert "error" in events(body)[-1]
    assert sum(len(engine.requests) for engine in engines) == served + 1


@pytest.mark.parametrize(("after", "reasons"), [(0, [False, False]), (2, [False, True])])
async def test_only_the_plan_for_the_rest_of_an_answer_says_so(
    harness: Harness, tmp_path: Path, after: int, reasons: list[bool]
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "k").write_bytes(b"0123456789abcdef")
    scripts, plans = [generates(after), generates(id="cmpl-of-another")], []

    async def fails_first(turn: Turn) -> None:
        plans.append(turn.request.headers[headers.PLAN].encode())
        await scripts.pop(0)(turn)

    for number in range(2):
        await harness.decode(f"d-{number}", fails_first)
    await harness.start({"enabled": False}, settings=RESUMES, keys=keys)
    _, body = await harness.ask(asked(is_chat=False))
    assert body.endswith(DONE)
    # A pod that cannot verify a plan serves the request without, but never the rest of an answer.
    assert [says_resume(plan) for plan in plans] == reasons


@pytest.mark.parametrize(("split", "has_keys"), [(False, False), (True, False), (False, True)])
async def test_a_chat_that_is_parsed_goes_on_at_an_engine_that_parses_tokens(
    harness: Harness, tmp_path: Path, split: bool, has_keys: bool
) -> None:
    (keys := tmp_path / "keys").mkdir()
    (keys / "k").write_bytes(b"0123456789abcdef")
    if split:
        await harness.prefill("p")
    engines = [await harness.decode(f"d-{number}", ParsingEngine("first")) for number in range(2)]
    more = {"keys": keys} if has_keys else {}
    await harness.start({"enabled": split}, settings=RESUMES, **more)
    # Drawn without a seed, it is not generated again.
    path, body = PATHS[RequestKind.CHAT], asked(is_chat=True, tools=[TOOL], max_tokens=50)
    _, whole = await harness.ask(body, path)
    for after in range(1, LENGTH):
        scripts = [ParsingEngine("first", after)]

        async def fails_first(turn: Turn, scripts: list[ParsingEngine] = scripts) -> None:
            await (scripts.pop() if scripts else ParsingEngine("other"))(turn)

        for engine in engines:
            engine.script = fails_first
        _, resumed = await harness.ask(body, path)
        got, expected = (answers.comparable(answers.read([data])) for data in (resumed, whole))
        assert got == expected, after


async def test_an_engine_that_dies_is_not_asked_to_parse(harness: Harness) -> None:
    failing = FailsWhile(DERENDER, dies=True)
    scripts: list[Script] = [ParsingEngine("first", 10)]

    async def fails_first(turn: Turn) -> None:
        await (scripts.pop() if scripts else failing)(turn)

    for number in range(2):
        await harness.decode(f"d-{number}", fails_first)
    await harness.start({"enabled": False}, settings=RESUMES)
    body = asked(is_chat=True, tools=[TOOL], max_tokens=50)
    _, stream = await harness.ask(body, PATHS[RequestKind.CHAT])
    assert b'"error"' in stream
    await asyncio.wait_for(failing.is_left.wait(), 10)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
async def test_the_client_gets_the_stream_of_one_engine(
    harness: Harness, end: End, split: bool, is_chat: bool
) -> None:
    if split:
        await harness.prefill("p")
    engines = [await harness.decode(f"d-{number}") for number in range(2)]
    await harness.start({"enabled": split}, settings=RESUMES)
    path = PATHS[RequestKind.CHAT if is_chat else RequestKind.COMPLETIONS]
    for body in (asked(is_chat=is_chat), asked(is_chat=is_chat, return_token_ids=True)):
        for engine in engines:
            engine.script = generates()
        _, whole = await harness.ask(body, path)
        for after in range(1, TOKENS):
            scripts = [generates(after, end), generates(id="cmpl-of-another")]

            async def fails_first(turn: Turn, scripts: list[Script] = scripts) -> None:
                await scripts.pop(0)(turn)

            for engine in engines:
                engine.script = fails_first
            response, resumed = await harness.ask(body, path)
            assert not scripts
            assert response.status == 200
            assert without_head(events(resumed)) == without_head(events(whole)), after
    moved = await harness.metric("tandem_sidecar_stream_moves_total")
    gaps = await harness.metric("tandem_sidecar_stream_gap_seconds_count")
    # Without a gap those of which the client had nothing.
    assert 0 < gaps <= moved <= 2 * (TOKENS - 1)


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("moves", [0, 1, 2])
async def test_a_client_that_asks_learns_how_often_its_stream_moved(
    harness: Harness, moves: int, is_chat: bool
) -> None:
    # Several: the router avoids those that failed lately.
    engines = [await harness.decode(f"d-{number}") for number in range(8)]
    await harness.start({"enabled": False}, settings=RESUMES)
    path = PATHS[RequestKind.CHAT if is_chat else RequestKind.COMPLETIONS]
    told = []
    for sent in ({headers.RESUMED: "usage"}, {}):
        scripts = [*(generates(after) for after in range(2, 2 + moves)), generates()]

        async def fails_first(turn: Turn, scripts: list[Script] = scripts) -> None:
            await scripts.pop(0)(turn)

        for engine in engines:
            engine.script = fails_first
        _, body = await harness.ask(asked(is_chat=is_chat), path, headers=sent)
        usage = [each["usage"] for each in events(body) if each.get("usage")][-1]
        told.append(usage.pop("tandem_resumed", None))
        assert usage["completion_tokens"] == TOKENS
    assert told == [moves, None]


@pytest.mark.parametrize("end", [dies, ends_too_early])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
async def test_a_finished_stream_whose_end_is_lost_is_completed(
    harness: Harness, end: End, split: bool, is_chat: bool
) -> None:
    if split:
        await harness.prefill("p")
    engine = await harness.decode("d-0")
    await harness.start({"enabled": split}, settings=RESUMES)
    path = PATHS[RequestKind.CHAT if is_chat else RequestKind.COMPLETIONS]
    answers = []
    for script in (generates(), generates(TOKENS, end)):
        engine.script = script
        _, body = await harness.ask(asked(is_chat=is_chat), path)
        assert body.endswith(DONE)
        answers.append(without_head(events(body)))
    assert answers[0] == answers[1]


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
    _, body = await harness.ask(asked(presence_penalty=1))
    message = events(body)[-1]["error"]["message"]
    assert "presence_penalty is not continued, and without temperature 0 or a seed" in message
    assert sum(len(engine.requests) for engine in engines) == 1


AGAIN: dict[RequestKind, dict[str, Any]] = {
    RequestKind.COMPLETIONS: {"prompt": answers.PROMPT * 40, "frequency_penalty": 1},
    RequestKind.CHAT: {"messages": [{"role": "user", "content": "think " * 40}], "tools": [TOOL]},
    RequestKind.MESSAGES: {"messages": [{"role": "user", "content": "think " * 40}]},
    RequestKind.RESPONSES: {"input": "think " * 40, "tools": [TOOL]},
}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", AGAIN)
async def test_an_answer_that_is_generated_again_is_sent_once(
    harness: Harness, kind: RequestKind, split: bool
) -> None:
    if split:
        await harness.prefill("p")
    # Several: the router avoids one that failed before its first token.
    engines = [await harness.decode(f"d-{number}") for number in range(8)]
    await harness.start({"enabled": split}, settings=RESUMES)
    body = {"model": "m", "max_tokens": 50, "stream": True, "temperature": 0, **AGAIN[kind]}
    for engine in engines:
        engine.script = answers_of("first", kind)
    _, whole = await harness.ask(body, PATHS[kind])
    for after in range(1, whole.count(b"\n\n") - 1):
        scripts = [answers_of("first", kind, after), answers_of("other", kind)]

        async def fails_first(turn: Turn, scripts: list[Script] = scripts) -> None:
            # Without the flag a server has none of the requests for tokens.
            if turn.request.target == RENDER:
                turn.answer(403, b"{}")
                return
            await scripts.pop(0)(turn)

        for engine in engines:
            engine.script = fails_first
        response, resumed = await harness.ask(body, PATHS[kind])
        assert not scripts
        assert response.status == 200
        # If nothing was sent yet, all of it is the other engine's.
        got = resumed if b"-first" in resumed else resumed.replace(b"-other", b"-first")
        expected = answers.comparable(answers.read([whole]))
        assert answers.comparable(answers.read([got])) == expected, after


@pytest.mark.parametrize("end", ENDS)
async def test_an_answer_is_generated_again_however_it_ended(harness: Harness, end: End) -> None:
    engines = [await harness.decode(f"d-{number}", generates()) for number in range(8)]
    await harness.start({"enabled": False}, settings=RESUMES)
    path = PATHS[RequestKind.CHAT]
    body = asked(is_chat=True, temperature=0, presence_penalty=1)
    _, whole = await harness.ask(body, path)
    for after in range(1, TOKENS):
        scripts = [generates(after, end), generates(id="cmpl-of-another")]

        async def fails_first(turn: Turn, scripts: list[Script] = scripts) -> None:
            await scripts.pop(0)(turn)

        for engine in engines:
            engine.script = fails_first
        _, resumed = await harness.ask(body, path)
        assert not scripts
        assert text_of(resumed) == text_of(whole), after
        assert "error" not in events(resumed)[-1]


async def test_another_answer_ends_the_stream_with_an_error(harness: Harness) -> None:
    scripts = [answers_of("first", RequestKind.MESSAGES, 5)]
    scripts += [answers_of("other", RequestKind.MESSAGES, other=0)]

    async def fails_first(turn: Turn) -> None:
        await scripts.pop(0)(turn)

    for number in range(3):
        await harness.decode(f"d-{number}", fails_first)
    await harness.start({"enabled": False}, settings=RESUMES)
    body = {"model": "m", "stream": True, "temperature": 0, **AGAIN[RequestKind.MESSAGES]}
    _, got = await harness.ask(body, PATHS[RequestKind.MESSAGES])
    assert b"event: error\n" in got
    assert b"generates another answer" in got
    # No third engine is asked.
    assert not scripts
    assert b'"other"' not in got


def answers_of(
    name: str, kind: RequestKind, after: int | None = None, *, other: int | None = None
) -> Script:
    """An engine that ends its connection after so many events."""

    async def script(turn: Turn) -> None:
        turn.stream()
        for event in answers.Engine(name, other=other).answer(kind, turn.request.body)[:after]:
            turn.chunk(event)
        if after is not None:
            await turn.writer.drain()
            turn.die()
        else:
            turn.end()

    return script


@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("split", [False, True])
async def test_the_prompt_of_a_stream_that_moved_is_computed_once_it_goes_on(
    harness: Harness, tmp_path: Path, split: bool, has_keys: bool
) -> None:
    (keys := tmp_path / "keys").mkdir()
    (keys / "k").write_bytes(b"0123456789abcdef")
    if split:
        await harness.prefill("p")
    more, goes_on = {"keys": keys} if has_keys else {}, asyncio.Event()

    async def until_told(_turn: Turn) -> None:
        await goes_on.wait()

    scripts = [generates(3), generates(3, pause=until_told)]

    async def fails_first(turn: Turn) -> None:
        await scripts.pop(0)(turn)

    for number in range(2):
        await harness.decode(f"d-{number}", fails_first)
    await harness.start({"enabled": split}, settings=RESUMES, **more)
    fleet = harness.router.components.decisions.fleet
    asking = asyncio.create_task(harness.ask(asked()))
    await until(lambda: not scripts and not any(pod.tokens_in_flight for pod in fleet))
    assert [pod.backend.role for pod in fleet if pod.in_flight] == [Role.DECODE]
    # Of the first engine: to compute the prompt again takes less.
    assert await harness.metric("tandem_epp_ttft_prediction_error_count") <= 1
    goes_on.set()
    _, body = await asking
    assert body.endswith(DONE)


async def shown(harness: Harness, request_id: str) -> list[str]:
    """What `tandem trace` prints, without the times."""
    url = f"http://{harness.router.admin}"
    arguments = [request_id, "--router", url]
    told = await asyncio.to_thread(CliRunner().invoke, trace, arguments)
    assert told.exit_code == 0, told.output
    return [line[15:] for line in told.output.splitlines() if " ms  " in line]


async def test_trace_shows_both_engines_and_the_seam(harness: Harness) -> None:
    engines = {name: await harness.decode(name) for name in ("d-0", "d-1")}
    await harness.start({"enabled": False}, settings=RESUMES)
    scripts = [generates(3), generates()]
    served: list[str] = []

    async def fails_first(turn: Turn, name: str) -> None:
        served.append(name)
        await scripts.pop(0)(turn)

    for name, engine in engines.items():
        engine.script = partial(fails_first, name=name)
    response, _ = await harness.ask(asked())
    told = await shown(harness, response.headers["x-request-id"])
    first, second = served
    moved = next(line for line in told if line.startswith("moved"))
    assert moved.startswith(
        f"moved      from {first} (crash) to {second}: continued after 3 tokens, done, the client"
        " waited "
    )
    assert moved.endswith(", 103 tokens to compute once more")
    legs = [line.partition(":")[0] for line in told if line.startswith("decode ")]
    assert legs == [f"decode     on {first}", f"decode     on {second}"]
    # Of one request.
    assert sum(line.startswith("received") for line in told) == 1
    assert sum(line.startswith("decided") for line in told) == 2


async def test_trace_says_why_a_stream_did_not_move(harness: Harness) -> None:
    for name in ("d-0", "d-1"):
        await harness.decode(name, generates(4))
    await harness.start({"enabled": False}, settings=RESUMES)
    response, body = await harness.ask(asked(presence_penalty=1))
    assert b"error" in body
    told = await shown(harness, response.headers["x-request-id"])
    [why] = [line.partition(": ")[2] for line in told if line.startswith("not moved")]
    assert why.startswith("presence_penalty is not continued, and without temperature 0")
