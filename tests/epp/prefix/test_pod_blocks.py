"""Exact blocks of pods, compared with a plain model: sets of prompts' prefixes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_epp.prefix.block_keys import ROOT, MediaItem, TokenizedPrompt, block_keys
from tandem_epp.prefix.blocks import BlockMatch, CachedPrefix, StoredBlocks, Tier
from tandem_epp.prefix.pod_blocks import PodBlocks
from tandem_epp.prefix.sorted_table import SortedTable

BLOCK = 2
Prefix = tuple[int, ...]


def engine_hash(prefix: Prefix) -> bytes:
    """A name of 32 bytes, as vLLM's, for the block that ends a prefix."""
    return hash(prefix).to_bytes(8, "big", signed=True) + bytes(24)


@dataclass
class ModelPod:
    """The prefixes that end with a cached block, by tier."""

    tiers: dict[Tier, set[Prefix]] = field(default_factory=lambda: {tier: set() for tier in Tier})

    @property
    def all(self) -> set[Prefix]:
        return self.tiers[Tier.GPU] | self.tiers[Tier.CPU]

    def cached(self, prompt: Prefix) -> CachedPrefix:
        return CachedPrefix(_longest(self.all, prompt), _longest(self.tiers[Tier.GPU], prompt))


def _longest(prefixes: set[Prefix], prompt: Prefix) -> int:
    length = 0
    while length + BLOCK <= len(prompt) and prompt[: length + BLOCK] in prefixes:
        length += BLOCK
    return length


def _store(blocks: PodBlocks, pod: str, tier: Tier, prompt: Prefix, start: int) -> int:
    """The event of an engine that has cached `prompt` from token `start` on."""
    ends = range(start + BLOCK, len(prompt) + 1, BLOCK)
    hashes = [engine_hash(prompt[:end]) for end in ends]
    parent = engine_hash(prompt[:start]) if start else None
    tokens = prompt[start : start + BLOCK * len(hashes)]
    return blocks.store(pod, tier, StoredBlocks(hashes, parent, tokens, BLOCK))


