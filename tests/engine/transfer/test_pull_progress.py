import pytest

from tandem_engine.transfer.pull_progress import PullProgress
from tandem_engine.transfer.wire import Segment
from tandem_engine.types import KvBroken

from .support import LAYOUT


def reading(skip_blocks: int = 1, tokens: int = 10) -> PullProgress:
    return PullProgress(LAYOUT, (7, 8, 2, 9), skip_blocks, tokens)


def test_blocks_come_layer_by_layer_in_order() -> None:
    pull = reading()
    assert (pull.new_tokens, pull.new_bytes) == (6, 2 * 3 * LAYOUT.block_bytes)
    for segment, blocks in [
        (Segment(0, 1, 2), (8, 2)),
        (Segment(1, 1, 1), (8,)),
        (Segment(2, 1, 1), (8,)),
        (Segment(1, 2, 1), (2,)),
    ]:
        assert pull.missing
        assert [b for batch in pull.accept(segment) for b in batch.blocks] == list(blocks)
    pull.accept(Segment(2, 2, 1))
    assert not pull.missing


@pytest.mark.parametrize(
    "segment",
    [Segment(3, 1, 1), Segment(0, 0, 3), Segment(0, 2, 1), Segment(0, 1, 0), Segment(0, 1, 3)],
)
def test_a_segment_that_is_not_due_breaks(segment: Segment) -> None:
    with pytest.raises(KvBroken, match="not due"):
        reading().accept(segment)


def test_nothing_is_missing_when_all_is_skipped() -> None:
    pull = reading(skip_blocks=9)
    assert (pull.missing, pull.new_tokens, pull.new_bytes) == (False, 0, 0)


@pytest.mark.parametrize(
    ("pull", "cache_blocks"),
    [
        (reading(tokens=17), 16),
        (reading(tokens=0), 16),
        (reading(skip_blocks=-1), 16),
        (reading(), 9),
        (PullProgress(LAYOUT, (1, 1, 2), 0, 9), 16),
        (PullProgress(LAYOUT, (-1, 1, 2), 0, 9), 16),
    ],
)
def test_blocks_that_cannot_take_the_prompt(pull: PullProgress, cache_blocks: int) -> None:
    with pytest.raises(ValueError, match="blocks"):
        pull.check(cache_blocks)
