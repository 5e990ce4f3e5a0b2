"""What happens to one stream, told as a list of legs, and what must be true at its end.

    story = Story(kind, [Leg(Place.STREAMING, Event.RESET), Leg(Place.SEAM, Event.DRAIN)])
    end = await tell(story, stage)      serve it
    assert_honest(story, end)           the reference, or a part of it and one error

A leg is one engine's part of the stream: it sends its answer up to a place, and then the event
happens. The places are the states of docs/understand/resume.md.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

import aiohttp

from tandem_contract.request_kinds import RequestKind

from ..peers import Script, Turn, healthy
from .answers import Json, read
from .events import DONE, chat_event, event
from .scripted import ERROR, answer_of, asked

DELIVERED = 4
"""Tokens that the first engine sends before a stream moves."""


class Place(Enum):
    """Up to where an engine sends its answer before something happens."""

    REQUESTED = auto()
    """Nothing."""
    BEGUN = auto()
    """The head, and the role of a chat."""
    EARLY = auto()
    """Its first two tokens. An engine that generates the answer again repeats them."""
    STREAMING = auto()
    """Its first tokens. Of one that generates again the last of them is new."""
    FINISHED = auto()
    """Up to its finish reason."""
    COUNTED = auto()
    """Up to its usage."""
    ENDED = auto()
    """All of it."""


class Event(Enum):
    """What happens there."""

    TOKENS = auto()
    """The engine goes on."""
    JOINED = auto()
    """It goes on, and all that is left comes at once."""
    CUT_EVENT = auto()
    """It dies within an event."""
    ERROR_EVENT = auto()
    RESET = auto()
    EOF = auto()
    """It ends the answer."""
    ABORT = auto()
    """It finishes the answer with the reason `abort`."""
    EARLY_DONE = auto()
    """It sends `[DONE]` without a finish reason."""
    REFUSED = auto()
    """It answers with 503, if it has sent nothing yet; else it dies."""
    SILENCE = auto()
    """It hangs."""
    DRAIN = auto()
    """The first pod drains."""
    OTHER_DRAIN = auto()
    """The other pods drain."""
    DRAIN_EXPIRED = auto()
    """The first pod's drain is over."""
    CLIENT_GONE = auto()


BENIGN = frozenset({Event.TOKENS, Event.JOINED, Event.DRAIN, Event.OTHER_DRAIN})
"""The engine goes on, unless its peer leaves."""


@dataclass(frozen=True)
class Leg:
    place: Place = Place.ENDED
    event: Event = Event.TOKENS
    is_suspect: bool = False
    """The event waits until the engine is probed, since it sends nothing."""


@dataclass(frozen=True)
class Story:
    kind: RequestKind
    legs: Sequence[Leg]
    """Of the engines, in the order in which they are asked; further ones send all of it."""
    again: bool = False
    """The answer is generated again, not continued."""
    keeps_ids: bool = False
    split: bool = False

    @property
    def body(self) -> Json:
        more: Json = {"temperature": 0, "presence_penalty": 1} if self.again else {}
        more |= {"return_token_ids": True} if self.keeps_ids else {}
        return asked(is_chat=self.kind is RequestKind.CHAT, **more)


@dataclass
class End:
    """What the client got of a stream, and whether all of it came."""

    status: int = 0
    body: bytes = b""
    is_whole: bool = False
    """Whether the answer ended as HTTP ends it."""
    has_left: bool = False


class Stage(Protocol):
    """The engines, and what serves their streams."""

    def play(self, scripts: Callable[[int], Script], health: Script) -> None:
        """The script of each engine in the order in which they are asked, from 0."""

    def request(self, story: Story) -> tuple[aiohttp.ClientSession, str, dict[str, str]]:
        """Where to ask, and with which headers."""

    def drain(self) -> None:
        """The first pod drains."""

    def drain_others(self) -> None:
        """The other pods drain."""

    def expire(self) -> None:
        """The first pod's drain is over."""

    async def idle(self) -> None:
        """Return when nothing is served; whatever counts requests counts none."""


