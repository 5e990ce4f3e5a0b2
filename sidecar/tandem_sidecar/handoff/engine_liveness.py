"""What the liveness monitor knows of one engine, and of the legs that wait for it.

state.alive = True            the engine sent something: noted by the leg, with every read
engine.note_reads(now)        learned from at each check
engine.late(now, deadline)    the streams whose token does not come
"""

from collections.abc import Iterable
from typing import Protocol

from tandem_http1.connection import Call

from .token_gaps import FACTOR, Longest, Prompts, token_deadline


class MonitoredLeg(Protocol):
    """A leg that waits for bytes from its engine."""

    def engine_hung(self, detail: str) -> None:
        """The engine hangs. The leg is still in flight: abort it."""


class MovableLeg(MonitoredLeg, Protocol):
    """A leg whose request another engine may go on with."""

    @property
    def has_begun(self) -> bool:
        """Whether the answer has begun."""

    @property
    def awaits_token(self) -> bool:
        """Whether it has, and its engine sends an event for each token."""

    def try_leave(self, detail: str) -> bool:
        """The engine seems to hang: give the request to another one, and abort the leg. Returns
        whether another engine takes it; if not, nothing has changed."""


class LegLiveness:
    """What is known of one leg."""

    __slots__ = (
        "alive",
        "began",
        "engine",
        "has_begun",
        "is_paused",
        "is_streaming",
        "last_read",
        "last_try",
        "prompt_bytes",
    )

    def __init__(self, engine: "EngineLiveness", now: float) -> None:
        self.engine = engine
        self.began = now
        self.alive = False
        """Whether the engine sent something on this leg since the last check."""
        self.is_paused = False
        """Whether the leg does not read, because its client is slow."""
        # Of a movable leg.
        self.has_begun = False
        """Whether its answer has begun."""
        self.is_streaming = False
        """Whether the engine is to send a token soon."""
        self.last_read = now
        """The check after its last byte."""
        self.last_try = now
        """When it last tried to leave."""
        self.prompt_bytes = 0
        """The length of its request, if the engine computes the prompt and then sends an event for
        each token; 0: how long the first one takes is not known."""

    def pause(self) -> None:
        """The leg does not read: that no token comes says nothing of the engine."""
        self.is_paused, self.is_streaming = True, False

    def resume(self) -> None:
        """The leg reads again."""
        self.is_paused = False

    def unwatch(self) -> None:
        """Stop monitoring the leg."""
        self.engine.has_sent = self.engine.has_sent or self.alive
        self.engine.legs.pop(self, None)
        self.engine.movable.pop(self, None)


class EngineLiveness:
    """The state of one engine, and the legs that wait for it."""

    __slots__ = (
        "gaps",
        "has_answered",
        "has_sent",
        "last_alive",
        "last_read",
        "legs",
        "movable",
        "prefills",
        "probe",
        "probed_at",
        "suspected_from",
    )

    def __init__(self, now: float) -> None:
        self.has_answered = False
        """Whether it answered a probe since the last check."""
        self.has_sent = False
        """Whether since then it sent something on a leg that has ended."""
        self.last_read = now
        """When it last sent something."""
        self.last_alive = now
        """When it last sent something, or answered a probe."""
        self.suspected_from = now
        """`last_alive`, or when its movable legs last tried to leave: later ones have their own
        time."""
        self.probed_at: float | None = None
        """When `/health` was first requested in this silence; None: it was not."""
        self.probe: Call | None = None
        """The probe in flight."""
        self.legs: dict[LegLiveness, MonitoredLeg] = {}
        self.movable: dict[LegLiveness, MovableLeg] = {}
        """Those of `legs` that may leave."""
        self.gaps = Longest()
        """Times between two tokens of a stream."""
        self.prefills = Prompts()
        """Times until a stream's first token."""

    def note_reads(self, now: float) -> bool:
        """Learn from what came since the last check; returns whether anything did."""
        self._learn(now)
        has_read, self.has_sent = self.has_sent, False
        for state in self.legs:
            if state.alive:
                # Reset here, so that a read from the engine costs one assignment and no clock.
                state.alive, has_read = False, True
        is_alive, self.has_answered = has_read or self.has_answered, False
        if has_read:
            self.last_read = now
        if is_alive:
            self.last_alive = self.suspected_from = now
            self.cancel_probe()
        return is_alive

    def _learn(self, now: float) -> None:
        gap, gaps = 0.0, 0
        for state, leg in self.movable.items():
            if not state.alive:
                continue
            if state.is_streaming:
                gap, gaps = max(gap, now - state.last_read), gaps + 1
            state.last_read = now
            state.is_streaming = leg.awaits_token and not state.is_paused
            if leg.has_begun and not state.has_begun:
                state.has_begun = True
                if state.is_streaming and state.prompt_bytes:
                    self.prefills.add(now - state.began, state.prompt_bytes, now)
        if gaps:
            self.gaps.add(gap, now, gaps)

    def token_deadline(self, floor: float, prompt_floor: float) -> float | None:
        """Seconds without a token after which a stream is late; None: too little is known.
        `prompt_floor`: the least that a prompt may take of whose length too little is known."""
        # As of then, so that the deadline does not fall while it is waited for.
        longest, gaps, prefills = self.gaps.value(self.last_read), self.gaps.count, self.prefills
        prompts = [state.prompt_bytes for state in self.movable if not state.has_begun]
        prefill = FACTOR * prefills.seconds if prompts else 0.0
        if not all(map(prefills.covers, prompts)):
            prefill = max(prefill, prompt_floor)
        return token_deadline(longest, gaps, floor=floor, prefill=prefill)

    def first_deadline(self, floor: float) -> float | None:
        """The same for a stream's first token."""
        return token_deadline(self.prefills.seconds, self.prefills.count, floor=floor)

    def waiting(self, now: float, deadline: float) -> list[LegLiveness]:
        """The streams whose first token is late: of prompts no longer than those that were
        computed, while no leg gets anything. An engine that sends others theirs has a queue."""
        return [
            state
            for state in self.movable
            if not (state.has_begun or state.is_paused)
            and self.prefills.covers(state.prompt_bytes)
            and now - max(state.began, state.last_try, self.last_read) >= deadline
        ]

    def late(self, now: float, deadline: float) -> list[LegLiveness]:
        """The streams whose next token is late. If no leg got anything for as long, all movable
        legs that read: the engine computes no prompt either."""
        late = [
            state
            for state in self.movable
            if state.is_streaming and now - max(state.last_read, state.last_try) >= deadline
        ]
        if late and now - self.last_read >= deadline:
            return [state for state in self.movable if not state.is_paused]
        return late

    def leave(self, states: Iterable[LegLiveness], detail: str, now: float) -> None:
        """Have these legs go on at other engines, as far as those take them."""
        for state in states:
            # Ending one leg may end another.
            if (leg := self.movable.get(state)) is not None and not leg.try_leave(detail):
                state.last_try = now

    def cancel_probe(self) -> None:
        """The engine is alive, or of no interest any more."""
        self.probed_at = None
        if self.probe is not None:
            self.probe.abort()
            self.probe = None
