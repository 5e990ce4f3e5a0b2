"""Generated text and ids: exact lengths, equal for equal keys, different for different ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_loadtest.workload.text import VOCABULARY, WORDS, IdSource, TextSource, digest

IDS = IdSource()
TEXT = TextSource(WORDS)
LENGTHS = st.integers(1, 40_000)


def words(key: str, length: int, seed: int = 0) -> list[str]:
    return TEXT.text(digest(seed, key), length, first=True).split(" ")


def ids(key: str, length: int, seed: int = 0) -> tuple[int, ...]:
    return IDS.ids(digest(seed, key), length)


def test_words_are_different_and_plain() -> None:
    assert len(set(WORDS)) == len(WORDS) > 128
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


@given(st.text(), LENGTHS, st.integers())
def test_lengths_are_exact(key: str, length: int, seed: int) -> None:
    assert len(words(key, length, seed)) == len(ids(key, length, seed)) == length
    assert set(words(key, length, seed)) <= set(WORDS)
    assert set(ids(key, length, seed)) <= set(VOCABULARY)


@given(st.text(), LENGTHS, LENGTHS)
def test_a_longer_part_begins_with_the_shorter_one(key: str, left: int, right: int) -> None:
    shorter, longer = sorted((left, right))
    assert ids(key, longer)[:shorter] == ids(key, shorter)
    assert words(key, longer)[:shorter] == words(key, shorter)


def test_text_that_continues_has_a_space_before_it() -> None:
    start, following = (TEXT.text(digest(0, "a"), 30, first=first) for first in (True, False))
    assert following == " " + start


def test_many_keys_share_no_first_block() -> None:
    keys = [f"user/{i}/0" for i in range(20_000)]
    # vLLM's prefix cache compares blocks of 16 tokens by default.
    assert len({ids(key, 16) for key in keys}) == len(keys)
    assert len({tuple(words(key, 16)) for key in keys}) == len(keys)


@pytest.mark.parametrize("length", [16, 500])
def test_another_seed_gives_other_text(length: int) -> None:
    assert ids("system", length, seed=1) != ids("system", length, seed=2)
    assert words("system", length, seed=1) != words("system", length, seed=2)
