"""What counts as within the SLO, and TPOT."""

import pytest

from tandem_loadtest.figures.groups import is_within, tpot
from tandem_loadtest.figures.model import Slo
from tandem_loadtest.records import Record

from .records import answer

NOT_STREAMED = answer(ttft=0.1, gaps=(), first_token=None, last_token=None)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (answer(gaps=(0.1, 0.2)), 0.15),
        # Several tokens may come in a read: usage counts tokens.
        (answer(gaps=(0.1, 0.2), output_tokens=7), 0.05),
        (answer(gaps=()), None),
        (answer(output_tokens=None), None),
        (NOT_STREAMED, None),
    ],
)
def test_tpot_is_by_the_tokens_of_usage(record: Record, expected: float | None) -> None:
    assert tpot(record) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("record", "slo", "expected"),
    [
        (answer(ttft=0.5), Slo(ttft=0.51), True),
        (answer(ttft=0.5), Slo(ttft=0.49), False),
        # The SLO counts from the intended time: a late send is no excuse.
        (answer(ttft=0.5, late=0.2), Slo(ttft=0.6), False),
        (answer(gaps=(0.1, 0.3)), Slo(itl=0.21), True),
        (answer(gaps=(0.1, 0.3)), Slo(itl=0.19), False),
        (answer(gaps=(0.1, 0.3), output_tokens=5), Slo(itl=0.11), True),
        (answer(gaps=(0.1, 0.3), output_tokens=None), Slo(itl=0.19), False),
        (answer(gaps=(0.1, 0.3), output_tokens=None), Slo(itl=0.21), True),
        (answer(gaps=()), Slo(itl=0.01), True),
        (answer(ttft=0.5, gaps=(0.5,)), Slo(e2e=1.01), True),
        (answer(ttft=0.5, gaps=(0.5,)), Slo(e2e=0.99), False),
        (answer(ttft=0.5, gaps=(0.5,)), Slo(ttft=0.6, itl=0.6, e2e=0.99), False),
        (NOT_STREAMED, Slo(ttft=9), False),
        (NOT_STREAMED, Slo(itl=9), False),
        (NOT_STREAMED, Slo(e2e=9), True),
        (answer(), Slo(), True),
    ],
)
def test_a_good_request_meets_every_limit(record: Record, slo: Slo, expected: bool) -> None:
    assert is_within(record, slo) is expected
