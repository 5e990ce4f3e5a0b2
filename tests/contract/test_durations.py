"""Durations: the suffixes ms, s, m and h; a number without a unit is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.durations import format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25), ("30s", 30), ("2m", 120), ("1h", 3600), ("1.5s", 1.5), ("0s", 0),
        (" 5 s ", 5),
    ],
)  # fmt: skip
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "s", "-1s", "1 d", "1S", "1s2", ".5s", "1e3s", "infs"])
def test_an_invalid_duration_error_shows_the_format(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration: .*like 250ms, 30s or 2m"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.25, "250ms"), (90, "90s"), (120, "2m"), (7200, "2h")]
)
def test_the_largest_whole_unit_is_written(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.integers(0, 10**9))
def test_what_is_written_is_read_back(millis: int) -> None:
    assert parse_duration(format_duration(millis / 1000)) == pytest.approx(millis / 1000)
