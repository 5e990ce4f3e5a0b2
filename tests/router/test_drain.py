"""The streams of a backend that drains go on at other backends, and it is idle at once (--resume).

A backend drains when it is no longer listed, says that it does not serve, or closes its port.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_epp.placement.placement import Placement
from tandem_router.configuration import load

from ..sidecar.peers import FakeDecode, Turn
from ..sidecar.resume.answers import TOOL, comparable, read
from ..sidecar.resume.parsing import GENERATE, RENDER, ParsingEngine
from ..sidecar.resume.scripted import TOKENS, asked, events, generates, without_head
from .conftest import Harness, until
from .test_resume import RESUMES

KINDS = [RequestKind.COMPLETIONS, RequestKind.CHAT]


async def not_serving(turn: Turn) -> None:
    turn.answer(503, b"shutting down")


def says_so(_harness: Harness, _name: str, engine: FakeDecode) -> None:
    engine.metrics = not_serving


def closes_its_port(_harness: Harness, _name: str, engine: FakeDecode) -> None:
    engine.metrics = dies
    engine.close_port()


def is_unlisted(harness: Harness, name: str, _engine: FakeDecode) -> None:
    harness.backends = [each for each in harness.backends if each["name"] != name]
    harness.write({"enabled": any(each["role"] == "prefill" for each in harness.backends)})
    harness.router.components.apply(load(harness.file, os.environ))


async def dies(turn: Turn) -> None:
    turn.die()


Begins = Callable[[Harness, str, FakeDecode], None]
DRAINS: list[Begins] = [says_so, closes_its_port, is_unlisted]


class Paused:
    """Two decode engines, of which each stream's first one pauses after some tokens."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.engines: dict[str, FakeDecode] = {}
        self.turns: dict[str, list[Turn]] = {}
        self.going = asyncio.Event()

    async def start(self, *, split: bool = False, others: int = 1) -> None:
        if split:
            await self.harness.prefill("p")
        for number in range(1 + others):
            name = f"d-{number}"
            self.engines[name], self.turns[name] = await self.harness.decode(name), []
        checks = {"interval": "100ms", "unhealthy_threshold": 1}
        serving = {"enabled": split}
        await self.harness.start(serving, settings=RESUMES, health_checks=checks)

    async def whole(self, kind: RequestKind) -> list[Any]:
        for engine in self.engines.values():
            engine.generate = generates()
        return without_head(events((await self.harness.ask(asked_of(kind), PATHS[kind]))[1]))

    def pause(self) -> None:
        """Have the first streams pause, after 0, 1, 2 … tokens."""
        after = iter(range(TOKENS))

        async def waits(_turn: Turn) -> None:
            await self.going.wait()

        for name, engine in self.engines.items():

            async def script(turn: Turn, name: str = name) -> None:
                self.turns[name].append(turn)
                await generates(next(after, None), pause=waits)(turn)

            engine.generate = script

    async def ask_all(self, kind: RequestKind, **more: Any) -> list["asyncio.Task[bytes]"]:
        """One stream for each number of tokens."""

        async def ask() -> bytes:
            return (await self.harness.ask(asked_of(kind, **more), PATHS[kind]))[1]

        tasks = [asyncio.create_task(ask()) for _ in range(TOKENS)]
        await until(lambda: sum(map(len, self.turns.values())) == TOKENS)
        return tasks


def asked_of(kind: RequestKind, **more: Any) -> dict[str, Any]:
    return asked(is_chat=kind is RequestKind.CHAT, **more)


@pytest.fixture
def paused(harness: Harness) -> Paused:
    return Paused(harness)


