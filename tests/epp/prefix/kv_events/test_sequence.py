"""What batch numbers mean."""

import pytest

from tandem_epp.prefix.kv_events.sequence import (
    BatchOrder,
    Position,
    continues,
    is_whole,
    judge,
    unbroken_count,
)

LAST = Position(7, 100.0)


@pytest.mark.parametrize(
    ("last", "number", "timestamp", "verdict"),
    [
        (Position(), 0, 1.0, BatchOrder.NEXT),
        (Position(), 3, 1.0, BatchOrder.GAP),
        (LAST, 8, 100.0, BatchOrder.NEXT),
        (LAST, 9, 101.0, BatchOrder.GAP),
        (LAST, 7, 100.0, BatchOrder.DUPLICATE),
        (LAST, 2, 99.0, BatchOrder.DUPLICATE),
        (LAST, 0, 101.0, BatchOrder.RESTART),
        (LAST, 7, 101.0, BatchOrder.RESTART),
    ],
)
def test_verdicts(last: Position, number: int, timestamp: float, verdict: BatchOrder) -> None:
    assert judge(last, number, timestamp) is verdict


def _batches(*numbers: int) -> list[Position]:
    return [Position(number, 93.0 + number) for number in numbers]


def test_a_replay_continues_only_with_the_last_batch_itself() -> None:
    assert continues(LAST, _batches(7))
    assert continues(LAST, _batches(7, 8, 9))
    assert not continues(LAST, [])
    assert not continues(LAST, _batches(8, 9))
    assert not continues(LAST, _batches(7, 9))
    # Another engine has counted to 7 as well.
    assert not continues(LAST, [Position(7, 200.0), Position(8, 201.0)])


def test_a_whole_replay_begins_with_batch_0() -> None:
    assert is_whole([])
    assert is_whole(_batches(0, 1, 2))
    assert not is_whole(_batches(1, 2))
    assert not is_whole(_batches(0, 2))
    assert unbroken_count(_batches(4, 5, 7)) == 2
