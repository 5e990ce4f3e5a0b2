"""Compares the answers of a run with those of a reference server.

Each question is asked once, few at a time. Where the answers differ, the reference is asked again,
alone and under the run's load: the answer is `wrong` only if the reference repeats itself.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Final

from ..calls import Answer, Call
from ..client.reference import compare
from ..records import Outcome
from .protocol import Verdict
from .turns import Send

WIDTH: Final = 4
"""Questions at a time in the first pass: a small batch rarely changes a greedy answer, and where it
does, the question is asked again alone. Much faster than one at a time."""
AGAIN: Final = 3
"""Times that a question is asked again under load."""
MOST_LOAD: Final = 64
"""Questions at a time under load at most: more make the check slow, not stricter."""

OnVerdict = Callable[[Verdict], None]


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that the target answered."""

    index: int
    turn: int
    call: Call
    answer: Answer

    def verdict(self, outcome: Outcome | None, error: str = "") -> Verdict:
        """The verdict on its answer."""
        return Verdict(index=self.index, turn=self.turn, outcome=outcome, error=error)


@dataclass(slots=True, eq=False)
class _Suspect:
    """An answer that differs from the reference's first one."""

    entry: Answered
    reference: Answer
    """The first one."""
    reason: str
    asked: int = 0
    """Times under load."""
    others: list[Answer] = field(default_factory=list)
    """Further answers of the reference. Failures say nothing, unless there are no others."""

    def verdict(self) -> Verdict:
        if self.others and all(compare(other, self.reference) is None for other in self.others):
            return self.entry.verdict(Outcome.WRONG, self.reason)
        reason = f"{self.reason}, but the reference does not repeat itself"
        return self.entry.verdict(Outcome.DIFFERS, reason)


async def check_answers(
    send: Send, answered: Sequence[Answered], concurrency: int, on_verdict: OnVerdict
) -> None:
    """Compare all answers with those that `send` gets from the reference.

    `concurrency`: requests of the run that were in flight at the same time. `on_verdict` gets a
    verdict for each answer, as soon as it is known.
    """
    suspects: list[_Suspect] = []

    async def ask(entry: Answered) -> None:
        result = await send(entry.call)
        if result.outcome is not Outcome.OK:
            on_verdict(entry.verdict(None, result.error or "no answer"))
        elif difference := compare(entry.answer, result.answer):
            suspects.append(_Suspect(entry, result.answer, str(difference)))
        else:
            on_verdict(entry.verdict(Outcome.OK))

    await _for_each(ask, answered, WIDTH)
    repeating = [s for s in suspects if not await _is_decided_alone(send, s, on_verdict)]
    await _ask_under_load(send, repeating, answered, min(concurrency, MOST_LOAD), on_verdict)


async def _is_decided_alone(send: Send, suspect: _Suspect, on_verdict: OnVerdict) -> bool:
    """Ask again without other load; whether that decides."""
    result = await send(suspect.entry.call)
    if result.outcome is not Outcome.OK:
        return False
    if compare(suspect.entry.answer, result.answer) is None:
        # Alone, the reference gives this answer: the first one was changed by the other questions.
        on_verdict(suspect.entry.verdict(Outcome.OK))
        return True
    suspect.others.append(result.answer)
    if compare(suspect.reference, result.answer) is None:
        return False
    on_verdict(suspect.verdict())
    return True


async def _ask_under_load(
    send: Send,
    suspects: Sequence[_Suspect],
    answered: Sequence[Answered],
    width: int,
    on_verdict: OnVerdict,
) -> None:
    """Ask `width` questions at a time until each suspect has its verdict."""

    async def ask(suspect: _Suspect) -> None:
        result = await send(suspect.entry.call)
        suspect.asked += 1
        if result.outcome is Outcome.OK:
            suspect.others.append(result.answer)
        if suspect.asked == AGAIN:
            on_verdict(suspect.verdict())

    again = [suspect for suspect in suspects for _ in range(AGAIN)]
    others = cycle([entry.call for entry in answered])
    for first in range(0, len(again), width):
        batch = again[first : first + width]
        # Other questions of the run fill the batch up to its load.
        fill = [send(call) for call in islice(others, width - len(batch))]
        await asyncio.gather(*map(ask, batch), *fill)


async def _for_each(
    work: Callable[[Answered], Awaitable[None]], entries: Iterable[Answered], width: int
) -> None:
    """Do the work for all entries, `width` at a time."""
    waiting = iter(entries)

    async def run() -> None:
        for entry in waiting:
            await work(entry)

    async with asyncio.TaskGroup() as group:
        for _ in range(width):
            group.create_task(run())
