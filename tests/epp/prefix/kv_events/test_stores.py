"""What external stores have, by the KV events of any engine that uses them."""

from collections import Counter
from typing import Any

import msgspec

from tandem_epp.prefix.block_keys import TokenizedPrompt
from tandem_epp.prefix.kv_events.feed import PodFeed, StoreIndex
from tandem_epp.prefix.kv_events.messages import decode_batch
from tandem_epp.prefix.pod_blocks import PodBlocks

from .fake_publisher import CLEARED, removed, stored

PROMPT = TokenizedPrompt(range(12))
STORAGE = {"medium": "STORAGE", "group_idx": None}


class _Engines:
    """Engines of one store, but those that `store_of` names."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.pods, self.stores = PodBlocks(), PodBlocks(max_bytes)
        self.counts = Counter[str]()
        self._numbers = Counter[str]()
        self._feeds: dict[str, PodFeed] = {}
        self.store_of: dict[str, str] = {}

    def apply(self, pod: str, *events: Any) -> None:
        store = StoreIndex(self.store_of.get(pod, "store"), self.stores)
        feed = self._feeds.setdefault(pod, PodFeed(pod, self.pods, self.counts, store))
        data = msgspec.msgpack.encode([1.0, events, 0])
        feed.apply(self._numbers[pod], decode_batch(data))
        self._numbers[pod] += 1

    def restart(self, pod: str) -> None:
        self._feeds.pop(pod).disconnect()
        self._numbers[pod] = 0

    def in_storage(self, store: str = "store") -> int:
        return self.stores.match({4: PROMPT.keys(4)}).prefix(store).total


def test_what_one_engine_stored_survives_it_and_another_one_removes_it() -> None:
    engines = _Engines()
    engines.apply("a", stored([1, 2], [*range(8)], **STORAGE))
    engines.apply("b", stored([3], [8, 9, 10, 11], parent=2, **STORAGE))
    assert engines.in_storage() == 12
    assert engines.pods.count("a") == 0
    engines.restart("a")
    engines.apply("a", CLEARED)
    assert engines.in_storage() == 12
    engines.apply("b", removed([2], **STORAGE))
    assert engines.in_storage() == 4
    counts = engines.counts["storage_stored"], engines.counts["storage_removed"]
    assert counts == (2, 1)


def test_a_chunk_that_is_written_before_its_predecessor_is_placed_by_the_pods_own_blocks() -> None:
    engines = _Engines()
    engines.apply("a", stored([1, 2], [*range(8)]))
    engines.apply("a", stored([2], [4, 5, 6, 7], parent=1, **STORAGE))
    assert engines.in_storage() == 0
    engines.apply("a", stored([1], [0, 1, 2, 3], **STORAGE))
    assert engines.in_storage() == 8


def test_a_store_whose_index_is_full_is_indexed_anew() -> None:
    engines = _Engines(max_bytes=1)
    engines.apply("a", stored([1], [0, 1, 2, 3], **STORAGE))
    engines.apply("a", stored([2], [4, 5, 6, 7], parent=1, **STORAGE))
    assert engines.in_storage() == 0
    while engines.stores.sweep(100):
        pass
    assert engines.stores.bytes == 0
    engines.apply("a", stored([1], [0, 1, 2, 3], **STORAGE))
    assert engines.in_storage() == 4
    assert engines.counts["storage_unplaced"] == 1


def test_a_full_index_drops_the_largest_store_and_not_the_one_that_needs_room() -> None:
    engines = _Engines(max_bytes=1)
    engines.store_of["other"] = "other"
    engines.apply("a", stored([1], [0, 1, 2, 3], **STORAGE))
    engines.apply("other", stored([1], [0, 1, 2, 3], **STORAGE))
    assert engines.in_storage() == 0
    while engines.stores.sweep(100):
        pass
    engines.apply("other", stored([1], [0, 1, 2, 3], **STORAGE))
    assert engines.in_storage("other") == 4
