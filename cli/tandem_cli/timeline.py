"""One request's life, joined from what EPP and sidecars remember of it. Pure.

    heard ──join──► one Passage for each time the id was used ──lines, to_json──► people, programs

Clients reuse ids, and a request whose connection broke is sent again under its own: a sidecar's
account belongs to the latest decision before it that named its pod, or to none (the EPP was away).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

from tandem_contract.timing import Timing
from tandem_contract.trace import CandidateTrace, DecisionTrace, LegTrace, SidecarTrace

_SKEW: Final = 1.0
"""Seconds by which the clocks of two nodes may differ."""


class Decided(NamedTuple):
    """A decision, and which EPP told of it."""

    by: str
    trace: DecisionTrace


class Served(NamedTuple):
    """What became of a request, and the pod whose sidecar told of it."""

    by: str
    trace: SidecarTrace


class Silent(NamedTuple):
    """Who was asked and did not answer."""

    name: str
    why: str


@dataclass(frozen=True)
class Heard:
    """What those that were asked said."""

    decided: tuple[Decided, ...] = ()
    served: tuple[Served, ...] = ()
    silent: tuple[Silent, ...] = ()
    asked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Passage:
    """One request: its decision, and each pod that had it."""

    decided: Decided | None
    served: tuple[Served, ...]

    @property
    def began(self) -> float:
        """Unix seconds; the EPP's clock where it decided."""
        return self.decided.trace.decided if self.decided else self.served[0].trace.received


def join(heard: Heard) -> tuple[Passage, ...]:
    """The requests that used the id, the oldest first."""
    decided = sorted(heard.decided, key=lambda each: each.trace.decided)
    theirs: dict[int | None, list[Served]] = {}
    alone = []
    for served in sorted(heard.served, key=lambda each: each.trace.received):
        found = [i for i, each in enumerate(decided) if _follows(served, each)]
        if found:
            theirs.setdefault(found[-1], []).append(served)
        else:
            alone.append(Passage(None, (served,)))
    passages = [Passage(each, tuple(theirs.get(i, ()))) for i, each in enumerate(decided)]
    return tuple(sorted([*passages, *alone], key=lambda passage: passage.began))


def to_json(request_id: str, heard: Heard) -> dict[str, object]:
    """`{request_id, requests: [{decision, served}], silent}`, each account with its source."""
    return {
        "request_id": request_id,
        "requests": [
            {
                "decision": _sourced("epp", passage.decided) if passage.decided else None,
                "served": [_sourced("pod", served) for served in passage.served],
            }
            for passage in join(heard)
        ],
        "silent": [silent._asdict() for silent in heard.silent],
    }


def lines(request_id: str, heard: Heard) -> Iterator[str]:
    """The same for people: a line for each event, with the milliseconds since the first."""
    passages = join(heard)
    for i, passage in enumerate(passages, 1):
        number = f" ({i} of {len(passages)})" if len(passages) > 1 else ""
        when = datetime.fromtimestamp(passage.began, UTC).isoformat(" ", "milliseconds")
        yield f"Request {request_id}{number}, {when}"
        for at, text in sorted(_events(passage), key=lambda event: event[0]):
            yield f"{at * 1000:10.1f} ms  {text}"
        yield ""
    for silent in heard.silent:
        yield f"{silent.name} did not answer: {silent.why}"


def unknown(request_id: str, heard: Heard) -> str:
    """Why there is nothing to show."""
    answered = [name for name in heard.asked if name not in {each.name for each in heard.silent}]
    parts = [f"nobody knows request {request_id}: asked {', '.join(answered) or 'nobody'}"]
    parts += [f"{silent.name} did not answer ({silent.why})" for silent in heard.silent]
    return (
        "; ".join(parts)
        + ". The id is in the response header x-request-id. EPPs and sidecars each "
        "keep their latest requests (--history) for as long as they run."
    )


