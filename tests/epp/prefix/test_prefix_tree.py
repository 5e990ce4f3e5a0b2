"""The prefix index against a plain model of what each pod caches, and its bounds."""

import tracemalloc
from array import array
from collections import defaultdict
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.chains import Chain
from tandem_contract.prefix import FINE_TOKENS, covered_tokens
from tandem_epp.prefix.cached_prefixes import MAX_DROPS
from tandem_epp.prefix.prefix_tree import PrefixTree

PODS = ("a", "b", "c")
Prompt = tuple[int, ...]
PROMPTS = st.lists(st.integers(0, 2), max_size=8).map(tuple)


def chain(prompt: Prompt) -> Chain:
    """A chain as of a prompt with one block per item."""
    return array("Q", (hash(prompt[: i + 1]) % 2**64 for i in range(len(prompt))))


def common(first: Prompt, second: Prompt) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def confirm(tree: PrefixTree[str], pod: str, prompt: Prompt) -> None:
    tree.confirm(tree.place(pod, chain(prompt)))


def cached(tree: PrefixTree[str], pod: str, prompt: Prompt) -> int:
    """Leading blocks of `prompt` that are cached on `pod`."""
    return tree.match(chain(prompt)).cached_tokens(pod) // FINE_TOKENS


class PlainCache:
    """Blocks by their whole prefix, with the time of their last use; forgets the least recently
    used block that no other block continues."""

    def __init__(self, capacity: int) -> None:
        self.used: dict[Prompt, int] = {}
        self.capacity, self.time = capacity, 0

    def add(self, prompt: Prompt) -> None:
        self.time += 1
        self.used |= {prompt[: i + 1]: self.time for i in range(len(prompt))}
        while len(self.used) > self.capacity:
            parents = {block[:-1] for block in self.used}
            del self.used[min(self.used.keys() - parents, key=self.used.__getitem__)]

    def match(self, prompt: Prompt) -> int:
        return sum(prompt[: i + 1] in self.used for i in range(len(prompt)))


@given(st.lists(st.tuples(st.sampled_from(PODS), PROMPTS)), st.lists(PROMPTS, min_size=1))
def test_a_match_is_the_longest_common_prefix(
    additions: list[tuple[str, Prompt]], queries: list[Prompt]
) -> None:
    tree: PrefixTree[str] = PrefixTree()
    for pod, prompt in additions:
        confirm(tree, pod, prompt)
    for query in queries:
        for pod in PODS:
            known = [prompt for name, prompt in additions if name == pod]
            expected = max((common(query, prompt) for prompt in known), default=0)
            assert cached(tree, pod, query) == expected


@given(
    st.lists(st.tuples(st.sampled_from(PODS), st.integers(0, 12), PROMPTS), max_size=40),
    st.integers(1, 20),
)
def test_each_pod_forgets_what_it_used_least_recently(
    uses: list[tuple[str, int, Prompt]], capacity: int
) -> None:
    """Each prompt has an end of its own, so none is the beginning of another."""
    tree: PrefixTree[str] = PrefixTree()
    models = {pod: PlainCache(capacity) for pod in PODS}
    for pod in PODS:
        tree.set_capacity(pod, capacity * FINE_TOKENS)
    for pod, end, body in uses:
        prompt = (*body, 100 + end)
        confirm(tree, pod, prompt)
        models[pod].add(prompt)
        for other in PODS:
            assert tree._cached.tokens(other) == len(models[other].used) * FINE_TOKENS
            for _, other_end, other_body in uses:
                query = (*other_body, 100 + other_end)
                assert cached(tree, other, query) == models[other].match(query)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["place", "confirm", "withdraw", "clear"]), st.integers(0, 9), PROMPTS
    )
)


