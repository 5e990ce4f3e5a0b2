"""Eviction by least recent use, and what requests use."""

from tandem_planner.simulation.block_pool import BLOCK, BlockPool


def pool(blocks: int) -> BlockPool:
    return BlockPool(blocks * BLOCK)


def cache(blocks: BlockPool, ids: list[int]) -> None:
    blocks.use(ids)
    blocks.release(ids)


def test_the_end_of_the_oldest_prompt_is_evicted_first() -> None:
    blocks = pool(5)
    cache(blocks, [1, 2, 3])
    cache(blocks, [7, 8, 9])
    assert blocks.match([1, 2, 3]) == 2
    assert blocks.match([7, 8, 9]) == 3
    assert blocks.match([2]) == 1


def test_a_block_in_use_is_not_evicted() -> None:
    blocks = pool(4)
    blocks.use([1, 2])
    cache(blocks, [3, 4])
    cache(blocks, [5, 6])
    assert blocks.match([1, 2]) == 2
    assert blocks.match([3]) == 0
    assert not blocks.has_room(3 * BLOCK)
    assert blocks.has_room(2 * BLOCK)


def test_a_block_of_two_requests_is_used_until_both_release_it() -> None:
    blocks = pool(4)
    blocks.use([1])
    blocks.use([1])
    blocks.release([1])
    assert blocks.used == BLOCK
    blocks.release([1])
    assert blocks.used == 0
    assert blocks.match([1]) == 1
