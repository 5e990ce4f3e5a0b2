"""The streams of a pod that drains go on at other pods, and its engine is idle at once."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_sidecar.handoff import render_question
from tandem_sidecar.handoff.context import Work

from ..conftest import Harness
from ..peers import Peer, Received, Script, Turn, hangs, is_prefill, produces
from ..processes import drain
from .answers import TOOL, Json, comparable, read
from .parsing import GENERATE, LENGTH, RENDER, FailsWhile, ParsingEngine
from .scripted import (
    TOKENS,
    Pause,
    asked,
    dies,
    ends_too_early,
    events,
    generates,
    until_gone,
    without_head,
)
from .test_alternates import Pods, pods

__all__ = ["pods"]
COMPLETIONS, CHAT = RequestKind.COMPLETIONS, RequestKind.CHAT


class Turns:
    """Scripts of an engine, one for each request that it decodes; it remembers its turns."""

    def __init__(self, *scripts: Script) -> None:
        self.turns: list[Turn] = []
        self._scripts = list(scripts)

    async def __call__(self, turn: Turn) -> None:
        if is_prefill(turn.request):
            await produces(turn)
            return
        self.turns.append(turn)
        await self._scripts.pop(0)(turn)


def pauses(after: int, pause: Pause = until_gone) -> Script:
    script = generates(after, pause=pause)

    async def also_produces(turn: Turn) -> None:
        await (produces if is_prefill(turn.request) else script)(turn)

    return also_produces


def legs(engine: Peer) -> list[Received]:
    """The prefill legs that an engine got."""
    return [request for request in engine.requests if is_prefill(request)]


async def reads_all(pods: Pods, streaming: Callable[[], bool], *asks: Any) -> list[bytes]:
    """Begin to ask; drain the first pod once all are `streaming`; the bodies that come."""
    tasks = [asyncio.create_task(ask) for ask in asks]
    async with asyncio.timeout(10):
        while not streaming():
            await asyncio.sleep(0.005)
    pods.first.sidecar.lifecycle.drain()
    return [body for _, body in await asyncio.gather(*tasks)]


def has_begun(harness: Harness, tokens: int = TOKENS) -> Callable[[], bool]:
    """Whether so many requests run, of which those with a token are streaming."""
    return lambda: (
        len(harness.decode.requests) >= tokens
        and all(
            work.describe()["phase"] in ("answering", "decoding")
            for work in harness.sidecar.lifecycle.work
        )
    )


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("keeps_ids", [False, True])
async def test_all_streams_go_on_at_once(
    pods: Pods, split: bool, kind: RequestKind, keeps_ids: bool
) -> None:
    """One for each number of tokens that the engine has sent, none among them."""
    prefills = [await pods.first.prefill()] if split else []
    first, second = pods.first.decode, pods.second.decode
    first.generate = generates()
    _, whole = await pods.ask(kind, *prefills, keeps_ids=keeps_ids)
    scripts = Turns(*(pauses(after) for after in range(TOKENS)))
    first.requests.clear()
    first.generate, second.generate = scripts, generates(id="cmpl-of-another")
    asks = [pods.ask(kind, *prefills, keeps_ids=keeps_ids) for _ in range(TOKENS)]
    bodies = await reads_all(pods, has_begun(pods.first), *asks)
    for body in bodies:
        assert without_head(events(body)) == without_head(events(whole))
    assert len(second.requests) == TOKENS
    assert len(scripts.turns) == TOKENS
    for turn in scripts.turns:
        await asyncio.wait_for(turn.gone.wait(), 10)
    assert not pods.first.sidecar.lifecycle.work


@pytest.mark.parametrize("kind", [COMPLETIONS, CHAT])
async def test_a_request_whose_prefill_is_under_way_goes_on_elsewhere(
    pods: Pods, kind: RequestKind
) -> None:
    never, prefill = await pods.first.prefill(hangs), await pods.first.prefill()
    pods.second.decode.generate = generates()
    running = pods.first.sidecar.lifecycle.work
    asking = asyncio.create_task(pods.ask(kind, never, prefill))
    await never.received(1)
    never.script = prefill.default
    [work] = running
    assert work.describe()["phase"] == "prefilling"
    pods.first.sidecar.lifecycle.drain()
    _, body = await asking
    assert not pods.first.decode.requests
    assert len(events(body)) > 1


async def test_the_engine_is_idle_while_the_stream_still_passes(pods: Pods) -> None:
    """`/drain?wait=true` answers then, since the hook that asks it holds the engine."""
    going = asyncio.Event()

    async def goes_on(_turn: Turn) -> None:
        await going.wait()

    pods.first.decode.generate = pauses(3)
    pods.second.decode.generate = pauses(2, goes_on)
    url = pods.first.url(PATHS[COMPLETIONS])
    async with pods.first.http.post(url, json=asked(), headers=pods.plan()) as response:
        begin = await response.content.readuntil(b"\n\n")
        answer = await drain(pods.first.sidecar.admin, wait=True)
        assert answer == {"draining": True, "in_flight": 1}
        going.set()
        body = begin + await response.read()
    assert "error" not in events(body)[-1]
    await asyncio.wait_for(pods.first.sidecar.lifecycle.idle(), 10)
    moved = 'tandem_sidecar_stream_moves_total{cause="drain",method="continued",result="done"}'
    assert await pods.first.metric(moved) == 1


async def test_the_engine_is_kept_until_the_other_pod_generates(pods: Pods) -> None:
    going = asyncio.Event()

    async def goes_on(turn: Turn) -> None:
        await going.wait()
        await generates()(turn)

    pods.first.decode.generate, pods.second.decode.generate = pauses(3), goes_on
    asking = asyncio.create_task(pods.ask(COMPLETIONS))
    await pods.first.decode.received(1)
    drained = asyncio.create_task(drain(pods.first.sidecar.admin, wait=True))
    await pods.second.decode.received(1)
    assert not drained.done()
    going.set()
    await asyncio.wait_for(drained, 10)
    await asking


async def test_a_client_that_leaves_during_the_move_frees_both_engines(pods: Pods) -> None:
    first, second = Turns(pauses(3)), Turns(hangs)
    pods.first.decode.generate, pods.second.decode.generate = first, second
    url, plan = pods.first.url(PATHS[COMPLETIONS]), pods.plan()
    async with pods.first.http.post(url, json=asked(), headers=plan) as response:
        await response.content.readuntil(b"\n\n")
        pods.first.sidecar.lifecycle.drain()
        await pods.second.decode.received(1)
    for turn in (*first.turns, *second.turns):
        await asyncio.wait_for(turn.gone.wait(), 10)
    for pod in (pods.first, pods.second):
        await asyncio.wait_for(pod.sidecar.lifecycle.idle(), 10)


async def dies_at_once(turn: Turn) -> None:
    turn.die()


async def refuses(turn: Turn) -> None:
    turn.answer(503, b'{"error": {"message": "shutting down"}}')


@pytest.mark.parametrize(
    "other", [dies_at_once, refuses, generates(0), generates(3), generates(3, ends_too_early)]
)
@pytest.mark.parametrize("kind", [COMPLETIONS, CHAT])
async def test_a_stream_returns_to_its_engine_if_the_other_pod_fails(
    pods: Pods, other: Script, kind: RequestKind
) -> None:
    """The engine only drains, so it can still finish the stream."""
    pods.first.decode.generate = generates()
    _, whole = await pods.ask(kind)
    first = Turns(pauses(3), generates(id="cmpl-b"))
    pods.first.decode.requests.clear()
    pods.first.decode.generate = first
    pods.second.decode.generate = other
    [body] = await reads_all(pods, has_begun(pods.first, 1), pods.ask(kind))
    assert without_head(events(body)) == without_head(events(whole))
    assert len(first.turns) == 2
    assert pods.second.decode.requests


async def test_pods_that_drain_together_keep_their_streams(pods: Pods) -> None:
    pods.first.decode.generate = generates()
    _, whole = await pods.ask(COMPLETIONS)
    pods.first.decode.generate = Turns(pauses(3), generates())
    pods.second.sidecar.lifecycle.drain()
    pods.first.decode.requests.clear()
    [body] = await reads_all(pods, has_begun(pods.first, 1), pods.ask(COMPLETIONS))
    assert without_head(events(body)) == without_head(events(whole))
    assert not pods.second.decode.requests


async def test_a_stream_ends_with_an_error_if_no_engine_is_left(pods: Pods) -> None:
    pods.first.decode.generate = Turns(pauses(3), generates(0))
    pods.second.decode.generate = generates(2, dies)
    [body] = await reads_all(pods, has_begun(pods.first, 1), pods.ask(COMPLETIONS))
    error = events(body)[-1]["error"]["message"]
    assert "no further engine" in error


async def test_what_cannot_be_moved_waits(pods: Pods) -> None:
    going = asyncio.Event()

    async def goes_on(_turn: Turn) -> None:
        await going.wait()

    scripts = [pauses(3, goes_on) for _ in range(3)]
    pods.first.decode.generate = Turns(*scripts)
    url, plan = pods.first.url(PATHS[COMPLETIONS]), pods.plan()
    alone = {name: value for name, value in pods.plan().items() if name != "x-tandem-plan"}

    async def ask(body: dict[str, Any], headers: dict[str, str]) -> bytes:
        async with pods.first.http.post(url, json=body, headers=headers) as response:
            return await response.read()

    whole = asked(stream=False, stream_options=None)
    asks = [ask(asked(seed=1), plan), ask(asked(), alone), ask(whole, pods.plan())]
    tasks = [asyncio.create_task(each) for each in asks]
    await pods.first.decode.received(3)
    pods.first.sidecar.lifecycle.drain()
    going.set()
    seeded, unplanned, _ = await asyncio.gather(*tasks)
    assert len(events(seeded)) == len(events(unplanned)) > 3
    assert not pods.second.decode.requests


async def test_what_cannot_be_moved_ends_with_the_drains_limit(pods: Pods) -> None:
    pods.first.sidecar.lifecycle.timeout = 0.05
    pods.first.decode.generate = pauses(3)
    url, plan = pods.first.url(PATHS[COMPLETIONS]), pods.plan()
    async with pods.first.http.post(url, json=asked(seed=1), headers=plan) as response:
        begin = await response.content.readuntil(b"\n\n")
        pods.first.sidecar.lifecycle.drain()
        error = events(begin + await response.read())[-1]["error"]["message"]
    assert "shutting down" in error
    assert "not continued by token ids" in error


@pytest.mark.parametrize("split", [False, True])
async def test_nothing_goes_on_elsewhere_once_the_drains_limit_has_passed(
    pods: Pods, split: bool
) -> None:
    """The alternate would serve the whole answer, and the process would wait for it."""
    prefills = [await pods.first.prefill()] if split else []
    pods.first.sidecar.lifecycle.timeout = 0.1
    pods.first.decode.generate, pods.second.decode.generate = pauses(3), pauses(0)
    body = asked(is_chat=True, presence_penalty=1, temperature=0)
    url, plan = pods.first.url(PATHS[CHAT]), pods.plan(*prefills)
    async with pods.first.http.post(url, json=body, headers=plan) as response:
        begin = await response.content.readuntil(b"\n\n")
        pods.first.sidecar.lifecycle.drain()
        error = events(begin + await asyncio.wait_for(response.read(), 10))[-1]["error"]
    assert "shutting down" in error["message"]
    await asyncio.wait_for(pods.first.sidecar.lifecycle.idle(), 10)
    assert not pods.second.decode.requests


@pytest.mark.parametrize("split", [False, True])
async def test_a_stream_that_moved_does_not_say_why_the_drain_had_left_it(
    pods: Pods, split: bool
) -> None:
    prefills = [await pods.first.prefill()] if split else []
    failing = asyncio.Event()

    async def fails(turn: Turn) -> None:
        await failing.wait()
        turn.die()
        turn.gone.set()

    pods.first.decode.generate, pods.second.decode.generate = pauses(3, fails), pauses(0)
    body = asked(is_chat=True, presence_penalty=1, temperature=0)
    url, plan = pods.first.url(PATHS[CHAT]), pods.plan(*prefills)
    lifecycle = pods.first.sidecar.lifecycle
    async with pods.first.http.post(url, json=body, headers=plan) as response:
        begin = await response.content.readuntil(b"\n\n")
        lifecycle.drain()
        failing.set()
        await pods.second.decode.received(1)
        for work in list(lifecycle.work):
            work.drain_expired()
        error = events(begin + await response.read())[-1]["error"]["message"]
    assert "shutting down" in error
    assert "no other engine" not in error


class Parsed:
    """Chats that are parsed, whose streams pause after some tokens at the first pod's engine."""

    def __init__(self, pods: Pods) -> None:
        self._pods, self.going = pods, asyncio.Event()

    async def ask(self) -> bytes:
        _, stream = await self._pods.ask(CHAT, tools=[TOOL], max_tokens=50, temperature=1.0)
        return stream

    async def whole(self) -> Json:
        self._pods.first.decode.script = ParsingEngine("first")
        stream = await self.ask()
        self._pods.first.decode.requests.clear()
        return comparable(read([stream]))

    async def begin(self, other: Script, after: int = 10) -> "asyncio.Task[bytes]":
        """A stream whose engine has sent so many tokens; `other` is the next pod's engine."""

        async def waits(turn: Turn) -> None:
            gone = asyncio.create_task(turn.gone.wait())
            going = asyncio.create_task(self.going.wait())
            await asyncio.wait((gone, going), return_when=asyncio.FIRST_COMPLETED)

        self._pods.first.decode.script = ParsingEngine("first", after=after, pause=waits)
        self._pods.second.decode.script = other
        asking = asyncio.create_task(self.ask())
        [work] = await self._running()
        while work.describe()["phase"] != "answering":
            await asyncio.sleep(0.005)
        return asking

    async def _running(self) -> set[Work]:
        lifecycle = self._pods.first.sidecar.lifecycle
        async with asyncio.timeout(10):
            while not lifecycle.work:
                await asyncio.sleep(0.005)
        return lifecycle.work


