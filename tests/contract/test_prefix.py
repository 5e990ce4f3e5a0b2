"""Tests of the prefix hash chain and of its independent reference."""

import struct
from array import array

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.chains import Chain
from tandem_contract.prefix import (
    BYTES_PER_TOKEN,
    COARSE_TOKENS,
    FINE_TOKENS,
    block_tokens_at,
    covered_tokens,
    prompt_hash,
    text_chain,
    token_bytes,
    whole_blocks,
)

FINE = FINE_TOKENS * BYTES_PER_TOKEN
TOKENS = st.lists(st.integers(0, 2), max_size=40)


def common(first: Chain | bytes, second: Chain | bytes) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@given(st.integers(0, 40_000), st.binary(max_size=9), st.binary(max_size=9))
def test_chains_share_the_blocks_that_the_prompts_share(
    start: int, first_end: bytes, second_end: bytes
) -> None:
    first, second = (bytes(start) + end * 300 for end in (first_end, second_end))
    shared_tokens = common(first, second) // BYTES_PER_TOKEN
    assert common(text_chain(first), text_chain(second)) == whole_blocks(shared_tokens)


@given(st.integers(0, 300_000), st.integers(0, 2000))
def test_a_longer_text_continues_the_chain(length: int, more: int) -> None:
    text = bytes(range(256)) * (length // 256)
    chain = text_chain(text)
    assert len(chain) == whole_blocks(len(text) // BYTES_PER_TOKEN)
    assert text_chain(text + bytes(more))[: len(chain)] == chain


@given(st.integers(0, 200_000))
def test_blocks_cover_a_prompt_but_for_less_than_the_next_block(tokens: int) -> None:
    blocks = whole_blocks(tokens)
    covered = covered_tokens(blocks)
    assert covered <= tokens < covered_tokens(blocks + 1)
    assert (
        covered_tokens(blocks + 1) - covered == block_tokens_at(covered) == block_tokens_at(tokens)
    )
    assert FINE_TOKENS <= block_tokens_at(tokens) <= max(FINE_TOKENS, tokens // 64)


def test_blocks_are_fine_at_the_start_and_coarse_far_in() -> None:
    assert [covered_tokens(n) for n in (0, 1, 2)] == [0, FINE_TOKENS, 2 * FINE_TOKENS]
    assert block_tokens_at(100_000) == COARSE_TOKENS
    assert len(text_chain(bytes(400_000))) < 700


def test_a_change_in_a_block_changes_all_after_it() -> None:
    first, second = text_chain(bytes(8 * FINE)), text_chain(bytes(FINE) + b"x" * 7 * FINE)
    assert common(first, second) == 1
    assert not set(first[1:]) & set(second[1:])


def test_equal_blocks_at_different_places_differ() -> None:
    assert len(set(text_chain(bytes(8 * FINE)))) == 8


def test_a_salt_separates() -> None:
    text = bytes(2 * FINE)
    assert not set(text_chain(text, b"one")) & set(text_chain(text, b"two"))


def test_each_hash_is_xxh3_of_its_block_seeded_with_the_one_before() -> None:
    ids = list(range(2 * FINE_TOKENS + 1))
    words = struct.pack(f"<{len(ids)}I", *ids)
    first = xxhash.xxh3_64_intdigest(words[:FINE], xxhash.xxh3_64_intdigest(b"salt"))
    second = xxhash.xxh3_64_intdigest(words[FINE : 2 * FINE], first)
    assert text_chain(token_bytes(ids), b"salt") == array("Q", [first, second])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_an_id_beyond_32_bits_is_an_error(token: int) -> None:
    with pytest.raises(OverflowError):
        token_bytes([token])


@given(TOKENS, TOKENS)
def test_prompts_have_one_hash_exactly_when_they_are_equal(
    first: list[int], second: list[int]
) -> None:
    assert (prompt_hash(first) == prompt_hash(second)) == (first == second)
