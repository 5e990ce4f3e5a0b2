"""A stream leaves a backend that sends nothing: one that hangs, or whose core does (--resume)."""

import asyncio
import os
from dataclasses import replace
from typing import Any

import pytest

from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_router.configuration import load
from tandem_sidecar.settings import Patience

from ..sidecar.peers import FakeDecode, Script, Turn, hangs
from ..sidecar.resume.scripted import TOKENS, asked, dies, events, generates, text_of, without_head
from .conftest import Harness
from .test_resume import RESUMES

QUICK = replace(RESUMES, silence_timeout=3600.0, resume_patience=Patience(0.2, 0.2))
"""Only what can leave is served in time."""
AGAIN: dict[str, Any] = {"temperature": 0, "presence_penalty": 1}


class Engines:
    """Backends whose scripts are used in the order in which requests come."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.scripts: list[Script] = []
        self.turns: list[tuple[str, Turn]] = []
        self.engines: dict[str, FakeDecode] = {}

    async def start(self, count: int, *, split: bool = False) -> None:
        if split:
            await self.harness.prefill("p")
        for number in range(count):
            name = f"d-{number}"

            async def script(turn: Turn, name: str = name) -> None:
                self.turns.append((name, turn))
                await self.scripts.pop(0)(turn)

            self.engines[name] = await self.harness.decode(name, script)
        await self.harness.start({"enabled": split}, settings=QUICK)

    def hang(self, tokens: int) -> Script:
        """Send so many tokens, then neither more nor an answer to a probe."""

        async def script(turn: Turn) -> None:
            self.engines[self.turns[-1][0]].health = hangs
            await generates(tokens, pause=hangs)(turn)

        return script

    async def came(self, count: int) -> None:
        """So many requests have come."""
        async with asyncio.timeout(10):
            while len(self.turns) < count:
                await asyncio.sleep(0.005)


@pytest.fixture
def engines(harness: Harness) -> Engines:
    return Engines(harness)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("after", [0, 1, TOKENS - 1])
@pytest.mark.parametrize("is_chat", [False, True])
async def test_a_stream_leaves_a_hung_backend(
    harness: Harness, engines: Engines, is_chat: bool, after: int, split: bool
) -> None:
    await engines.start(2, split=split)
    path = PATHS[RequestKind.CHAT if is_chat else RequestKind.COMPLETIONS]
    engines.scripts = [generates(), engines.hang(after), generates(id="cmpl-of-another")]
    _, whole = await harness.ask(asked(is_chat=is_chat), path)
    _, resumed = await harness.ask(asked(is_chat=is_chat), path)
    assert without_head(events(resumed)) == without_head(events(whole))
    assert not engines.scripts
    await asyncio.wait_for(engines.turns[1][1].gone.wait(), 10)


async def test_an_answer_is_generated_again(harness: Harness, engines: Engines) -> None:
    await engines.start(2)
    engines.scripts = [generates(), engines.hang(3), generates()]
    path = PATHS[RequestKind.CHAT]
    _, whole = await harness.ask(asked(is_chat=True, **AGAIN), path)
    _, resumed = await harness.ask(asked(is_chat=True, **AGAIN), path)
    assert text_of(resumed) == text_of(whole)


@pytest.mark.parametrize("split", [False, True])
async def test_a_stream_leaves_a_backend_whose_core_hangs(
    harness: Harness, engines: Engines, split: bool
) -> None:
    await engines.start(2, split=split)
    tokens, every = 24, 0.06
    stops = generates(tokens - 2, pause=hangs, pace=every)
    engines.scripts = [generates(), stops, generates()]
    _, whole = await harness.ask(asked(max_tokens=tokens))
    _, resumed = await harness.ask(asked(max_tokens=tokens))
    assert without_head(events(resumed)) == without_head(events(whole))
    assert not engines.scripts


async def test_what_no_other_backend_takes_stays(harness: Harness, engines: Engines) -> None:
    """The only backend is slow to answer its probe; the stream waits for it, and moves nowhere."""
    await engines.start(1)
    going, probed = asyncio.Event(), asyncio.Event()

    async def late(turn: Turn) -> None:
        probed.set()
        await going.wait()
        turn.answer(200, b"")

    async def goes_on(_turn: Turn) -> None:
        await going.wait()

    engines.engines["d-0"].health = late
    engines.scripts = [generates(3, pause=goes_on)]
    asking = asyncio.create_task(harness.ask(asked()))
    await asyncio.wait_for(probed.wait(), 10)
    # Longer than it takes to give the backend up.
    asyncio.get_running_loop().call_later(4 * 0.2, going.set)
    _, body = await asking
    assert "error" not in events(body)[-1]


async def test_a_client_that_leaves_frees_both_backends(harness: Harness, engines: Engines) -> None:
    await engines.start(2)
    engines.scripts = [engines.hang(3), hangs]
    async with harness.http.post(harness.url(), json=asked()) as response:
        await response.content.readuntil(b"\n\n")
        await engines.came(2)
    for _, turn in engines.turns:
        await asyncio.wait_for(turn.gone.wait(), 10)
    await asyncio.wait_for(harness.router.components.lifecycle.idle(), 10)


@pytest.mark.parametrize("first", ["hung", "dead"])
async def test_the_next_backend_drains_while_a_stream_moves_there(
    harness: Harness, engines: Engines, first: str
) -> None:
    await engines.start(3)
    fails = engines.hang(3) if first == "hung" else generates(3, dies)
    engines.scripts = [generates(), fails, hangs, generates()]
    _, whole = await harness.ask(asked())
    asking = asyncio.create_task(harness.ask(asked()))
    await engines.came(3)
    name = engines.turns[2][0]
    harness.backends = [each for each in harness.backends if each["name"] != name]
    harness.write({"enabled": False})
    harness.router.components.apply(load(harness.file, os.environ))
    _, resumed = await asking
    assert without_head(events(resumed)) == without_head(events(whole))
    assert len({each for each, _ in engines.turns[1:]}) == 3


async def test_the_router_drains_while_a_stream_moves(harness: Harness, engines: Engines) -> None:
    await engines.start(2)
    going = asyncio.Event()

    async def goes_on(turn: Turn) -> None:
        await going.wait()
        await generates()(turn)

    engines.scripts = [generates(), engines.hang(3), goes_on]
    _, whole = await harness.ask(asked())
    asking = asyncio.create_task(harness.ask(asked()))
    await engines.came(3)
    harness.router.components.lifecycle.drain()
    going.set()
    _, resumed = await asking
    assert without_head(events(resumed)) == without_head(events(whole))


async def test_all_backends_die(harness: Harness, engines: Engines) -> None:
    await engines.start(2)
    engines.scripts = [engines.hang(3), generates(2, dies)]
    _, body = await harness.ask(asked())
    assert "no further engine" in events(body)[-1]["error"]["message"]