@pytest.fixture
def parsed(pods: Pods) -> Parsed:
    return Parsed(pods)


@pytest.mark.parametrize("after", range(1, LENGTH))
async def test_a_parsed_chat_goes_on_where_the_next_engine_parses(
    pods: Pods, parsed: Parsed, after: int
) -> None:
    whole = await parsed.whole()
    asking = await parsed.begin(ParsingEngine("other"), after)
    pods.first.sidecar.lifecycle.drain()
    assert comparable(read([await asking])) == whole
    asked = [each.target for each in pods.second.decode.requests]
    # The answer to the question is used, so that it is asked once.
    assert asked[:2] == [RENDER, GENERATE]
    assert asked.count(RENDER) == 1
    assert not pods.first.sidecar.lifecycle.work


@pytest.mark.parametrize(
    "other",
    [
        ParsingEngine("other", refuses=RENDER),
        ParsingEngine("other", wrong=(RENDER, b"[]")),
        ParsingEngine("other", more=(("a_parameter_of_tomorrow", 1),)),
        dies_at_once,
    ],
    ids=["refuses", "answers wrongly", "knows more", "dies"],
)
async def test_a_parsed_chat_stays_where_the_next_engine_does_not(
    pods: Pods, parsed: Parsed, other: Script
) -> None:
    whole = await parsed.whole()
    asking = await parsed.begin(other)
    pods.first.sidecar.lifecycle.drain()
    await pods.second.decode.received(1)
    parsed.going.set()
    assert comparable(read([await asking])) == whole
    assert [each.target for each in pods.second.decode.requests] == [RENDER]


