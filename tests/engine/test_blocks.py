from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.blocks import (
    AllBlocksCleared,
    BlockEvent,
    BlockManager,
    BlocksRemoved,
    BlocksStored,
    extend_hash_chain,
)


def chain(token_ids: list[int], size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hash_chain(hashes, token_ids, size)
    return hashes


def filled(manager: BlockManager, name: str, tokens: list[int]) -> list[bytes]:
    """Allocate a sequence whose tokens are all computed. Returns its hashes."""
    hashes = chain(tokens, manager.block_size)
    matched = manager.match_prefix(hashes)
    assert manager.allocate(name, matched, manager.blocks_for(len(tokens)))
    manager.register(name, hashes, tokens, len(tokens))
    return hashes


def test_chain_covers_everything_before_a_block() -> None:
    a, b = chain([1, 2, 3, 4, 5, 6, 7, 8]), chain([9, 2, 3, 4, 5, 6, 7, 8])
    assert len(a) == 2
    assert a[1] != b[1]
    assert chain([1, 2, 3, 4, 5]) == a[:1]
    grown = a[:1]
    extend_hash_chain(grown, [1, 2, 3, 4, 5, 6, 7, 8], 4)
    assert grown == a


def test_freed_full_blocks_stay_cached_until_they_are_evicted() -> None:
    manager = BlockManager(4, 4)
    hashes = filled(manager, "a", list(range(10)))
    first, second, _ = manager.table("a")
    manager.free("a")
    assert manager.free_count == 4
    assert manager.match_prefix(hashes) == [first, second]
    assert manager.allocate("b", [], 3)
    assert manager.match_prefix(hashes) == [first]
    manager.free("b")
    assert manager.usage == 0


def test_allocation_is_all_or_nothing_and_counts_matched_blocks_once() -> None:
    manager = BlockManager(4, 4)
    hashes = filled(manager, "a", list(range(8)))
    manager.free("a")
    assert not manager.allocate("b", manager.match_prefix(hashes), 5)
    assert manager.free_count == 4
    assert manager.allocate("b", manager.match_prefix(hashes), 4)
    assert manager.free_count == 0
    assert not manager.extend("b", 5)


def test_shared_blocks_are_free_after_their_last_sequence() -> None:
    manager = BlockManager(4, 4)
    hashes = filled(manager, "a", list(range(8)))
    assert manager.allocate("b", manager.match_prefix(hashes), 3)
    manager.free("a")
    assert manager.free_count == 1
    manager.free("b")
    manager.free("b")
    assert manager.free_count == 4


def test_a_hold_keeps_blocks_until_released() -> None:
    manager = BlockManager(4, 4)
    filled(manager, "a", list(range(8)))
    table = manager.table("a")
    assert manager.hold("a") == table
    manager.free("a")
    assert (manager.free_count, manager.hold_count, manager.is_held("a")) == (2, 1, True)
    manager.release_hold("a")
    manager.release_hold("a")
    assert (manager.free_count, manager.hold_count) == (4, 0)


def test_events_report_changes_of_the_prefix_cache() -> None:
    events: list[BlockEvent] = []
    manager = BlockManager(3, 4, events.append)
    tokens = list(range(12))
    hashes = chain(tokens)
    manager.allocate("a", [], 3)
    manager.register("a", hashes, tokens, 9)
    manager.register("a", hashes, tokens, 9)
    manager.register("a", hashes, tokens, 12)
    manager.free("a")
    manager.allocate("b", [], 1)
    manager.free("b")
    assert manager.reset_prefix_cache()
    assert events == [
        BlocksStored((hashes[0], hashes[1]), None, tuple(range(8)), 4),
        BlocksStored((hashes[2],), hashes[1], tuple(range(8, 12)), 4),
        BlocksRemoved((hashes[2],)),
        AllBlocksCleared(),
    ]


def test_equal_content_computed_twice_is_cached_once() -> None:
    manager = BlockManager(4, 4)
    hashes = chain([1, 2, 3, 4])
    for name in "ab":
        manager.allocate(name, [], 1)
        manager.register(name, hashes, [1, 2, 3, 4], 4)
    assert manager.match_prefix(hashes) == [manager.table("a")[0]]
    manager.free("a")
    manager.free("b")
    assert manager.free_count == 4
    assert manager.allocate("c", [], 4)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["start", "grow", "free", "hold", "release"]),
            st.integers(0, 5),
            st.integers(1, 30),
        ),
        max_size=60,
    )
)
def test_no_order_of_events_loses_or_shares_a_block(actions: list[tuple[str, int, int]]) -> None:
    manager = BlockManager(12, 4)
    running: dict[str, list[int]] = {}
    holds: set[str] = set()
    for kind, number, length in actions:
        name = str(number)
        tokens = [number % 2] * length
        if kind == "start" and name not in running and name not in holds:
            hashes = chain(tokens)
            matched = manager.match_prefix(hashes)
            if manager.allocate(name, matched, manager.blocks_for(length)):
                manager.register(name, hashes, tokens, length)
                running[name] = tokens
        elif kind == "grow" and name in running:
            manager.extend(name, len(manager.table(name)) + 1)
        elif kind == "free":
            manager.free(name)
            running.pop(name, None)
        elif kind == "hold" and name in running:
            manager.hold(name)
            holds.add(name)
            del running[name]
        elif kind == "release":
            manager.release_hold(name)
            holds.discard(name)
    for name in running:
        manager.free(name)
    for name in holds:
        manager.release_hold(name)
    assert manager.free_count == 12
    assert manager.allocate("all", [], 12)
    assert sorted(manager.table("all")) == list(range(12))