@pytest.mark.parametrize("drains", DRAINS)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_streams_go_on_at_other_backends(
    paused: Paused, drains: Begins, split: bool, kind: RequestKind
) -> None:
    await paused.start(split=split)
    whole = await paused.whole(kind)
    paused.pause()
    tasks = await paused.ask_all(kind)
    name = max(paused.turns, key=lambda name: len(paused.turns[name]))
    moving = list(paused.turns[name])
    assert moving
    drains(paused.harness, name, paused.engines[name])
    for turn in moving:
        await asyncio.wait_for(turn.gone.wait(), 10)
    # Those of the other engine were not disturbed.
    [other] = paused.turns.keys() - {name}
    assert not any(turn.gone.is_set() for turn in paused.turns[other])
    paused.going.set()
    for body in await asyncio.gather(*tasks):
        assert without_head(events(body)) == whole
    # A drain is no failure of the backend.
    assert await paused.harness.metric('tandem_sidecar_errors_total{phase="decode"}') == 0


async def test_drains_are_not_counted_as_failures_of_the_request(paused: Paused) -> None:
    """Three backends drain one after the other; a stream may fail two of them at most."""
    kind = RequestKind.COMPLETIONS
    await paused.start(others=3)
    whole = await paused.whole(kind)

    async def waits(turn: Turn) -> None:
        await turn.gone.wait()

    served: list[str] = []
    for name, engine in paused.engines.items():

        async def script(turn: Turn, name: str = name) -> None:
            served.append(name)
            pause = waits if len(served) <= 3 else None
            await generates(2 if pause else None, pause=pause)(turn)

        engine.generate = script
    asking = asyncio.create_task(paused.harness.ask(asked_of(kind), PATHS[kind]))
    for count in range(1, 4):
        await until(lambda count=count: len(served) == count)
        says_so(paused.harness, served[-1], paused.engines[served[-1]])
    _, body = await asking
    assert len({*served}) == 4
    assert without_head(events(body)) == whole


async def test_a_stream_without_another_backend_waits(paused: Paused) -> None:
    kind = RequestKind.COMPLETIONS
    await paused.start(others=0)
    whole = await paused.whole(kind)
    paused.pause()
    tasks = await paused.ask_all(kind)
    says_so(paused.harness, "d-0", paused.engines["d-0"])
    await until(lambda: not paused.harness.router.components.decisions.fleet.ready_pods(None))
    paused.going.set()
    for body in await asyncio.gather(*tasks):
        assert without_head(events(body)) == whole


async def test_what_cannot_be_moved_waits(paused: Paused) -> None:
    await paused.start()
    paused.pause()
    tasks = await paused.ask_all(RequestKind.COMPLETIONS, presence_penalty=1)
    moving = list(paused.turns["d-0"])
    says_so(paused.harness, "d-0", paused.engines["d-0"])
    fleet = paused.harness.router.components.decisions.fleet
    await until(lambda: len(fleet.ready_pods(None)) == 1)
    assert not any(turn.gone.is_set() for turn in moving)
    paused.going.set()
    for body in await asyncio.gather(*tasks):
        assert len(events(body)) > TOKENS / 2
        assert "error" not in events(body)[-1]


@pytest.mark.parametrize("drains", [says_so, is_unlisted, None])
async def test_a_router_that_drains_still_finishes_the_streams_of_other_engines(
    paused: Paused, drains: Begins | None
) -> None:
    """Its drain alone moves nothing: the engines serve on. One that drains, too, or dies (None),
    is replaced as before the drain."""
    kind = RequestKind.COMPLETIONS
    await paused.start()
    whole = await paused.whole(kind)
    paused.pause()
    tasks = await paused.ask_all(kind)
    paused.harness.router.components.lifecycle.drain()
    assert (await paused.harness.ask(asked_of(kind), PATHS[kind]))[0].status == 503
    assert not any(turn.gone.is_set() for turns in paused.turns.values() for turn in turns)
    name = max(paused.turns, key=lambda name: len(paused.turns[name]))
    leaving = list(paused.turns[name])
    if drains is not None:
        drains(paused.harness, name, paused.engines[name])
        for turn in leaving:
            await asyncio.wait_for(turn.gone.wait(), 10)
    else:
        for turn in leaving:
            turn.die()
    paused.going.set()
    for body in await asyncio.gather(*tasks):
        assert without_head(events(body)) == whole
    await paused.harness.router.components.lifecycle.idle()


