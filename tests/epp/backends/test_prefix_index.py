"""The prefix index against brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.prefix import text_chain
from tandem_epp.backends.prefix_index import GENERATIONS, PrefixIndex

TEXTS = st.lists(st.text("ab", max_size=40).map(str.encode), max_size=30)


def brute_force(index: PrefixIndex, chain: list[int]) -> int:
    return next((i for i, block in enumerate(chain) if block not in index), len(chain))


@given(TEXTS, st.text("ab", max_size=40).map(str.encode), st.integers(GENERATIONS, 60))
def test_the_match_equals_that_of_brute_force(
    added: list[bytes], query: bytes, capacity: int
) -> None:
    index = PrefixIndex(capacity)
    for text in added:
        index.add(text_chain(text, 2))
        assert len(index) <= capacity
    chain = text_chain(query, 2)
    assert index.match(chain) == brute_force(index, chain)


@given(TEXTS, st.integers(GENERATIONS, 60))
def test_the_newest_prompt_is_kept_up_to_most_of_the_capacity(
    added: list[bytes], capacity: int
) -> None:
    index = PrefixIndex(capacity)
    for text in added:
        chain = text_chain(text, 2)
        index.add(chain)
        assert index.match(chain) == min(len(chain), capacity - capacity // GENERATIONS)


def test_the_oldest_prompts_are_evicted_first() -> None:
    index = PrefixIndex(40)
    for i in range(20):
        index.add([i * 10 + j for j in range(5)])
    assert index.match([0, 1, 2, 3, 4]) == 0
    assert index.match([190, 191, 192, 193, 194]) == 5
    assert index.match([190, 191, 7]) == 2


def test_clearing_and_shrinking() -> None:
    index = PrefixIndex(100)
    index.add(list(range(50)))
    index.resize(8)
    assert len(index) <= 8
    index.add([1, 2, 3])
    index.clear()
    assert index.match([1, 2, 3]) == 0
    with pytest.raises(ValueError, match="at least"):
        index.resize(1)
