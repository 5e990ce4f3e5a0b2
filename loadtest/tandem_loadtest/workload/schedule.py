"""The sessions of a run, with their start times: `sessions(workload, arrivals, seed=7, …)`.

Every worker process calls it with the same arguments but `part`, and gets every `parts`-th session;
together they get each session once.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Final, Protocol

from .arrivals import start_times
from .presets import ModelMix, SessionBuilder, think_time
from .sessions import Session
from .settings import Arrivals, Workload, WorkloadError
from .sharegpt import (
    Conversation,
    CountTokens,
    Limits,
    estimate_tokens,
    load_conversations,
    to_turns,
)
from .text import digest
from .traces import Arrival, load_trace, scale, to_session

FILES: Final = ("trace", "sharegpt")
"""Workloads that are read from a file."""


class _Source(Protocol):
    """Makes the session at any index; it depends on nothing but the workload and the seed."""

    def session(self, index: int, start: float | None) -> Session:
        """The session at `index`, which starts at `start` seconds (None: in closed loop)."""


def sessions(
    workload: Workload,
    arrivals: Arrivals,
    *,
    seed: int,
    limit: int | None = None,
    duration: float | None = None,
    part: int = 0,
    parts: int = 1,
    count_tokens: CountTokens = estimate_tokens,
) -> Iterator[Session]:
    """Sessions `part`, `part` + `parts`, … of the schedule, in order of their start.

    The schedule ends after `limit` sessions, and before the first that would start at `duration`
    seconds or later. In closed loop sessions have no start time, and only `limit` ends it. A file's
    sessions are sent once: a repeated prompt would come from the server's prefix cache.
    `count_tokens` counts the tokens of a ShareGPT-like file's text; it must be the same in every
    process.

    A file is read at the first call, its sessions are made when they are asked for. To make a
    session takes about 10 µs, less than a µs if it belongs to another part.

    Raises WorkloadError (before it returns) when settings are missing or do not fit together, or
    when the file is malformed.
    """
    if arrivals.process == "trace" and workload.preset != "trace":
        raise WorkloadError(f"arrivals `trace` need a trace; the workload is {workload.preset}")
    if limit is None and duration is None and workload.preset not in FILES:
        raise WorkloadError("the run has no end: give a number of sessions or a duration")
    source, limit = _source(workload, arrivals, seed, limit, count_tokens)
    times: Iterable[float | None]
    if isinstance(source, _TraceSource) and arrivals.process == "trace":
        times = source.times
    else:
        times = start_times(arrivals, seed=seed, duration=duration)
    starts = enumerate(until(times, duration))
    return (source.session(i, start) for i, start in islice(starts, limit) if i % parts == part)


def _source(
    workload: Workload,
    arrivals: Arrivals,
    seed: int,
    limit: int | None,
    count_tokens: CountTokens,
) -> tuple[_Source, int | None]:
    """What makes the sessions, and their number: `limit`, or fewer if a file has fewer."""
    if workload.preset == "trace":
        requests = _load_trace(workload, arrivals.time_factor, limit)
        return _TraceSource(requests, workload, seed), len(requests)
    if workload.preset == "sharegpt":
        conversations = _load_conversations(workload, count_tokens, limit)
        source = _ConversationSource(conversations, workload, count_tokens, seed)
        return source, len(conversations)
    return SessionBuilder(workload, seed), limit


def until(times: Iterable[float | None], duration: float | None) -> Iterator[float | None]:
    """The start times before `duration`; None, as in closed loop, is before any."""
    if duration is None:
        return iter(times)
    return takewhile(lambda start: start is None or start < duration, times)


def _file(workload: Workload) -> Path:
    """The workload's file. Raises WorkloadError for settings that files do not have."""
    if workload.file is None:
        raise WorkloadError(f"workload {workload.preset} needs a file")
    unused = ["shared", "long", *(["turns", "think"] if workload.preset == "trace" else [])]
    for name in unused:
        if getattr(workload, name) is not None:
            raise WorkloadError(f"`{name}` does not apply to {workload.preset}: the file decides")
    return Path(workload.file)


def _load_trace(workload: Workload, time_factor: float, limit: int | None) -> list[Arrival]:
    arrivals = load_trace(_file(workload), limit=limit)
    longest_prompt = max(a.prompt_tokens for a in arrivals)
    longest_output = max(a.output_tokens for a in arrivals)
    try:
        return scale(
            arrivals,
            max_prompt_tokens=workload.prompt_tokens or longest_prompt,
            max_output_tokens=workload.output_tokens or longest_output,
            time_factor=time_factor,
        )
    except ValueError as err:
        raise WorkloadError(f"{workload.file}: {err}") from err


class _TraceSource:
    """Sessions of one turn from a trace."""

    def __init__(self, arrivals: list[Arrival], workload: Workload, seed: int) -> None:
        self._arrivals = arrivals
        self._mix = ModelMix(workload.models, seed)
        self.times = [arrival.at for arrival in arrivals]
        """The trace's own start times."""

    def session(self, index: int, start: float | None) -> Session:
        return to_session(self._arrivals[index], start, self._mix.model(index))


def _load_conversations(
    workload: Workload, count_tokens: CountTokens, limit: int | None
) -> list[Conversation]:
    most = workload.prompt_tokens
    file = _file(workload)
    if most is None:
        return load_conversations(file, limit=limit)
    limits = Limits(most, turns=1)
    conversations = [c for c in load_conversations(file) if to_turns(c, limits, count_tokens)]
    if not conversations:
        raise WorkloadError(f"{file}: every first prompt is longer than {most} tokens")
    return conversations[:limit]


class _ConversationSource:
    """Sessions from recorded conversations."""

    def __init__(
        self,
        conversations: list[Conversation],
        workload: Workload,
        count_tokens: CountTokens,
        seed: int,
    ) -> None:
        self._conversations = conversations
        self._limits = Limits(workload.prompt_tokens, workload.output_tokens, workload.turns)
        self._count_tokens = count_tokens
        self._think = workload.think or 0.0
        self._mix = ModelMix(workload.models, seed)
        self._seed = seed

    def session(self, index: int, start: float | None) -> Session:
        conversation = self._conversations[index]
        model = self._mix.model(index)
        generator = random.Random(digest(self._seed, f"think/{index}"))
        turns = [
            replace(turn, think=think_time(generator, self._think), model=model)
            for turn in to_turns(conversation, self._limits, self._count_tokens)
        ]
        if start is not None:
            turns[0] = replace(turns[0], think=0.0)
        return Session(index, tuple(turns), conversation.system, start)
