"""Schedules: limits, the parts of several processes, files, and settings that do not fit."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_loadtest.workload.presets import PRESETS
from tandem_loadtest.workload.schedule import sessions
from tandem_loadtest.workload.sessions import Segment, Turn
from tandem_loadtest.workload.settings import Arrivals, Workload, WorkloadError
from tandem_loadtest.workload.traces import TraceError

CHAT = Workload(preset="chat")
POISSON = Arrivals(process="poisson", rate=20)
CLOSED = Arrivals(process="closed", concurrency=3)
TRACE = Arrivals(process="trace")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * i, "input_length": 1024 + 10 * i, "output_length": 40, "hash_ids": ids}
        for i, ids in enumerate([[0, 1, 2], [0, 1, 3], [0, 4, 5], [6, 7, 8]])
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def conversations(tmp_path: Path) -> str:
    file = tmp_path / "chats.jsonl"
    chats = [
        [("system", "s" * 8), ("user", "u" * 40), ("assistant", "a" * 80)] * (i + 1)
        for i in range(5)
    ]
    rows = [{"messages": [{"role": r, "content": c} for r, c in chat]} for chat in chats]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@given(
    st.sampled_from(sorted(PRESETS)),
    st.sampled_from(["poisson", "constant", "gamma", "ramp", "closed"]),
    st.integers(0, 60),
    st.integers(1, 9),
    st.integers(),
)
def test_the_parts_of_all_processes_are_the_whole_once(
    name: str, process: str, limit: int, parts: int, seed: int
) -> None:
    workload = Workload(preset=name, models={"a": 1, "b": 2})
    arrivals = Arrivals(process=process, rate=30, rate_end=60, burstiness=0.5)
    whole = list(sessions(workload, arrivals, seed=seed, limit=limit, duration=1e3))
    assert [session.index for session in whole] == list(range(limit))
    split = [
        list(
            sessions(
                workload, arrivals, seed=seed, limit=limit, duration=1e3, part=part, parts=parts
            )
        )
        for part in range(parts)
    ]
    assert sorted((s for part in split for s in part), key=lambda s: s.index) == whole
    assert all(s.index % parts == i for i, part in enumerate(split) for s in part)


def test_the_schedule_ends_at_the_duration_or_the_limit() -> None:
    by_duration = list(sessions(CHAT, POISSON, seed=1, duration=10))
    assert 140 < len(by_duration) < 260
    assert all(s.start is not None and 0 <= s.start < 10 for s in by_duration)
    assert list(sessions(CHAT, POISSON, seed=1, limit=7, duration=10)) == by_duration[:7]
    assert list(sessions(CHAT, POISSON, seed=1, limit=9999, duration=10)) == by_duration


def test_a_longer_run_begins_with_the_same_sessions() -> None:
    short, long = (list(sessions(CHAT, POISSON, seed=1, duration=d)) for d in (2, 4))
    assert long[: len(short)] == short


def test_a_closed_loop_goes_on_until_its_limit() -> None:
    endless = sessions(CHAT, CLOSED, seed=1, duration=1)
    assert [s.start for s in islice(endless, 500)] == [None] * 500
    assert len(list(sessions(CHAT, CLOSED, seed=1, limit=5, duration=1))) == 5


def test_sessions_of_open_and_closed_loop_say_the_same() -> None:
    opened, closed = (list(sessions(CHAT, a, seed=1, limit=9)) for a in (POISSON, CLOSED))
    assert [s.turns for s in opened] == [s.turns for s in closed]


@pytest.mark.parametrize("preset", ["multi-turn", "sharegpt"])
def test_only_in_closed_loop_a_think_time_precedes_the_first_turn(
    preset: str, conversations: str
) -> None:
    file = conversations if preset == "sharegpt" else None
    workload = Workload(preset=preset, file=file, think=2.0)
    opened, closed = (
        list(sessions(workload, arrivals, seed=1, limit=5)) for arrivals in (POISSON, CLOSED)
    )
    assert {s.turns[0].think for s in opened} == {0.0}
    thinks = {s.turns[0].think for s in closed}
    assert (len(thinks), min(thinks) > 0) == (5, True)
    for before, after in zip(opened, closed, strict=True):
        assert before.turns[0] == replace(after.turns[0], think=0.0)
        assert before.turns[1:] == after.turns[1:]


def test_a_trace_keeps_times_lengths_and_blocks(trace: str) -> None:
    workload = Workload(preset="trace", file=trace)
    whole = list(sessions(workload, TRACE, seed=1))
    assert [s.start for s in whole] == [0, 1, 2, 3]
    assert whole[1].turns == (
        Turn((Segment("block/0", 512), Segment("block/1", 512), Segment("block/3", 10)), 40),
    )
    assert list(sessions(workload, TRACE, seed=1, part=1, parts=3)) == whole[1::3]
    assert list(sessions(workload, TRACE, seed=1, duration=2)) == whole[:2]
    assert list(sessions(workload, TRACE, seed=1, limit=2)) == whole[:2]


def test_a_trace_is_scaled_in_time_and_length(trace: str) -> None:
    workload = Workload(preset="trace", file=trace, prompt_tokens=528, output_tokens=4)
    arrivals = Arrivals(process="trace", time_factor=0.5)
    whole = list(sessions(workload, arrivals, seed=1))
    assert [s.start for s in whole] == [0, 0.5, 1, 1.5]
    (turn,) = whole[1].turns
    # 528 of at most 1054 tokens: blocks of 512 become floor(512 × 528 / 1054) = 256.
    assert turn == Turn(
        (Segment("block/0", 256), Segment("block/1", 256), Segment("block/3", 5)), 4
    )


def test_the_requests_of_a_trace_may_come_at_other_times(trace: str) -> None:
    workload = Workload(preset="trace", file=trace, models={"a": 1})
    recorded = list(sessions(workload, TRACE, seed=1))
    poisson = list(sessions(workload, POISSON, seed=1))
    assert [s.turns for s in poisson] == [s.turns for s in recorded]
    assert [s.start for s in poisson] == [s.start for s in sessions(CHAT, POISSON, seed=1, limit=4)]
    assert {turn.model for s in poisson for turn in s.turns} == {"a"}


def test_conversations_of_a_file_are_sent_as_they_are(conversations: str) -> None:
    workload = Workload(preset="sharegpt", file=conversations, think=2.0)
    whole = list(sessions(workload, CLOSED, seed=1))
    assert [len(s.turns) for s in whole] == [1, 2, 3, 4, 5]
    assert whole[0].system == "s" * 8
    assert {(t.prompt, t.output_tokens) for s in whole for t in s.turns} == {("u" * 40, 20)}
    thinks = [[turn.think for turn in s.turns] for s in whole]
    assert all(think > 0 for turns in thinks for think in turns)
    assert list(sessions(workload, CLOSED, seed=1)) == whole
    assert list(sessions(workload, CLOSED, seed=1, part=1, parts=2)) == whole[1::2]


def test_conversations_are_limited_and_counted_by_the_given_counter(conversations: str) -> None:
    workload = Workload(
        preset="sharegpt", file=conversations, output_tokens=50, prompt_tokens=150, turns=9
    )
    whole = list(sessions(workload, CLOSED, seed=1, count_tokens=len, limit=4))
    # The file repeats the system message: the second prompt of the third has 158 characters.
    assert [[t.output_tokens for t in s.turns] for s in whole] == [
        [50], [50, 50], [50], [50],
    ]  # fmt: skip


def test_conversations_that_are_all_too_long_are_an_error(conversations: str) -> None:
    workload = Workload(preset="sharegpt", file=conversations, prompt_tokens=3)
    with pytest.raises(WorkloadError, match="every first prompt is longer than 3 tokens"):
        sessions(workload, CLOSED, seed=1)


@pytest.mark.parametrize(
    ("workload", "arrivals", "message"),
    [
        (CHAT, POISSON, "the run has no end: give a number of sessions or a duration"),
        (CHAT, TRACE, "^arrivals `trace` need a trace; the workload is chat"),
        (Workload(preset="trace"), TRACE, "workload trace needs a file"),
        (Workload(preset="sharegpt"), CLOSED, "workload sharegpt needs a file"),
        (Workload(preset="trace", file="t", turns=2), TRACE, "`turns` does not apply to trace"),
        (Workload(preset="sharegpt", file="t", shared=1), CLOSED, "`shared` does not apply"),
        (Workload(preset="trace", file="none"), TRACE, "none: cannot read it"),
        (Workload(preset="sharegpt", file="none"), CLOSED, "none: cannot read it"),
    ],
)
def test_settings_that_do_not_fit_are_an_error_before_the_first_session(
    workload: Workload, arrivals: Arrivals, message: str
) -> None:
    with pytest.raises(WorkloadError, match=message):
        sessions(workload, arrivals, seed=1)


def test_a_malformed_line_of_a_trace_is_named(trace: str) -> None:
    with Path(trace).open("a") as file:
        file.write("{}\n")
    with pytest.raises(TraceError, match=f"^{trace}:5: "):
        sessions(Workload(preset="trace", file=trace), TRACE, seed=1)


def test_a_trace_that_cannot_shrink_so_far_is_an_error(trace: str) -> None:
    with pytest.raises(WorkloadError, match=f"^{trace}: the prompts cannot shrink"):
        sessions(Workload(preset="trace", file=trace, prompt_tokens=1), TRACE, seed=1)
