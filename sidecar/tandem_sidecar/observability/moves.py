"""What a request's moves to other engines came to, by its legs. Pure.

    move_reports(record) ─► one MoveReport for each engine that went on with it, and one if none did

Metrics, log lines and `/requests/ID` are made of these reports.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Final, NamedTuple

from .record import NO_ENGINE, Leg, Move, MoveMethod, Outcome, Phase, Record, Result


class MoveCause(StrEnum):
    """Why a request left its engine."""

    CRASH = "crash"
    """The connection was lost, or none could be made."""
    SILENCE = "silence"
    """The engine hung."""
    DEADLINE = "deadline"
    """A time limit passed."""
    ERROR = "error"
    """The engine answered with an error, or its stream broke off with one."""
    DRAIN = "drain"
    """The engine drains, or this process does."""


class MoveResult(StrEnum):
    """How a move ended."""

    DONE = "done"
    """The client got more of the answer."""
    REFUSED = "refused"
    """The next engine answered with an error."""
    FAILED = "failed"
    """It failed before the client got anything of it."""
    DIFFERED = "differed"
    """It generated another answer than the one that the client has the beginning of."""
    ABANDONED = "abandoned"
    """The client left before that, or the next engine drained, too."""
    NO_ENGINE = "no_engine"
    """No engine was left that may serve the request."""
    IMPOSSIBLE = "impossible"
    """The request can be neither continued nor generated again."""


_CAUSES: Final = {
    Result.LOST: MoveCause.CRASH,
    Result.UNREACHABLE: MoveCause.CRASH,
    Result.SILENT: MoveCause.SILENCE,
    Result.DEADLINE: MoveCause.DEADLINE,
    Result.ABORTED: MoveCause.DRAIN,
}
"""Result of the leg that a request left → why it did; every other is an error."""
_RESULTS: Final = {
    Result.ANSWERED: MoveResult.DONE,
    Result.REJECTED: MoveResult.REFUSED,
    Result.BUSY: MoveResult.REFUSED,
    Result.DIFFERED: MoveResult.DIFFERED,
    Result.ABORTED: MoveResult.ABANDONED,
}
"""Result of the last leg at an engine of which the client got nothing → how the move to it ended;
every other is a failure."""


class MoveReport(NamedTuple):
    """One move, or the end of a request that could not move; times as in the record."""

    at: float
    cause: MoveCause
    method: MoveMethod
    result: MoveResult | None
    """None: the next engine has sent nothing yet."""
    source: str
    """Backend that the request left; empty: it was at none yet."""
    target: str
    """Backend that it was given to; empty: none."""
    delivered: int = 0
    """As in `Move`, and so the next two."""
    seam: int = 0
    prompt: int = 0
    gap: float | None = None
    """Seconds from the last bytes that the client had to the next; None: there are none."""
    why: str = ""
    """Why no other engine goes on."""

    @property
    def recomputed(self) -> int:
        """Tokens that the next engine was given to compute once more: the prompt, as far as its
        length is known, and what the client had of the answer."""
        return self.prompt + self.delivered


def move_reports(record: Record) -> Iterator[MoveReport]:
    """The reports of a request, in the order of its moves."""
    ends = [*(move.legs for move in record.moves), len(record.legs)][1:]
    for move, end in zip(record.moves, ends, strict=True):
        before, legs = _decode(record.legs[: move.legs]), record.legs[move.legs : end]
        last = _decode(legs)
        source = "" if before is None else before.backend
        gap = None
        if move.resumed is not None and move.last_byte is not None:
            gap = move.resumed - move.last_byte
        yield MoveReport(
            legs[0].started if legs else record.received,
            _cause(before),
            move.method,
            _result(record, move, last),
            source,
            "" if last is None else last.backend,
            move.delivered,
            move.seam,
            move.prompt,
            gap,
        )
    if (end_of := _not_moved(record)) is not None:
        yield end_of


def _not_moved(record: Record) -> MoveReport | None:
    """The report of a request that ended because no other engine went on with it."""
    why, last = record.not_resumed, _decode(record.legs)
    is_cut = record.outcome == Outcome.CUT or why == NO_ENGINE
    if not why or not is_cut or record.outcome not in {Outcome.CUT, Outcome.FAILED}:
        return None
    if last is not None and last.result is Result.DIFFERED:
        # The result of the last move.
        return None
    result = MoveResult.NO_ENGINE if why == NO_ENGINE else MoveResult.IMPOSSIBLE
    at = record.received if record.ended is None else record.ended
    source = "" if last is None else last.backend
    return MoveReport(at, _cause(last), MoveMethod.NONE, result, source, "", why=why)


def _decode(legs: list[Leg]) -> Leg | None:
    """The last decode leg."""
    return next((leg for leg in reversed(legs) if leg.phase is Phase.DECODE), None)


def _cause(leg: Leg | None) -> MoveCause:
    # Without a decode leg the prefill is under way, which only a drain interrupts.
    if leg is None or leg.result is None:
        return MoveCause.DRAIN
    return _CAUSES.get(leg.result, MoveCause.ERROR)


def _result(record: Record, move: Move, last: Leg | None) -> MoveResult | None:
    if move.resumed is not None:
        return MoveResult.DONE
    if last is None or last.result is None:
        return MoveResult.ABANDONED if record.outcome else None
    if last.result is Result.ERROR and (last.status or 0) >= 400:
        return MoveResult.REFUSED
    return _RESULTS.get(last.result, MoveResult.FAILED)
