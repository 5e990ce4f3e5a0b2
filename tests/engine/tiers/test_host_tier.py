"""The bookkeeping of chunks in host memory."""

from tandem_engine.blocks import BlocksStored
from tandem_engine.tiers.host_tier import HostChunk, HostTier


def chunk(name: str, size: int = 10) -> HostChunk:
    event = BlocksStored((name.encode(),), None, (), 16, "CPU")
    return HostChunk((), event, size)


def test_the_least_recently_used_chunk_leaves_first() -> None:
    tier, chunks = HostTier(30), {name: chunk(name) for name in "abcd"}
    for name in "abc":
        assert tier.add(name, chunks[name]) == []
    assert tier.get("a") is chunks["a"]
    assert tier.add("d", chunks["d"]) == [chunks["b"]]
    assert [name for name in "abcd" if name in tier] == ["a", "c", "d"]
    assert tier.size == 30


def test_a_larger_chunk_removes_several() -> None:
    tier, (first, second, large) = HostTier(30), [chunk("a"), chunk("b"), chunk("c", 25)]
    tier.add("a", first)
    tier.add("b", second)
    assert tier.add("c", large) == [first, second]
    assert tier.size == 25


def test_a_chunk_that_is_larger_than_the_tier_is_not_kept() -> None:
    tier, large = HostTier(30), chunk("a", 31)
    assert tier.add("a", large) == [large]
    assert "a" not in tier
    assert tier.size == 0


def test_a_chunk_that_is_added_again_counts_once_and_as_used() -> None:
    tier, first, again = HostTier(20), chunk("a"), chunk("a")
    tier.add("a", first)
    tier.add("b", chunk("b"))
    assert tier.add("a", again) == []
    assert tier.size == 20
    tier.add("c", chunk("c"))
    assert ("a" in tier, "b" in tier) == (True, False)
