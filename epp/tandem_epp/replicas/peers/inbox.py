"""Frames of one peer: applies each at most once and in order. Pure."""

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from .frames import Event, Frame, decode_events


class Verdict(StrEnum):
    """What became of a frame or an event; values of a metric label."""

    APPLIED = "applied"
    OLD = "old"
    """A frame that was applied before, or of an epoch that is over."""
    GAP = "gap"
    """A frame before it is missing: the next snapshot makes up for both."""
    UNKNOWN = "unknown"
    """An event that only a newer version understands."""


class PeerReceiver(Protocol):
    """Takes in what peers tell."""

    def reset(self, peer: str) -> None:
        """A snapshot of `peer` begins, or the peer is gone: drop the requests that it placed."""

    def apply(self, peer: str, event: Event) -> None:
        """Apply one event of `peer`."""

    def lacks_snapshot(self, peer: str) -> bool:
        """Whether events of `peer` were lost since its snapshot, which could be applied now."""


class Inbox:
    """The order of one peer's frames."""

    def __init__(
        self, peer: str, receiver: PeerReceiver, count: Callable[[Verdict, int], None]
    ) -> None:
        """`peer` is its instance; `count` gets how many events had which verdict."""
        self._peer, self._receiver, self._count = peer, receiver, count
        self._epoch = -1
        self._next = 0
        """Number of the next frame of this epoch."""
        self.is_complete = False
        """Whether a whole snapshot has come."""
        self._is_current = False
        """Whether a snapshot came and no frame after it is missing."""

    @property
    def needs_snapshot(self) -> bool:
        """Whether only another snapshot tells all that the peer knows."""
        return not self._is_current or self._receiver.lacks_snapshot(self._peer)

    def receive(self, frame: Frame) -> Verdict:
        """Apply `frame` unless it came before or another is missing. Raises
        msgspec.MsgspecError."""
        verdict = self._order(frame)
        if verdict is not Verdict.APPLIED:
            self._count(verdict, len(frame.events))
            return verdict
        if frame.is_snapshot:
            self._receiver.reset(self._peer)
        applied = unknown = 0
        for event in decode_events(frame):
            if event is None:
                unknown += 1
                continue
            self._receiver.apply(self._peer, event)
            applied += 1
        self._count(Verdict.APPLIED, applied)
        self._count(Verdict.UNKNOWN, unknown)
        self.is_complete = self.is_complete or frame.is_complete
        return verdict

    def _order(self, frame: Frame) -> Verdict:
        if frame.is_snapshot:
            if frame.epoch <= self._epoch or frame.number != 0:
                return Verdict.OLD
            self._epoch, self._next, self._is_current = frame.epoch, 1, True
            return Verdict.APPLIED
        if frame.epoch < self._epoch:
            return Verdict.OLD
        if frame.epoch > self._epoch or not self._is_current or frame.number > self._next:
            # All frames until the next snapshot build on the one that is missing.
            self._is_current = False
            return Verdict.GAP
        if frame.number < self._next:
            return Verdict.OLD
        self._next += 1
        return Verdict.APPLIED