@given(OPERATIONS)
def test_provisional_entries_are_placed_until_they_are_withdrawn_or_confirmed(
    operations: list[tuple[str, int, Prompt]],
) -> None:
    tree: PrefixTree[str] = PrefixTree()
    open_entries = []
    confirmed: dict[str, list[Prompt]] = defaultdict(list)
    for action, number, prompt in operations:
        pod = PODS[number % len(PODS)]
        if action == "place":
            open_entries.append((pod, prompt, tree.place(pod, chain(prompt))))
        elif action == "clear":
            tree.clear(pod)
            confirmed.pop(pod, None)
            stale = [entry for name, _, entry in open_entries if name == pod]
            open_entries = [item for item in open_entries if item[0] != pod]
            for entry in stale:
                tree.confirm(entry)
        elif open_entries:
            name, placed, entry = open_entries.pop(number % len(open_entries))
            if action == "confirm":
                tree.confirm(entry)
                confirmed[name].append(placed)
            else:
                tree.withdraw(entry)
            tree.withdraw(entry)
        match = tree.match(chain(prompt))
        for name in PODS:
            answered = [common(prompt, p) for p in confirmed[name]]
            on_way = [common(prompt, p) for other, p, _ in open_entries if other == name]
            assert match.cached_tokens(name) == FINE_TOKENS * max(answered, default=0)
            assert match.placed_tokens(name) == FINE_TOKENS * max(answered + on_way, default=0)


@given(OPERATIONS, st.integers(1, 12))
def test_memory_is_returned(operations: list[tuple[str, int, Prompt]], capacity: int) -> None:
    tree: PrefixTree[str] = PrefixTree()
    entries = []
    for pod in PODS:
        tree.set_capacity(pod, capacity * FINE_TOKENS)
    for action, number, prompt in operations:
        entry = tree.place(PODS[number % len(PODS)], chain(prompt))
        if action == "place":
            entries.append(entry)
        else:
            tree.confirm(entry)
        assert all(tree._cached.tokens(pod) <= capacity * FINE_TOKENS for pod in PODS)
    for pod in PODS:
        tree.remove_pod(pod)
    for entry in entries:
        tree.confirm(entry)
    assert tree.bytes == 0


def test_a_prompt_beyond_the_capacity_keeps_its_beginning() -> None:
    tree: PrefixTree[str] = PrefixTree()
    tree.set_capacity("a", 3 * FINE_TOKENS + 5)
    confirm(tree, "a", tuple(range(10)))
    assert cached(tree, "a", tuple(range(10))) == 3
    tree.set_capacity("a", FINE_TOKENS)
    assert cached(tree, "a", tuple(range(10))) == 1


def test_the_beginning_of_a_cached_prompt_is_kept_when_it_is_used_again() -> None:
    tree: PrefixTree[str] = PrefixTree()
    tree.set_capacity("a", 6 * FINE_TOKENS)
    confirm(tree, "a", (1, 2, 3))
    confirm(tree, "a", (1, 2, 4))
    confirm(tree, "a", (1, 2))
    confirm(tree, "a", (7, 8, 9))
    confirm(tree, "a", (7, 8, 6))
    assert cached(tree, "a", (1, 2, 3)) == 2


def test_memory_is_bounded_over_all_pods() -> None:
    tree: PrefixTree[int] = PrefixTree(limit_bytes=200_000)
    for number in range(3000):
        tree.confirm(tree.place(number % 40, chain((number, *range(10)))))
        assert tree.bytes < 200_000
    assert tree.match(chain((2999,))).cached == {2999 % 40: FINE_TOKENS}
    # Prompts on their way are bounded as well: those beyond have no effect.
    entries = [tree.place(0, chain((9, number, *range(50)))) for number in range(1000)]
    assert tree.bytes < 200_000 + 50_000
    for entry in entries:
        tree.withdraw(entry)


def test_the_estimate_of_memory_is_about_right() -> None:
    tree: PrefixTree[int] = PrefixTree()
    chains = [array("Q", range(n << 20, (n << 20) + 60)) for n in range(4000)]
    tracemalloc.start()
    try:
        for number, blocks in enumerate(chains):
            tree.confirm(tree.place(number % 20, blocks))
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert tree.bytes == pytest.approx(size, rel=0.2)