@pytest.mark.parametrize("ends", ["whole", "client leaves"])
async def test_a_parsed_chat_that_ends_before_the_answer_moves_nowhere(
    pods: Pods, parsed: Parsed, ends: str
) -> None:
    answering = asyncio.Event()

    async def slow(turn: Turn) -> None:
        await answering.wait()
        await ParsingEngine("other")(turn)

    asking = await parsed.begin(slow)
    pods.first.sidecar.lifecycle.drain()
    await pods.second.decode.received(1)
    if ends == "whole":
        parsed.going.set()
        assert b"data: [DONE]" in await asking
    else:
        asking.cancel()
    await asyncio.wait_for(pods.first.sidecar.lifecycle.idle(), 10)
    answering.set()
    await pods.second.decode.received(1)
    assert not pods.first.sidecar.lifecycle.work
    assert [each.target for each in pods.second.decode.requests] == [RENDER]


async def test_a_parsed_chat_whose_question_has_no_answer_stays(
    pods: Pods, parsed: Parsed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render_question, "_SECONDS", 0.05)
    failing = FailsWhile(RENDER)
    asking = await parsed.begin(failing)
    pods.first.sidecar.lifecycle.drain()
    await asyncio.wait_for(failing.is_left.wait(), 10)
    parsed.going.set()
    assert b"data: [DONE]" in await asking


async def test_a_parsed_chat_returns_if_the_next_engine_fails_with_it(
    pods: Pods, parsed: Parsed
) -> None:
    whole = await parsed.whole()
    asking = await parsed.begin(ParsingEngine("other", after=12))
    pods.first.decode.script = ParsingEngine("first")
    pods.first.sidecar.lifecycle.drain()
    assert comparable(read([await asking])) == whole
    assert GENERATE in [each.target for each in pods.first.decode.requests]