@dataclass
class _Telling:
    story: Story
    stage: Stage
    end: End = field(default_factory=End)
    turns: list[Turn] = field(default_factory=list)
    """`gone` is set once the engine has ended its answer, or its peer has left."""
    alive: asyncio.Event = field(default_factory=asyncio.Event)
    """Not while an engine hangs."""
    probed: asyncio.Event = field(default_factory=asyncio.Event)
    asking: "asyncio.Task[None] | None" = None

    def script(self, number: int) -> Script:
        legs = self.story.legs
        leg = legs[number] if number < len(legs) else Leg()

        async def script(turn: Turn) -> None:
            self.turns.append(turn)
            try:
                is_free = await self._serve(turn, leg, f"cmpl-{number}")
            except ConnectionError:
                is_free = True
            if is_free:
                turn.gone.set()

        return script

    async def health(self, turn: Turn) -> None:
        self.probed.set()
        waits = {asyncio.create_task(event.wait()) for event in (self.alive, turn.gone)}
        _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await healthy(turn)

    async def _serve(self, turn: Turn, leg: Leg, id: str) -> bool:
        """Send the answer; returns whether the engine ended it."""
        events = answer_of(turn.request.json, id=id)
        place = self._count(leg.place, len(events))
        if leg.place is not Place.REQUESTED:
            turn.stream()
        for each in events[:place]:
            turn.chunk(each)
        if leg.place is Place.ENDED:
            turn.end()
        await turn.writer.drain()
        await settle()
        if leg.is_suspect:
            self.probed.clear()
            await self.probed.wait()
        return await self._happens(turn, leg, events[place:])

    def _count(self, place: Place, events: int) -> int:
        role = self.story.kind is RequestKind.CHAT
        tokens = events - role - 2
        return {
            Place.REQUESTED: 0,
            Place.BEGUN: role,
            Place.EARLY: role + min(2, tokens - 1),
            Place.STREAMING: role + min(DELIVERED, tokens - 1),
            Place.FINISHED: events - 2,
            Place.COUNTED: events - 1,
            Place.ENDED: events,
        }[place]

    async def _happens(self, turn: Turn, leg: Leg, rest: list[bytes]) -> bool:  # noqa: C901
        is_ended, happened = leg.place is Place.ENDED, leg.event
        if happened is Event.REFUSED and leg.place is Place.REQUESTED:
            turn.answer(503, b'{"error": {"message": "shutting down"}}')
            return True
        if happened in {Event.RESET, Event.REFUSED}:
            turn.die()
            return True
        if happened is Event.CLIENT_GONE:
            assert self.asking is not None
            self.end.has_left = self.asking.cancel()
        elif happened is Event.DRAIN:
            self.stage.drain()
        elif happened is Event.OTHER_DRAIN:
            self.stage.drain_others()
        elif happened is Event.DRAIN_EXPIRED:
            self.stage.expire()
        if is_ended:
            return True
        if leg.place is Place.REQUESTED and not turn.gone.is_set():
            turn.stream()
        if happened is Event.SILENCE:
            self.alive.clear()
            await turn.gone.wait()
            self.alive.set()
            return False
        if happened in {Event.CLIENT_GONE, Event.DRAIN_EXPIRED}:
            await turn.gone.wait()
            return False
        await settle()
        if turn.gone.is_set():
            return False
        made = chat_event if self.story.kind is RequestKind.CHAT else event
        match happened:
            case Event.CUT_EVENT:
                turn.chunk(rest[0][: len(rest[0]) // 2])
                turn.die()
            case Event.ERROR_EVENT:
                rest = [ERROR, DONE]
            case Event.ABORT:
                rest = [made("", None, finish="abort"), DONE]
            case Event.EARLY_DONE if leg.place is not Place.FINISHED:
                rest = [DONE]
            case Event.EOF:
                rest = []
            case Event.JOINED:
                rest = [b"".join(rest)]
        if happened is not Event.CUT_EVENT:
            for each in rest:
                turn.chunk(each)
            turn.end()
        return True

    async def ask(self) -> None:
        http, url, headers = self.stage.request(self.story)
        end = self.end
        async with http.post(url, json=self.story.body, headers=headers) as response:
            end.status = response.status
            with suppress(aiohttp.ClientPayloadError):
                async for piece in response.content.iter_any():
                    end.body += piece
                end.is_whole = True


async def settle() -> None:
    """Let what is under way on this loop arrive. Nothing depends on it but which case is met."""
    for _ in range(20):
        await asyncio.sleep(0)


async def tell(story: Story, stage: Stage) -> End:
    """Serve the stream; returns once everything that served it is free again."""
    telling = _Telling(story, stage)
    telling.alive.set()
    stage.play(telling.script, telling.health)
    telling.asking = asyncio.create_task(telling.ask())
    with suppress(asyncio.CancelledError):
        await asyncio.wait_for(telling.asking, 15)
    for turn in telling.turns:
        await asyncio.wait_for(turn.gone.wait(), 10)
    await asyncio.wait_for(stage.idle(), 10)
    return telling.end


def assert_honest(story: Story, end: End, *, whole: bool | None = None) -> None:
    """The client got the reference; or an exact part of it and one error, unless it left. `whole`:
    which of the two; None: either."""
    got, errors = _read(end)
    reference = _without_heads(read(answer_of(story.body)))
    if end.has_left:
        _assert_part(got, reference)
        return
    assert end.is_whole, "cut without an error"
    if errors or end.status != 200:
        assert not whole, errors or end.body
        assert len(errors) == 1
        _assert_part(got, reference)
        assert "[DONE]" not in got.get("ends", [])
    else:
        assert whole is not False
        assert got == reference


def _read(end: End) -> tuple[Json, list[Any]]:
    """What the client has of the answer, and its errors; the last event of all is the error."""
    if end.status != 200:
        return {}, [end.body] if end.body else []
    *events, rest = end.body.split(b"\n\n")
    assert end.has_left or not rest
    errors = [each for each in events if each.startswith(b'data: {"error"')]
    assert not errors or events[-1] in (errors[-1], DONE.strip())
    kept = [each for each in events if each not in errors]
    if errors:
        kept = [each for each in kept if each != DONE.strip()]
    return _without_heads(read([each + b"\n\n" for each in kept])), errors


def _without_heads(answer: Json) -> Json:
    assert len({id for id, _ in answer.pop("heads", ())}) <= 1
    return answer


def _assert_part(got: Json, reference: Json) -> None:
    for name, value in got.items():
        assert reference[name][: len(value)] == value, name