PODS = st.sampled_from(["a", "b", "c"])
TIERS = st.sampled_from(list(Tier))
PROMPTS = st.lists(st.integers(0, 1), max_size=12).map(tuple)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), PODS, TIERS, PROMPTS, st.integers(0, 3)),
        st.tuples(st.just("remove"), PODS, TIERS, PROMPTS, st.integers(0, 3)),
        st.tuples(st.just("drop"), PODS, TIERS, PROMPTS, st.just(0)),
        st.tuples(st.just("sweep"), PODS, TIERS, PROMPTS, st.integers(1, 5)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(STEPS, st.lists(PROMPTS, min_size=1, max_size=5))
def test_matches_are_those_of_a_plain_model(
    steps: Sequence[tuple[str, str, Tier, Prefix, int]], prompts: Sequence[Prefix]
) -> None:
    blocks, model = PodBlocks(), {pod: ModelPod() for pod in "abc"}
    for step, pod, tier, prompt, number in steps:
        if step == "store":
            _step_store(blocks, model, pod, tier, prompt, number * BLOCK)
        elif step == "remove":
            victim = prompt[: (number + 1) * BLOCK]
            blocks.remove(pod, tier, [engine_hash(victim)])
            model[pod].tiers[tier].discard(victim)
        elif step == "drop":
            blocks.drop(pod)
            model[pod] = ModelPod()
        else:
            blocks.sweep(number)
        for prompt in prompts:
            match = blocks.match({BLOCK: TokenizedPrompt(prompt).keys(BLOCK)})
            assert {p: match.prefix(p) for p in model} == {
                p: model[p].cached(prompt) for p in model
            }
            assert _in_slices(blocks, prompt, number + 1) == match
        assert all(blocks.count(p) == len(model[p].all) for p in model)
    while blocks.sweep(100):
        pass
    names = sum(len(pod.all) for pod in model.values())
    assert blocks.bytes == 16 * names + 12 * len(set().union(*(p.all for p in model.values())))


def _in_slices(blocks: PodBlocks, prompt: Prefix, size: int) -> BlockMatch:
    """The result of walks in slices of `size` blocks."""
    walks = blocks.walks({BLOCK: TokenizedPrompt(prompt).keys(BLOCK)})
    for walk in walks:
        while walk.advance(size):
            pass
    return blocks.result(walks)


def test_between_two_slices_numbers_of_pods_and_of_sets_may_change() -> None:
    blocks, prompt = PodBlocks(), tuple(range(4 * BLOCK))
    for pod in "ab":
        _store(blocks, pod, Tier.GPU, prompt, 0)
    walks = blocks.walks({BLOCK: TokenizedPrompt(prompt).keys(BLOCK)})
    assert walks[0].advance(2)
    # Another pod gets the number of the one that left, and other sets of holders the old numbers.
    blocks.drop("a")
    assert not blocks.sweep(100)
    _store(blocks, "c", Tier.GPU, prompt, 0)
    blocks.remove("b", Tier.GPU, [engine_hash(prompt[: 3 * BLOCK])])
    while walks[0].advance(2):
        pass
    match = blocks.result(walks)
    assert {pod: match.prefix(pod).total for pod in "abc"} == {"a": 0, "b": 2 * BLOCK, "c": 0}


def _step_store(
    blocks: PodBlocks, model: dict[str, ModelPod], pod: str, tier: Tier, prompt: Prefix, start: int
) -> None:
    full = prompt[: len(prompt) // BLOCK * BLOCK]
    if start >= len(full):
        return
    unknown = _store(blocks, pod, tier, full, start)
    if start and full[:start] not in model[pod].all:
        # The pod does not have the parent: which prompt this continues is not known.
        assert unknown == (len(full) - start) // BLOCK
        return
    assert unknown == 0
    model[pod].tiers[tier] |= {full[:end] for end in range(start + BLOCK, len(full) + 1, BLOCK)}


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 9), st.booleans())))
def test_a_sorted_table_is_a_dictionary(steps: Sequence[tuple[int, int, bool]]) -> None:
    table, model = SortedTable("I", 2), dict[int, int]()
    for key, value, is_removed in steps:
        if is_removed:
            assert table.pop(key) == model.pop(key, None)
        else:
            assert table.set(key, value) == model.get(key)
            model[key] = value
        assert {k: table.get(k) for k, _, _ in steps} == {k: model.get(k) for k, _, _ in steps}
        assert len(table) == len(model)
        assert sorted(table.values()) == sorted(model.values())


def _cached(blocks: PodBlocks, prompt: TokenizedPrompt, pod: str = "a") -> int:
    return blocks.match({4: prompt.keys(4)}).prefix(pod).total


def test_extra_keys_separate_prompts_as_in_the_engine() -> None:
    tokens = tuple(range(12))
    image = MediaItem("sha-of-cat", offset=5, length=4)
    prompts = {
        "plain": TokenizedPrompt(tokens),
        "adapter": TokenizedPrompt(tokens, adapter="sql"),
        "salt": TokenizedPrompt(tokens, cache_salt="tenant-1"),
        "media": TokenizedPrompt(tokens, media=(image,)),
        "moved": TokenizedPrompt(tokens, media=(MediaItem("sha-of-cat", 6, 3),)),
    }
    for name, prompt in prompts.items():
        blocks = PodBlocks()
        extras = [prompt.extra_keys(start, start + 4) or None for start in (0, 4, 8)]
        blocks.store("a", Tier.GPU, StoredBlocks([1, 2, 3], None, tokens, 4, extras))
        cached = {other: _cached(blocks, prompts[other]) for other in prompts}
        # The first block lies before the image, whatever the image is.
        shared = {"plain", "media", "moved"}
        assert cached == {
            other: 12 if other == name else 4 if {other, name} <= shared else 0 for other in prompts
        }


