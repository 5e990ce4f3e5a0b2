"""A stream leaves an engine that sends nothing: one that hangs, or whose core does."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_sidecar.settings import Patience

from ..conftest import Harness
from ..peers import Turn, hangs
from .scripted import TOKENS, asked, dies, events, generates, text_of, without_head
from .test_alternates import Pods, two_pods
from .test_drain import Turns, pauses

QUICK = {"silence_timeout": 3600.0, "resume_patience": Patience(0.2, 0.2)}
"""Only what can leave is served in time."""
AGAIN = {"temperature": 0, "presence_penalty": 1}
COMPLETIONS, CHAT = RequestKind.COMPLETIONS, RequestKind.CHAT


@pytest.fixture
async def pods(harness: Harness, tmp_path: Path) -> AsyncIterator[Pods]:
    async with two_pods(harness, tmp_path, resume=True, **QUICK) as running:
        yield running


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("after", [0, 1, TOKENS - 1, TOKENS])
@pytest.mark.parametrize("kind", [COMPLETIONS, CHAT])
async def test_a_stream_leaves_a_hung_engine(
    pods: Pods, kind: RequestKind, after: int, split: bool
) -> None:
    prefills = [await pods.first.prefill()] if split else []
    pods.first.decode.generate = generates()
    _, whole = await pods.ask(kind, *prefills)
    first = Turns(pauses(after) if after < TOKENS else generates(TOKENS, stays_silent))
    pods.first.decode.generate, pods.first.decode.health = first, hangs
    pods.second.decode.generate = generates(id="cmpl-of-another")
    _, resumed = await pods.ask(kind, *prefills)
    assert without_head(events(resumed)) == without_head(events(whole))
    # What lacks only its end needs no other engine.
    assert len(pods.second.decode.requests) == (after < TOKENS)
    if after < TOKENS:
        await asyncio.wait_for(first.turns[0].gone.wait(), 10)


def stays_silent(turn: Turn, last: bytes) -> None:
    turn.chunk(last)
    # The response stays open, and so does the connection.


@pytest.mark.parametrize("split", [False, True])
async def test_an_answer_is_generated_again(pods: Pods, split: bool) -> None:
    prefills = [await pods.first.prefill()] if split else []
    pods.first.decode.generate = generates()
    _, whole = await pods.ask(CHAT, *prefills, **AGAIN)
    pods.first.decode.generate, pods.first.decode.health = pauses(3), hangs
    pods.second.decode.generate = generates()
    _, resumed = await pods.ask(CHAT, *prefills, **AGAIN)
    assert text_of(resumed) == text_of(whole)


@pytest.mark.parametrize("split", [False, True])
async def test_a_whole_answer_is_begun_again(pods: Pods, split: bool) -> None:
    async def answers(turn: Turn) -> None:
        turn.answer(200, b'{"choices": [{"text": "whole"}]}')

    prefills = [await pods.first.prefill()] if split else []
    pods.first.decode.generate, pods.first.decode.health = hangs, hangs
    pods.second.decode.generate = answers
    status, body = await pods.ask(COMPLETIONS, *prefills, stream=False, stream_options=None)
    assert (status, body) == (200, b'{"choices": [{"text": "whole"}]}')


@pytest.mark.parametrize("split", [False, True])
async def test_a_stream_leaves_an_engine_whose_core_hangs(pods: Pods, split: bool) -> None:
    """Its server still answers `/health`."""
    prefills = [await pods.first.prefill()] if split else []
    tokens, every = 24, 0.06
    pods.first.decode.generate = generates()
    _, whole = await pods.ask(COMPLETIONS, *prefills, max_tokens=tokens)
    pods.first.decode.generate = generates(tokens - 2, pause=hangs, pace=every)
    pods.second.decode.generate = generates()
    _, resumed = await pods.ask(COMPLETIONS, *prefills, max_tokens=tokens)
    assert without_head(events(resumed)) == without_head(events(whole))
    assert len(pods.second.decode.requests) == 1


async def test_a_stream_that_left_in_vain_is_the_same(pods: Pods) -> None:
    """The engine was only slow: nothing that it sends afterwards reaches the client."""
    going = asyncio.Event()

    async def goes_on(_turn: Turn) -> None:
        await going.wait()

    async def answers_meanwhile(turn: Turn) -> None:
        going.set()
        await first.turns[0].writer.drain()
        await generates(id="cmpl-of-another")(turn)

    pods.first.decode.generate = generates()
    _, whole = await pods.ask(COMPLETIONS)
    first = Turns(pauses(3, goes_on))
    pods.first.decode.generate, pods.first.decode.health = first, hangs
    pods.second.decode.generate = answers_meanwhile
    _, resumed = await pods.ask(COMPLETIONS)
    assert without_head(events(resumed)) == without_head(events(whole))


async def test_one_probe_serves_all_streams(pods: Pods) -> None:
    probes = []

    async def counts(turn: Turn) -> None:
        probes.append(turn)
        await hangs(turn)

    pods.first.decode.generate = generates()
    _, whole = await pods.ask(COMPLETIONS)
    pods.first.decode.generate, pods.first.decode.health = pauses(3), counts
    pods.second.decode.generate = generates()
    streams = 16
    answers = await asyncio.gather(*(pods.ask(COMPLETIONS) for _ in range(streams)))
    for _, resumed in answers:
        assert without_head(events(resumed)) == without_head(events(whole))
    # Few: the sidecar asks for its readiness, too.
    assert len(probes) < streams / 2


async def test_a_client_that_leaves_frees_both_engines(pods: Pods) -> None:
    first, second = Turns(pauses(3)), Turns(hangs)
    pods.first.decode.generate, pods.first.decode.health = first, hangs
    pods.second.decode.generate = second
    url, plan = pods.first.url(PATHS[COMPLETIONS]), pods.plan()
    async with pods.first.http.post(url, json=asked(), headers=plan) as response:
        await response.content.readuntil(b"\n\n")
        await pods.second.decode.received(1)
    for turn in (*first.turns, *second.turns):
        await asyncio.wait_for(turn.gone.wait(), 10)
    for pod in (pods.first, pods.second):
        await asyncio.wait_for(pod.sidecar.lifecycle.idle(), 10)


@pytest.mark.parametrize("dead", [False, True])
async def test_a_drain_while_a_stream_moves(pods: Pods, dead: bool) -> None:
    going = asyncio.Event()

    async def goes_on(turn: Turn) -> None:
        await going.wait()
        await generates()(turn)

    pods.first.decode.generate = generates()
    _, whole = await pods.ask(COMPLETIONS)
    pods.first.decode.generate = generates(3) if dead else pauses(3)
    pods.first.decode.health, pods.second.decode.generate = hangs, goes_on
    asking = asyncio.create_task(pods.ask(COMPLETIONS))
    await pods.second.decode.received(1)
    for pod in (pods.first, pods.second):
        pod.sidecar.lifecycle.drain()
    going.set()
    _, resumed = await asking
    assert without_head(events(resumed)) == without_head(events(whole))
    for pod in (pods.first, pods.second):
        await asyncio.wait_for(pod.sidecar.lifecycle.idle(), 10)


async def test_both_pods_die(pods: Pods) -> None:
    pods.first.decode.generate, pods.first.decode.health = pauses(3), hangs
    pods.second.decode.generate = generates(2, dies)
    _, body = await pods.ask(COMPLETIONS)
    assert "no further engine" in events(body)[-1]["error"]["message"]
