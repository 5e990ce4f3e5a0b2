"""Any course of events of a stream behind the router has a defined end (--resume).

As `tests/sidecar/resume/test_states.py`, with a router that chooses the next engine itself.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given, settings

from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_sidecar.settings import Settings

from ..sidecar.peers import Script, Turn
from ..sidecar.resume.stories import BENIGN, Event, Leg, Place, Story, assert_honest, tell
from ..sidecar.resume.test_states import STORIES
from .conftest import LOOPBACK, Harness
from .test_drain import is_unlisted

ENGINES = 4
SETTINGS = Settings(listen=LOOPBACK, admin=LOOPBACK, resume=True, silence_timeout=0.1)


class Stage:
    """A router with several decode engines, and one that prefills if a story is split."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self.harness = Harness(stack, folder)
        self._asked = 0
        self._serving = ""
        """The engine that was asked last."""

    async def start(self, *, split: bool) -> None:
        if split:
            await self.harness.prefill("p")
        self.engines = {
            name: await self.harness.decode(name)
            for name in (f"d-{number}" for number in range(ENGINES))
        }
        await self.harness.start({"enabled": split}, settings=SETTINGS)

    def play(self, scripts: Callable[[int], Script], health: Script) -> None:
        for name, engine in self.engines.items():

            async def script(turn: Turn, name: str = name) -> None:
                self._serving, number = name, self._asked
                self._asked += 1
                await scripts(number)(turn)

            engine.generate, engine.health = script, health

    def request(self, story: Story) -> tuple[aiohttp.ClientSession, str, dict[str, str]]:
        return self.harness.http, self.harness.url(PATHS[story.kind]), {}

    def drain(self) -> None:
        self._unlist(self._serving)

    def drain_others(self) -> None:
        self._unlist(next((name for name in self.engines if name != self._serving), ""))

    def _unlist(self, name: str) -> None:
        if name in self.engines and len(self.engines) > 1:
            is_unlisted(self.harness, name, self.engines.pop(name))

    def expire(self) -> None:
        for work in list(self.harness.router.components.lifecycle.work):
            work.drain_expired()

    async def idle(self) -> None:
        components = self.harness.router.components
        await components.lifecycle.idle()
        assert not len(components.overlaps)
        assert all(pod.in_flight == 0 for pod in components.decisions.fleet)
        assert await self.harness.metric("tandem_sidecar_in_flight") == 0


async def told(story: Story, folder: Path, *, whole: bool | None = None) -> None:
    """On a stage of its own: what failed is avoided later."""
    async with AsyncExitStack() as stack:
        stage = Stage(stack, folder)
        await stage.start(split=story.split)
        assert_honest(story, await tell(story, stage), whole=whole)


FAILURES = [event for event in Event if event not in {Event.DRAIN_EXPIRED, Event.CLIENT_GONE}]


@pytest.mark.parametrize("event", FAILURES, ids=lambda event: event.name)
async def test_two_failures_are_not_noticed(tmp_path: Path, event: Event) -> None:
    for first, second in (
        (Place.STREAMING, Place.REQUESTED),
        (Place.STREAMING, Place.EARLY),
        (Place.EARLY, Place.STREAMING),
    ):
        for kind, again in ((RequestKind.CHAT, False), (RequestKind.COMPLETIONS, True)):
            legs = [Leg(first, event), Leg(second, event)]
            await told(Story(kind, legs, again=again), tmp_path, whole=True)


def test_every_course_of_events_has_a_defined_end(tmp_path: Path) -> None:
    with asyncio.Runner() as runner:

        @settings(max_examples=40)
        @given(STORIES)
        def tell_any(story: Story) -> None:
            benign = all(leg.event in BENIGN for leg in story.legs)
            runner.run(told(story, tmp_path, whole=True if benign else None))

        tell_any()