def test_a_long_prompts_keys_are_those_of_its_blocks_one_by_one() -> None:
    prompt = TokenizedPrompt(range(1001), "sql", "tenant", (MediaItem("cat", 333, 400),))
    parent, keys = ROOT, list(prompt.keys(4))
    for number, key in enumerate(keys):
        start, end = 4 * number, 4 * number + 4
        extras = [prompt.extra_keys(start, end)]
        assert [key] == list(block_keys(parent, prompt.token_ids[start:end], 4, extras))
        parent = key
    assert len(keys) == 250


def test_vllms_extra_keys_are_adapter_then_media_then_salt() -> None:
    prompt = TokenizedPrompt(range(8), "sql", "tenant", (MediaItem("cat", 2, 4),))
    assert prompt.extra_keys(0, 4) == ["sql", ("cat", 2), "tenant"]
    assert prompt.extra_keys(4, 8) == ["sql", ("cat", -2)]


def test_a_block_moves_between_tiers_by_its_name_alone() -> None:
    blocks, prompt = PodBlocks(), TokenizedPrompt(range(4))
    blocks.store("a", Tier.GPU, StoredBlocks([7], None, range(4), 4))
    assert blocks.store("a", Tier.CPU, StoredBlocks([7, 8], None, (), 0)) == 1
    blocks.remove("a", Tier.GPU, [7])
    match = blocks.match({4: prompt.keys(4)})
    assert match.prefix("a") == CachedPrefix(total=4, gpu=0)
    blocks.remove("a", Tier.CPU, [7])
    assert blocks.count("a") == blocks.bytes == 0


def test_parts_of_blocks_are_ignored_in_whatever_order_they_come() -> None:
    blocks, prompt = PodBlocks(), TokenizedPrompt(range(8))
    for _ in range(2):
        blocks.store("a", Tier.GPU, StoredBlocks([1], None, range(3), 3))
        blocks.store("a", Tier.GPU, StoredBlocks([2, 3], None, range(8), 4))
        assert blocks.block_sizes == {4}
        assert _cached(blocks, prompt) == 8


def test_past_the_memory_limit_nothing_more_is_stored() -> None:
    blocks, prompt = PodBlocks(max_bytes=28), TokenizedPrompt(range(8))
    assert blocks.store("a", Tier.GPU, StoredBlocks([1], None, range(4), 4)) == 0
    assert blocks.store("b", Tier.GPU, StoredBlocks([1, 2], None, range(8), 4)) == 2
    assert _cached(blocks, prompt) == 4
    assert _cached(blocks, prompt, "b") == 0


@pytest.mark.parametrize(
    "stored",
    [
        StoredBlocks([1, 2], None, range(7), 4),
        StoredBlocks([1], None, range(4), 0),
        StoredBlocks([1, 2], None, range(8), 4, [None]),
        StoredBlocks([1], None, (1, 2, 3, 2**32), 4),
        StoredBlocks([1], None, (1, 2, 3, -1), 4),
    ],
)
def test_an_event_that_contradicts_itself_stores_nothing(stored: StoredBlocks) -> None:
    blocks = PodBlocks()
    with pytest.raises(ValueError, match=r"tokens in|extra keys|token ids"):
        blocks.store("a", Tier.GPU, stored)
    assert blocks.count("a") == 0


def test_keys_behind_the_first_unknown_block_are_not_computed() -> None:
    blocks = PodBlocks()
    blocks.store("a", Tier.GPU, StoredBlocks([1], None, range(4), 4))
    keys = TokenizedPrompt([*range(4), *range(90, 110)], cache_salt=None).keys(4)
    assert blocks.match({4: keys}).prefix("a").total == 4
    assert len(list(keys)) == 4, "of six keys, that of the cached block and of the next were taken"