async def test_a_failed_check_alone_moves_nothing(paused: Paused) -> None:
    """A backend that does not answer in time may only be slow."""
    await paused.start()
    paused.pause()
    tasks = await paused.ask_all(RequestKind.COMPLETIONS)
    moving = list(paused.turns["d-0"])

    async def fails(turn: Turn) -> None:
        turn.answer(500, b"")

    paused.engines["d-0"].metrics = fails
    fleet = paused.harness.router.components.decisions.fleet
    await until(lambda: len(fleet.ready_pods(None)) == 1)
    assert not any(turn.gone.is_set() for turn in moving)
    paused.going.set()
    await asyncio.gather(*tasks)


async def test_another_backend_that_fails_the_stream_counts(paused: Paused) -> None:
    """A stream that moved from a backend goes to two others after failures, as any other."""
    kind = RequestKind.COMPLETIONS
    await paused.start(others=4)
    served: list[str] = []

    async def waits(turn: Turn) -> None:
        await turn.gone.wait()

    for name, engine in paused.engines.items():

        async def script(turn: Turn, name: str = name) -> None:
            served.append(name)
            await generates(2, pause=waits if len(served) == 1 else None)(turn)

        engine.generate = script
    asking = asyncio.create_task(paused.harness.ask(asked_of(kind), PATHS[kind]))
    await until(lambda: served)
    says_so(paused.harness, served[0], paused.engines[served[0]])
    _, body = await asking
    assert "no further engine" in events(body)[-1]["error"]["message"]
    assert len(served) == 4


@pytest.mark.parametrize("drains", DRAINS)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "other",
    [
        ParsingEngine("other"),
        ParsingEngine("other", refuses=RENDER),
        ParsingEngine("other", more=(("a_parameter_of_tomorrow", 1),)),
    ],
    ids=["parses", "refuses", "knows more"],
)
async def test_a_parsed_chat_goes_on_where_the_next_engine_parses(
    paused: Paused,
    drains: Begins,
    split: bool,
    other: ParsingEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked before the engine that drains loses the stream."""
    await paused.start(split=split)
    parses = not (other.refuses or other.more)
    ended, end = list[int](), Placement.end

    def counted_end(self: Placement, now: float) -> None:
        ended.append(id(self.decision))
        end(self, now)

    monkeypatch.setattr(Placement, "end", counted_end)
    for engine in paused.engines.values():
        engine.generate = ParsingEngine("first")
    # Drawn without a seed, it is not generated again.
    body, path = asked(is_chat=True, tools=[TOOL], max_tokens=50), PATHS[RequestKind.CHAT]
    _, whole = await paused.harness.ask(body, path)
    turns: list[tuple[str, Turn]] = []

    async def waits(turn: Turn) -> None:
        leaving = [asyncio.create_task(each.wait()) for each in (turn.gone, paused.going)]
        await asyncio.wait(leaving, return_when=asyncio.FIRST_COMPLETED)

    for name, engine in paused.engines.items():

        async def script(turn: Turn, name: str = name) -> None:
            turns.append((name, turn))
            script = ParsingEngine("first", after=10, pause=waits) if len(turns) == 1 else other
            await script(turn)

        engine.generate = script
    asking = asyncio.create_task(paused.harness.ask(body, path))
    await until(lambda: turns)
    name, turn = turns[0]
    lifecycle = paused.harness.router.components.lifecycle
    await until(lambda: [work.describe()["phase"] for work in lifecycle.work] == ["answering"])
    drains(paused.harness, name, paused.engines[name])
    if parses:
        await asyncio.wait_for(turn.gone.wait(), 10)
    else:
        await until(lambda: len(turns) == 2)
        paused.going.set()
    _, stream = await asking
    assert comparable(read([stream])) == comparable(read([whole]))
    asked_for = [turn.request.target for _, turn in turns[1:]]
    assert asked_for[:2] == ([RENDER, GENERATE] if parses else [RENDER])
    pods = paused.harness.router.components.decisions.fleet.ready_pods(None)
    assert not any(pod.in_flight for pod in pods)
    assert len(ended) == len(set(ended)), "a placement ends once"
