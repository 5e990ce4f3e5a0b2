import pytest

from tandem_engine.transfer.holds import FreeReason, KvHold, PrefillProgress
from tandem_engine.types import KvRefused

from .support import read

BLOCKS = (3, 1, 2)


@pytest.mark.parametrize(
    ("progress", "wanted_tokens", "ready"),
    [
        (PrefillProgress(), 10, (0, 0, 0)),
        (PrefillProgress().advance(BLOCKS, 8, 1, 3), 10, (2, 0, 0)),
        (PrefillProgress().advance(BLOCKS, 8, 3, 3), 10, (2, 2, 2)),
        (PrefillProgress().advance(BLOCKS, 4, 3, 3).advance(BLOCKS, 8, 2, 3), 10, (2, 2, 1)),
        # A block that is being filled waits, unless the reader wants no more of it.
        (PrefillProgress().advance(BLOCKS, 9, 3, 3), 10, (2, 2, 2)),
        (PrefillProgress().advance(BLOCKS, 10, 2, 3), 10, (3, 3, 0)),
        (PrefillProgress().advance(BLOCKS, 10, 3, 3), 6, (2, 2, 2)),
        (PrefillProgress().advance(BLOCKS, 9, 3, 3).complete(10), 10, (3, 3, 3)),
    ],
)
def test_ready_blocks(
    progress: PrefillProgress, wanted_tokens: int, ready: tuple[int, ...]
) -> None:
    assert tuple(progress.ready_blocks(layer, wanted_tokens, 4) for layer in range(3)) == ready


def test_a_read_is_checked_against_a_complete_prompt_only() -> None:
    hold = KvHold("r", 1.0)
    hold.check(read(tokens=10))
    hold.progress = PrefillProgress().advance(BLOCKS, 8, 3, 3).complete(8)
    hold.check(read(tokens=8))
    with pytest.raises(KvRefused, match="tokens: the reader expects 10, the producer has 8"):
        hold.check(read(tokens=10))


def test_an_ending_refuses_every_read() -> None:
    hold = KvHold("r", 1.0, end_reason=FreeReason.EXPIRED)
    with pytest.raises(KvRefused, match="'r' is gone: expired"):
        hold.check(read(tokens=1))
