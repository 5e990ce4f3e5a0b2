"""The prefix hash chain."""

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.prefix import prompt_hash, text_chain, token_bytes

TOKENS = st.lists(st.integers(0, 2), max_size=40)


def common(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@given(TOKENS, TOKENS, TOKENS, st.integers(1, 5))
def test_chains_share_the_blocks_that_the_prompts_share(
    start: list[int], first_end: list[int], second_end: list[int], block: int
) -> None:
    first, second = start + first_end, start + second_end
    chains = [text_chain(token_bytes(ids), 4 * block) for ids in (first, second)]
    assert common(*chains) == common(first, second) // block


@given(st.binary(max_size=60), st.binary(max_size=20), st.integers(1, 9))
def test_a_longer_text_continues_the_chain(text: bytes, more: bytes, block: int) -> None:
    chain = text_chain(text, block)
    assert len(chain) == len(text) // block
    assert text_chain(text + more, block)[: len(chain)] == chain


def test_a_change_in_a_block_changes_all_after_it() -> None:
    first, second = text_chain(b"abcdefgh", 2), text_chain(b"abXdefgh", 2)
    assert common(first, second) == 1
    assert not set(first[1:]) & set(second[1:])


def test_equal_blocks_at_different_places_differ() -> None:
    assert len(set(text_chain(b"ab" * 8, 2))) == 8


def test_a_salt_separates() -> None:
    assert not set(text_chain(b"abcd", 2, b"one")) & set(text_chain(b"abcd", 2, b"two"))


def test_each_hash_is_xxh3_of_its_block_seeded_with_the_one_before() -> None:
    words = struct.pack("<4I", 1, 2, 3, 4)
    first = xxhash.xxh3_64_intdigest(words[:8], xxhash.xxh3_64_intdigest(b"salt"))
    second = xxhash.xxh3_64_intdigest(words[8:], first)
    assert text_chain(token_bytes([1, 2, 3, 4, 5]), 8, b"salt") == [first, second]


def test_hashes_fit_in_64_bits() -> None:
    assert all(0 <= h < 2**64 for h in text_chain(bytes(range(256)), 1))


@pytest.mark.parametrize("token", [-1, 2**32])
def test_an_id_beyond_32_bits_is_an_error(token: int) -> None:
    with pytest.raises(OverflowError):
        token_bytes([token])


@given(TOKENS, TOKENS)
def test_prompts_have_one_hash_exactly_when_they_are_equal(
    first: list[int], second: list[int]
) -> None:
    assert (prompt_hash(first) == prompt_hash(second)) == (first == second)
