"""The schedule, on a virtual clock."""

from itertools import count

import pytest

from tandem_loadtest.records import Outcome
from tandem_loadtest.run.look_ahead import MOST_SESSIONS
from tandem_loadtest.run.turns import EARLIER_TURN, STOPPED_BEFORE, STOPPED_IN_FLIGHT

from .virtual import START, Run, conversation, single


async def test_a_stalled_server_moves_neither_the_schedule_nor_the_sends() -> None:
    schedule = [0.1 * index for index in range(20)]
    run = Run([single(index, start) for index, start in enumerate(schedule)], latency=10.0)
    records = await run.finish()
    assert [record.intended for record in records] == schedule
    assert [record.started for record in records] == pytest.approx(schedule)
    assert {record.outcome for record in records} == {Outcome.OK}


async def test_a_late_load_generator_keeps_the_intended_times() -> None:
    schedule = [0.0, 0.1, 0.2, 3.0]
    run = Run([single(i, start) for i, start in enumerate(schedule)], latency=0.5, blocking=1.0)
    records = await run.finish()
    assert [record.intended for record in records] == schedule
    # The event loop was blocked for the first second: the waits for it are in the latencies.
    assert [record.started for record in records] == pytest.approx([0.0, 1.0, 1.0, 3.0])
    assert [r.ended - r.intended for r in records if r.ended] == pytest.approx([1.0, 1.4, 1.3, 0.5])


async def test_a_request_beyond_max_in_flight_is_never_sent() -> None:
    run = Run([single(index, 0.1 * index) for index in range(10)], latency=0.35, max_in_flight=2)
    records = await run.finish()
    assert [record.index for record in records if record.outcome is Outcome.OK] == [
        0,
        1,
        4,
        5,
        8,
        9,
    ]
    unsent = [record for record in records if record.outcome is Outcome.UNSENT]
    assert [record.intended for record in unsent] == pytest.approx([0.2, 0.3, 0.6, 0.7])
    assert {record.error for record in unsent} == {"2 requests were in flight (--max-in-flight)"}
    assert {record.started for record in unsent} == {None}
    assert len(run.server.calls) == 6


async def test_in_closed_loop_a_session_is_due_when_the_last_has_ended() -> None:
    run = Run([single(index) for index in range(5)], latency=0.5, concurrency=2)
    records = await run.finish()
    assert [record.intended for record in records] == pytest.approx([0.0, 0.0, 0.5, 0.5, 1.0])
    assert run.turns.counts.peak == 2


async def test_in_closed_loop_the_think_time_follows_the_last_end() -> None:
    sessions = [conversation(index, None, 2.0) for index in range(3)]
    records = await Run(sessions, latency=0.5, concurrency=1).finish()
    assert [record.intended for record in records] == pytest.approx([0.0, 2.5, 5.0])


async def test_in_closed_loop_no_session_begins_after_the_duration() -> None:
    endless = (single(index) for index in count())
    run = Run(endless, latency=0.5, concurrency=2, duration=1.2, has_known_end=False)  # type: ignore[arg-type]
    records = await run.finish()
    assert [record.intended for record in records] == pytest.approx([0, 0, 0.5, 0.5, 1.0, 1.0])


async def test_in_closed_loop_a_think_time_may_end_after_the_duration() -> None:
    sessions = [conversation(index, None, 1.0) for index in range(5)]
    run = Run(sessions, latency=0.5, concurrency=1, duration=2.0, has_known_end=False)
    # The third session would begin at 3.5, although the second ended before the duration.
    assert [record.intended for record in await run.finish()] == pytest.approx([0.0, 1.5])


async def test_in_open_loop_no_session_begins_after_the_duration() -> None:
    run = Run([single(index, 0.5 * index) for index in range(5)], duration=1.0)
    assert [record.index for record in await run.finish()] == [0, 1]


async def test_a_later_turn_is_due_after_the_answer_and_the_think_time() -> None:
    run = Run([conversation(0, 0.25, 0.0, 1.0, 3.0)], latency=0.5)
    records = await run.finish()
    assert [record.turn for record in records] == [0, 1, 2]
    assert [record.intended for record in records] == pytest.approx([0.25, 1.75, 5.25])
    assert run.written == [
        (0, 0, []),
        (0, 1, ["answer 0"]),
        (0, 2, ["answer 0", "answer 1"]),
    ]


