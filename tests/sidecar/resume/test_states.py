"""Every state of a stream that may move × everything that can happen: each has a defined end.

The client gets exactly the reference stream, or an exact part of it and then one error; no engine
computes for it any longer, and nothing counts it as running.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_contract.request_kinds import PATHS, RequestKind

from ..conftest import Harness
from ..peers import Script, Turn, is_prefill, produces
from .stories import BENIGN, Event, Leg, Place, Story, assert_honest, tell
from .test_alternates import Pods, two_pods

COMPLETIONS, CHAT = RequestKind.COMPLETIONS, RequestKind.CHAT
SHAPES = [
    Story(CHAT, []),
    Story(COMPLETIONS, [], keeps_ids=True, split=True),
    Story(CHAT, [], again=True, split=True),
]


class State(NamedTuple):
    """A state of docs/understand/resume.md, and how a stream gets there."""

    name: str
    before: Event | None
    """What happened at the first engine; None: it is the first engine's state."""
    place: Place
    is_of_again: bool | None = None
    """Only of answers that are generated again, or only of others; None: of both."""
    is_suspect: bool = False


STATES = [
    State("preparing, nothing delivered", None, Place.REQUESTED),
    State("moving, nothing delivered", None, Place.BEGUN),
    State("streaming", None, Place.STREAMING),
    State("suspect", None, Place.STREAMING, is_suspect=True),
    State("finishing", None, Place.FINISHED),
    State("finishing, counted", None, Place.COUNTED),
    State("ended", None, Place.ENDED),
    *(
        State(f"{name} after {before.name}", before, place, is_of_again)
        for before in (Event.RESET, Event.DRAIN)
        for name, place, is_of_again in (
            ("preparing", Place.REQUESTED, None),
            ("moving", Place.BEGUN, None),
            ("regenerating", Place.EARLY, True),
            ("seam", Place.EARLY, False),
            ("seam", Place.STREAMING, True),
            ("finishing", Place.FINISHED, None),
            ("finishing, counted", Place.COUNTED, None),
            ("ended", Place.ENDED, None),
        )
        # A drain does not have an answer generated again.
        if not (is_of_again and before is Event.DRAIN)
    ),
]


LEGS = st.builds(Leg, st.sampled_from(Place), st.sampled_from(Event))
STORIES = st.builds(
    Story,
    st.sampled_from([COMPLETIONS, CHAT]),
    st.lists(LEGS, max_size=4),
    again=st.booleans(),
    keeps_ids=st.booleans(),
    split=st.booleans(),
)


class Stage:
    """Two pods of a set, whose plans name each other."""

    def __init__(self, pods: Pods) -> None:
        self.pods = pods
        self.harnesses = pods.first, pods.second
        self.has_drained = False
        self._asked = 0

    def play(self, scripts: Callable[[int], Script], health: Script) -> None:
        self._asked = 0

        async def script(turn: Turn) -> None:
            if is_prefill(turn.request):
                # Of the pod that drains, for the engine that goes on.
                await produces(turn)
                return
            number, self._asked = self._asked, self._asked + 1
            await scripts(number)(turn)

        for harness in self.harnesses:
            harness.decode.generate, harness.decode.health = script, health

    def request(self, story: Story) -> tuple[aiohttp.ClientSession, str, dict[str, str]]:
        first = self.pods.first
        prefills = first.prefills if story.split else []
        return first.http, first.url(PATHS[story.kind]), self.pods.plan(*prefills)

    def drain(self) -> None:
        self.has_drained = True
        self.pods.first.sidecar.lifecycle.drain()

    def drain_others(self) -> None:
        self.has_drained = True
        self.pods.second.sidecar.lifecycle.drain()

    def expire(self) -> None:
        for work in list(self.pods.first.sidecar.lifecycle.work):
            work.drain_expired()

    async def idle(self) -> None:
        for harness in self.harnesses:
            await harness.sidecar.lifecycle.idle()
            assert not len(harness.sidecar.overlaps)
            assert await harness.metric("tandem_sidecar_in_flight") == 0
            assert not harness.sidecar.lifecycle.elsewhere


class Theatre:
    """Stages for stories, a new one after each drain."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = AsyncExitStack()
        self._stage: Stage | None = None

    async def stage(self) -> Stage:
        if self._stage is None or self._stage.has_drained:
            await self.close()
            self._stage = await self._stack.enter_async_context(self._open())
        return self._stage

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Stage]:
        async with AsyncExitStack() as stack:
            harness = Harness(stack)
            await harness.prefill()
            async with two_pods(harness, self._folder, resume=True, silence_timeout=0.05) as pods:
                yield Stage(pods)

    async def close(self) -> None:
        await self._stack.aclose()
        self._stage = None


@pytest.fixture
async def theatre(tmp_path: Path) -> AsyncIterator[Theatre]:
    opened = Theatre(tmp_path)
    yield opened
    await opened.close()


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
async def test_every_event_has_a_defined_end_in_every_state(theatre: Theatre, state: State) -> None:
    for shape in SHAPES:
        if shape.again is not state.is_of_again is not None:
            continue
        if shape.again and state.before is Event.DRAIN:
            continue
        for event in Event:
            first = [] if state.before is None else [Leg(Place.STREAMING, state.before)]
            story = replace(shape, legs=[*first, Leg(state.place, event, state.is_suspect)])
            try:
                end = await tell(story, await theatre.stage())
                assert_honest(story, end, whole=is_whole(state, event, story))
            except (AssertionError, TimeoutError) as err:
                err.add_note(f"{state.name}, {event.name}, {story}")
                raise


def is_whole(state: State, event: Event, story: Story) -> bool | None:
    """Whether the client gets all of the stream, because an engine is left that can go on with it,
    or nothing but its end is missing; None: it may."""
    if event in BENIGN or state.place is Place.ENDED:
        return True
    # What the last events have is known, but for the usage of an answer that is generated again.
    lacks_only_its_end = state.place is Place.COUNTED or (
        state.place is Place.FINISHED and (not story.again or event is Event.EARLY_DONE)
    )
    if lacks_only_its_end or event is Event.DRAIN_EXPIRED:
        return lacks_only_its_end
    if state.before is None or state.before is Event.DRAIN:
        # The plan names one other pod; a stream that only left for a drain may also return.
        return True
    # A sidecar asks its engine once more, on a new connection or without KV, before a token came.
    return None if state.place in {Place.REQUESTED, Place.BEGUN} else False


def test_every_course_of_events_has_a_defined_end(tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        theatre = Theatre(tmp_path)

        async def told(story: Story) -> None:
            assert_honest(story, await tell(story, await theatre.stage()))

        @settings(max_examples=100)
        @given(STORIES)
        def tell_any(story: Story) -> None:
            runner.run(told(story))

        try:
            tell_any()
        finally:
            runner.run(theatre.close())
