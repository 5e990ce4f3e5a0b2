"""When a stream's next token is late, by what its engine was seen to take."""

import pytest

from tandem_sidecar.handoff.token_gaps import (
    FACTOR,
    FEWEST,
    HALF_LIFE,
    WINDOW,
    Longest,
    Prompts,
    token_deadline,
)


def test_the_longest_counts_for_less_as_time_passes() -> None:
    longest = Longest()
    assert (longest.value(5.0), longest.count) == (0.0, 0)
    longest.add(2.0, 10.0)
    longest.add(0.5, 10.0)
    assert (longest.value(10.0), longest.count) == (2.0, 2)
    assert longest.value(10.0 + HALF_LIFE) == pytest.approx(1.0)
    longest.add(1.5, 10.0 + HALF_LIFE)
    assert longest.value(10.0 + HALF_LIFE) == 1.5


def test_the_deadline_follows_what_the_engine_takes() -> None:
    assert token_deadline(0.2, FEWEST, floor=3.0) == 3.0
    assert token_deadline(2.0, FEWEST, floor=3.0) == 2.0 * FACTOR


def test_a_prompt_under_way_has_its_own_time() -> None:
    assert token_deadline(0.2, FEWEST, floor=3.0, prefill=5.0) == 8.0


def test_prompts_are_forgotten_with_their_times() -> None:
    prompts = Prompts()
    prompts.add(30.0, 100_000, 10.0)
    for number in range(1, FEWEST):
        assert not prompts.covers(100)
        prompts.add(0.1, 100, 10.0 + number)
    assert prompts.seconds == 30.0
    assert prompts.covers(100_000)
    assert not prompts.covers(100_001)
    assert not prompts.covers(0)
    prompts.add(0.1, 100, 10.0 + WINDOW)
    assert (prompts.seconds, prompts.count) == (30.0, FEWEST + 1)
    prompts.add(0.2, 200, 10.0 + 2 * WINDOW)
    assert (prompts.seconds, prompts.count) == (0.2, 2)
    prompts.add(0.1, 100, 10.0 + 5 * WINDOW)
    assert (prompts.seconds, prompts.count) == (0.1, 1)


def test_where_little_is_known_no_token_is_late() -> None:
    assert token_deadline(0.2, FEWEST - 1, floor=3.0) is None