Event = tuple[float, str]
"""Seconds after the passage began, and what happened."""


def _follows(served: Served, decided: Decided) -> bool:
    named = {candidate.name for candidate in decided.trace.decode}
    in_time = decided.trace.decided <= served.trace.received + _SKEW
    return in_time and served.by in named


def _events(passage: Passage) -> Iterator[Event]:
    if passage.decided is not None:
        yield from _decision(passage.decided)
    for served in passage.served:
        # Never before the decision, whatever the clocks of two nodes say.
        yield from _serving(served, max(0.0, served.trace.received - passage.began))


def _decision(decided: Decided) -> Iterator[Event]:
    trace = decided.trace
    took = f"{decided.by} took {_seconds(trace.decision_seconds)}"
    if trace.path is None:
        yield 0.0, f"refused    {trace.reason}, status {trace.status}; {took}"
        return
    known = f"{trace.prompt_tokens} prompt tokens, {trace.cached_tokens} of them cached there"
    yield 0.0, f"decided    {trace.path} ({trace.reason}): {known}; {took}"
    for phase, ranked in (("decode", trace.decode), ("prefill", trace.prefill)):
        if ranked:
            others = [f"then {candidate.name}" for candidate in ranked[1:]]
            yield 0.0, f"  {phase:8} {', '.join((_candidate(ranked[0]), *others))}"
    if trace.ended is not None:
        head = f"status {trace.status}" if trace.status is not None else "no answer"
        yield trace.ended, f"closed     {head}, as {decided.by} saw it{_timed(trace.timing)}"


def _serving(served: Served, at: float) -> Iterator[Event]:
    trace = served.trace
    yield at, f"received   by {served.by}: {trace.kind} {trace.target}"
    for leg in trace.legs:
        yield at + leg.started, _leg(leg)
    if trace.first_byte is not None:
        yield at + trace.first_byte, "first byte to the client"
    if trace.ended is not None:
        status = f"status {trace.status}" if trace.status is not None else "no status"
        path = f", {trace.path} ({trace.reason})" if trace.path else ""
        yield at + trace.ended, f"ended      {trace.outcome}, {status}{path}"


def _leg(leg: LegTrace) -> str:
    if leg.ended is None:
        how = "running"
    else:
        how = f"{leg.result or 'ended'} after {_seconds(leg.ended - leg.started)}"
    parts = [how]
    if leg.status is not None:
        parts.append(f"status {leg.status}")
    if leg.first_byte is not None and leg.phase != "prefill":
        parts.append(f"first byte after {_seconds(leg.first_byte - leg.started)}")
    if leg.detail:
        parts.append(leg.detail)
    return f"{leg.phase:10} on {leg.backend}: {', '.join(parts)}{_timed(leg.timing)}"


def _timed(timing: Timing | None) -> str:
    """What the engine told, in brackets."""
    if timing is None:
        return ""
    seconds = {"queue": timing.queue, "compute": timing.compute, "KV transfer": timing.transfer}
    counts = {
        "KV bytes": timing.bytes,
        "tokens computed": timing.computed,
        "tokens cached": timing.cached,
    }
    known = [f"{name} {_seconds(figure)}" for name, figure in seconds.items() if figure is not None]
    known += [f"{name} {figure}" for name, figure in counts.items() if figure is not None]
    return f" [{', '.join(known)}]" if known else ""


def _candidate(candidate: CandidateTrace) -> str:
    parts = [f"{candidate.in_flight} in flight"]
    if candidate.waiting is not None:
        parts.append(f"{candidate.waiting:.0f} waiting")
    if candidate.kv_usage is not None:
        parts.append(f"{candidate.kv_usage:.0%} of its KV cache in use")
    return f"{candidate.name} ({', '.join(parts)})"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _sourced(key: str, told: Decided | Served) -> dict[str, object]:
    return {key: told.by, **msgspec.to_builtins(told.trace)}
