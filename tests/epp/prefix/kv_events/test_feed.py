"""Which events count for a pod's index."""

from collections import Counter
from typing import Any

import msgspec

from tandem_epp.prefix.block_keys import TokenizedPrompt
from tandem_epp.prefix.kv_events.feed import Knowledge, PodFeed
from tandem_epp.prefix.kv_events.messages import decode_batch
from tandem_epp.prefix.pod_blocks import PodBlocks

from .fake_publisher import CLEARED, removed, stored


class _Feed:
    def __init__(self) -> None:
        self.blocks, self.counts = PodBlocks(), Counter[str]()
        self.feed = PodFeed("pod", self.blocks, self.counts)
        self.feed.is_current = True
        self._number = 0

    def apply(self, *events: Any) -> None:
        self.feed.apply(self._number, decode_batch(msgspec.msgpack.encode([1.0, events, 0])))
        self._number += 1

    def cached(self, prompt: TokenizedPrompt) -> int:
        return self.blocks.match({4: prompt.keys(4)}).prefix("pod").total


def test_one_group_of_layers_is_indexed() -> None:
    feed, prompt = _Feed(), TokenizedPrompt(range(8))
    feed.apply(stored([1], [0, 1, 2, 3], group_idx=0, kv_cache_spec_kind="sliding_window"))
    # Of a model whose layers all have a window the index says nothing.
    assert feed.feed.knowledge is Knowledge.PARTIAL
    feed.apply(stored([1], [0, 1, 2, 3], group_idx=1))
    feed.apply(stored([1], [0, 1, 2, 3], group_idx=2))
    assert feed.feed.knowledge is Knowledge.WHOLE
    feed.apply(removed([1], group_idx=0), removed([1], group_idx=2))
    assert feed.cached(prompt) == 4
    feed.apply(removed([1], group_idx=1))
    assert feed.cached(prompt) == 0
    assert feed.counts == {"ignored": 4, "stored": 1, "removed": 1, "unplaced": 0}


def test_external_storage_is_no_tier_of_the_pod() -> None:
    feed = _Feed()
    feed.apply(stored([1], [0, 1, 2, 3], medium="STORAGE"), removed([1], medium="STORAGE"))
    assert feed.counts["ignored"] == 2
    assert feed.blocks.count("pod") == 0


def test_releases_without_extra_keys_name_the_adapter() -> None:
    feed = _Feed()
    feed.apply(stored([1], [0, 1, 2, 3], lora_name="sql", extra_keys=None))
    assert feed.cached(TokenizedPrompt(range(4), adapter="sql")) == 4
    assert feed.cached(TokenizedPrompt(range(4))) == 0


def test_an_event_that_contradicts_itself_is_counted_and_nothing_else() -> None:
    feed = _Feed()
    feed.apply(stored([1, 2], [0, 1, 2, 3]), stored([3], [0, 1, 2, 3]))
    assert feed.counts["malformed"] == 1
    assert feed.cached(TokenizedPrompt(range(4))) == 4
    # The blocks of that event are missing.
    assert feed.feed.knowledge is Knowledge.PARTIAL


def test_blocks_without_a_place_leave_knowledge_of_a_part_until_the_cache_is_empty() -> None:
    feed = _Feed()
    feed.apply(stored([1], [0, 1, 2, 3]))
    assert feed.feed.knowledge is Knowledge.WHOLE
    feed.apply(stored([2], [4, 5, 6, 7], parent=9))
    assert (feed.counts["unplaced"], feed.feed.knowledge) == (1, Knowledge.PARTIAL)
    feed.apply(CLEARED)
    assert feed.feed.knowledge is Knowledge.WHOLE
    feed.blocks.max_bytes = 0
    feed.apply(stored([3], [0, 1, 2, 3]))
    assert (feed.counts["unplaced"], feed.feed.knowledge) == (2, Knowledge.PARTIAL)
