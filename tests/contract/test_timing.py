"""The timing header."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.timing import OUT_OF_RANGE, UNKNOWN, Timing, parse_timing

SECONDS = st.none() | st.integers(0, 10**9).map(lambda micros: micros / 1e6)
TOKENS = st.none() | st.integers(0, 2**31)
BYTES = st.none() | st.integers(0, 2**50)
REQUESTS = st.none() | st.integers(0, 2**20)
TIMINGS = st.builds(
    Timing, SECONDS, SECONDS, TOKENS, TOKENS, SECONDS, BYTES, SECONDS, TOKENS, TOKENS, REQUESTS,
    st.none() | st.integers(0, 1),
)  # fmt: skip


def test_figures_are_written_in_order_and_absent_ones_left_out() -> None:
    timing = Timing(queue=0.0012, cached=512, bytes=2097152)
    assert timing.encode() == "queue=0.001200;cached=512;bytes=2097152"
    assert Timing(leg=0.25, prompt=512).encode() == "leg=0.250000;prompt=512"


def test_nothing_known_is_a_dash() -> None:
    assert Timing().encode() == "-"
    assert parse_timing("-") is UNKNOWN


@given(TIMINGS)
def test_what_is_written_is_read_back(timing: Timing) -> None:
    read = parse_timing(timing.encode())
    for name in ("cached", "computed", "bytes", "prompt", "generated", "inflight", "streamed"):
        assert getattr(read, name) == getattr(timing, name)
    for name in ("queue", "compute", "transfer", "leg", "waited"):
        assert getattr(read, name) == pytest.approx(getattr(timing, name), abs=1e-6)


def test_unknown_names_and_spaces_do_no_harm() -> None:
    assert parse_timing(" future=1 ; queue=2;;cached") == Timing(queue=2.0)


@pytest.mark.parametrize(
    "figure",
    [
        "queue=", "queue=x", "queue=nan", "queue=inf", "queue=-1",
        "cached=1.5", "cached=1e3", "bytes=-3",
    ],
)  # fmt: skip
def test_an_invalid_figure_is_unknown(figure: str) -> None:
    assert parse_timing(f"{figure};compute=0.5") == Timing(compute=0.5)


@pytest.mark.parametrize(
    "figure",
    [
        "queue=3601", "leg=1e308", "transfer=1e9", f"prompt=1{'0' * 200}", f"cached={2**31 + 1}",
        f"computed={2**40}", f"generated={2**40}", f"bytes={2**50 + 1}",
        f"inflight={2**20 + 1}", "streamed=2",
    ],
)  # fmt: skip
def test_an_impossible_figure_makes_the_header_unusable(figure: str) -> None:
    assert parse_timing(f"compute=0.5;{figure}") is OUT_OF_RANGE
    assert OUT_OF_RANGE == UNKNOWN
    assert OUT_OF_RANGE.encode() == "-"


@given(st.text(max_size=60))
def test_any_text_is_read(value: str) -> None:
    assert isinstance(parse_timing(value), Timing)