def test_one_call_forgets_a_bounded_number_of_nodes_and_later_calls_the_rest() -> None:
    tree: PrefixTree[str] = PrefixTree()
    for number in range(3 * MAX_DROPS):
        confirm(tree, "a", (number,))
    tree.set_capacity("a", FINE_TOKENS)
    assert tree._cached.tokens("a") == 2 * MAX_DROPS * FINE_TOKENS
    confirm(tree, "a", (-1,))
    confirm(tree, "a", (-2,))
    confirm(tree, "a", (-3,))
    assert tree._cached.tokens("a") == FINE_TOKENS
    for number in range(3 * MAX_DROPS):
        confirm(tree, "b", (number,))
    tree.clear("b")
    assert cached(tree, "b", (5,)) == 0
    assert tree.bytes > 0
    for _ in range(3):
        confirm(tree, "a", (-3,))
    assert tree._cached.tokens("b") == 0
    confirm(tree, "b", (6,))
    assert (cached(tree, "b", (5,)), cached(tree, "b", (6,))) == (0, 1)


def test_far_in_tokens_follow_the_position_of_the_blocks() -> None:
    tree: PrefixTree[str] = PrefixTree()
    prompt = tuple(range(400))
    confirm(tree, "a", prompt)
    assert tree.match(chain(prompt)).cached_tokens("a") == covered_tokens(400)
    assert tree.match(chain((*prompt[:300], -1))).cached_tokens("a") == covered_tokens(300)
    tree.set_capacity("a", covered_tokens(300) + 1)
    assert tree._cached.tokens("a") == covered_tokens(300)


@given(st.lists(st.tuples(st.sampled_from(PODS), PROMPTS), max_size=12))
def test_the_recent_prompts_rebuild_the_index_in_the_same_order(
    uses: list[tuple[str, Prompt]],
) -> None:
    tree: PrefixTree[str] = PrefixTree()
    copy: PrefixTree[str] = PrefixTree()
    for pod, prompt in uses:
        confirm(tree, pod, prompt)
    recent = list(tree.recent())
    for pod, hashes in reversed(recent):
        copy.confirm(copy.place(pod, hashes))
    for _, prompt in uses:
        for pod in PODS:
            assert cached(copy, pod, prompt) == cached(tree, pod, prompt)
    for pod in PODS:
        assert copy._cached.tokens(pod) == tree._cached.tokens(pod)
        again = [hashes for other, hashes in copy.recent() if other == pod]
        assert again == [hashes for other, hashes in recent if other == pod]


def turns(conversation: int, number: int, length: int = 10) -> Prompt:
    """Turn `number` of a conversation: each parts from the one before at its last block."""
    prompt = tuple(1000 * conversation + block for block in range(length * number))
    return (*prompt, -1 - number)


def test_a_cache_that_is_not_full_loses_nothing() -> None:
    tree: PrefixTree[str] = PrefixTree()
    tree.set_capacity("a", 1000 * FINE_TOKENS)
    for number in range(1, 5):
        for conversation in range(4):
            confirm(tree, "a", turns(conversation, number))
    assert tree.eviction_harm("a") == tree.eviction_harm("b") == 0.0


def test_a_full_cache_whose_prompts_return_late_has_room_to_lose() -> None:
    tree: PrefixTree[str] = PrefixTree()
    for pod, capacity in (("tiny", 200), ("larger", 1000)):
        tree.set_capacity(pod, capacity * FINE_TOKENS)
        random, numbers = Random(1), dict.fromkeys(range(20), 0)
        for i in range(400):
            conversation = random.choice(list(numbers))
            confirm(tree, pod, turns(conversation, number := numbers.pop(conversation) + 1))
            # Each has four turns; then another one begins.
            numbers |= {conversation: number} if number < 4 else {100 + i: 0}
    assert tree.eviction_harm("tiny") > tree.eviction_harm("larger") >= 0.0
    tree.clear("tiny")
    assert tree.eviction_harm("tiny") == 0.0


def test_prompts_that_nobody_repeats_are_no_loss() -> None:
    tree: PrefixTree[str] = PrefixTree()
    tree.set_capacity("a", 50 * FINE_TOKENS)
    for conversation in range(40):
        confirm(tree, "a", turns(conversation, 1))
    assert tree.eviction_harm("a") == 0.0


def test_what_all_prompts_have_in_common_does_not_count_as_used_late() -> None:
    tree: PrefixTree[str] = PrefixTree()
    tree.set_capacity("a", 100 * FINE_TOKENS)
    common_part = tuple(range(30))
    for own in range(400):
        confirm(tree, "a", (*common_part, *range(100 * own + 1000, 100 * own + 1010)))
    assert tree.eviction_harm("a") == 0.0