async def test_a_failed_turn_leaves_the_later_ones_unsent() -> None:
    run = Run([conversation(0, 0.0, 0.0, 1.0, 1.0, 1.0)], latency=0.5, failing=[1])
    records = await run.finish()
    assert [record.outcome for record in records] == [
        Outcome.OK,
        Outcome.ERROR_STATUS,
        Outcome.UNSENT,
        Outcome.UNSENT,
    ]
    assert [record.error for record in records[2:]] == [EARLIER_TURN] * 2


async def test_a_stop_accounts_for_every_request() -> None:
    sessions = [conversation(index, 0.4 * index, 0.0, 0.2) for index in range(4)]
    run = Run(sessions, latency=0.5)
    run.stop_at(1.0)
    records = await run.finish()
    assert [(record.index, record.turn, record.error) for record in records] == [
        # Ended at 0.5; its next turn was sent at 0.7.
        (0, 0, ""),
        (0, 1, STOPPED_IN_FLIGHT),
        # Ended at 0.9; its next turn is due at 1.1.
        (1, 0, ""),
        (1, 1, STOPPED_BEFORE),
        (2, 0, STOPPED_IN_FLIGHT),
        (2, 1, STOPPED_BEFORE),
        (3, 0, STOPPED_BEFORE),
        (3, 1, STOPPED_BEFORE),
    ]
    assert {record.outcome for record in records if record.error} == {Outcome.UNSENT}
    assert records[-1].intended == pytest.approx(1.2)
    # A turn after one that was cut off would have been due later.
    assert all(record.intended >= 1.0 for record in records if record.error == STOPPED_BEFORE)
    assert all(record.intended < 1.0 for record in records if record.error == STOPPED_IN_FLIGHT)


async def test_a_stop_with_grace_lets_answers_end_but_sends_nothing_more() -> None:
    run = Run([conversation(index, 0.4 * index, 0.0, 0.0) for index in range(3)], latency=0.5)
    run.stop_at(0.6, grace=0.35)
    records = await run.finish()
    assert [(record.index, record.turn, record.error) for record in records] == [
        (0, 0, ""),
        # Sent at 0.5: it would end at 1.0, after the grace.
        (0, 1, STOPPED_IN_FLIGHT),
        (1, 0, ""),
        (1, 1, STOPPED_BEFORE),
        (2, 0, STOPPED_BEFORE),
        (2, 1, STOPPED_BEFORE),
    ]


async def test_a_stop_with_grace_does_not_wait_for_users_who_think() -> None:
    run = Run([conversation(0, 0.0, 0.0, 3600.0)], latency=0.5)
    run.stop_at(1.0, grace=600.0)
    assert [record.error for record in await run.finish()] == ["", STOPPED_BEFORE]
    assert run.clock.time == START + 1.0


async def test_a_session_that_is_due_at_the_stop_has_its_record() -> None:
    run = Run([single(0, 0.0), single(1, 1.0)], latency=0.5)
    run.stop_at(1.0)
    records = await run.finish()
    assert [record.error for record in records] == ["", STOPPED_BEFORE]


async def test_a_stopped_closed_loop_counts_the_rest_of_a_limited_schedule_only() -> None:
    limited = Run([single(index) for index in range(6)], latency=0.5, concurrency=2)
    limited.stop_at(0.7)
    errors = [record.error for record in await limited.finish()]
    assert errors == ["", "", *[STOPPED_IN_FLIGHT] * 2, *[STOPPED_BEFORE] * 2]
    endless = (single(index) for index in count())
    run = Run(endless, latency=0.5, concurrency=2, has_known_end=False)  # type: ignore[arg-type]
    run.stop_at(0.7)
    assert [record.error for record in await run.finish()] == errors[:4]


async def test_prompts_are_written_before_the_start_and_at_most_so_many_ahead() -> None:
    run = Run([single(index, 0.01 * index) for index in range(MOST_SESSIONS + 50)], latency=0.0)
    run.ahead.fill(5.0)
    assert len(run.written) == MOST_SESSIONS
    assert len(await run.finish()) == len(run.written) == MOST_SESSIONS + 50


async def test_prompts_are_written_between_the_sends_and_make_none_late() -> None:
    schedule = [10.0 + 0.01 * index for index in range(MOST_SESSIONS + 200)]
    run = Run([single(index, start) for index, start in enumerate(schedule)], writing=0.004)
    run.ahead.fill(5.0)
    assert len(run.written) == MOST_SESSIONS
    records = await run.finish()
    assert [record.started for record in records] == pytest.approx(schedule, abs=1e-6)


async def test_a_session_that_is_not_prepared_is_sent_all_the_same() -> None:
    run = Run([single(0, 0.0), single(1, 0.0)])
    assert [record.outcome for record in await run.finish()] == [Outcome.OK] * 2
