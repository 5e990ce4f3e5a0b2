"""Detokenizing byte by byte, and stop strings across any cut."""

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.text import Detokenizer, StopOutput, StopStrings, Tokenizer, TokenizerUnusable

from .fake_engine import write_tokenizer

EOS = 257


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("model")
    write_tokenizer(directory)
    return Tokenizer(directory)


def test_text_survives_the_way_through_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界 🙂")) == "Grüße, 世界 🙂"
    assert tokenizer.vocab_size == 258
    assert tokenizer.special_ids == {256, 257}
    assert tokenizer.token_text(EOS) == "</s>"


def test_other_threads_run_while_a_long_text_is_tokenized(tokenizer: Tokenizer) -> None:
    with ThreadPoolExecutor(1) as threads:
        encoding = threads.submit(tokenizer.encode, "word " * 200_000)
        turns = 0
        while wait_for([encoding], timeout=0.001).not_done:
            turns += 1
    assert len(encoding.result()) == 1_000_000
    # With the interpreter's lock held there are two or three: before, after, and at the copy.
    assert turns > 10


@given(text=st.text(min_size=1))
def test_no_half_character_leaves(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    out = [detokenizer.push((i,)) for i in text.encode()]
    for piece, byte in zip(out, text.encode(), strict=True):
        # What is out after each byte is a prefix of the text: nothing is taken back.
        assert "\ufffd" not in piece or "\ufffd" in text, byte
    assert "".join(out) + detokenizer.flush() == text


@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(1, 5)))
def test_bytes_that_are_no_utf8_come_out_as_replacement_characters(
    tokenizer: Tokenizer, data: bytes, cuts: list[int]
) -> None:
    detokenizer = Detokenizer(tokenizer)
    out, remaining = "", list(data)
    for size in cuts:
        out += detokenizer.push(remaining[:size])
        remaining = remaining[size:]
    out += detokenizer.push(remaining) + detokenizer.flush()
    assert out == data.decode(errors="replace")


def test_text_ends_where_a_character_does(tokenizer: Tokenizer) -> None:
    """What a token of several characters brings waits for the end of the last one."""
    detokenizer, data = Detokenizer(tokenizer), "a é".encode()
    assert detokenizer.push(data[:3]) == ""
    assert detokenizer.push(data[3:]) == "a é"


def test_a_long_answer_is_decoded_in_a_bounded_window(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    text = "日本語と🙂" * 200
    assert "".join(detokenizer.push((i,)) for i in text.encode()) == text
    assert len(detokenizer._window) <= 13


def test_special_tokens_leave_no_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = (*b"a", EOS, *b"b")
    assert Detokenizer(tokenizer).push(ids) == "ab"
    assert Detokenizer(tokenizer, skip_special_tokens=False).push(ids) == "a</s>b"


def test_the_prompt_is_context_and_no_text(tokenizer: Tokenizer) -> None:
    assert Detokenizer(tokenizer, prompt_ids=tuple(b"prompt ")).push(b"answer") == "answer"


def test_an_unusable_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnusable, match="cannot read it"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerUnusable, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer(tmp_path)


def test_a_possible_beginning_is_held_back() -> None:
    """As in vLLM by its length, whatever its characters are."""
    stops = StopStrings(["END", "X"])
    assert stops.push("one E") == StopOutput("one")
    assert stops.push("N") == StopOutput(" ")
    assert stops.push("x") == StopOutput("E")
    assert stops.push("") == StopOutput("")
    assert stops.push(" EN") == StopOutput("Nx ")
    assert stops.push("D of it") == StopOutput("", "END")


def test_the_stop_string_stays_when_asked_for() -> None:
    assert StopStrings(["\n\n"], keep=True).push("a\n\nb") == StopOutput("a\n\n", "\n\n")
    stops = StopStrings(["END"], keep=True)
    assert stops.push("one EN") == StopOutput("one EN")
    assert stops.push("D of it") == StopOutput("D", "END")


def test_of_two_stop_strings_the_one_that_ends_first_counts() -> None:
    assert StopStrings(["abcd", "bc"]).push("xabcd") == StopOutput("xa", "bc")


def test_what_was_held_back_comes_out_at_the_end() -> None:
    stops = StopStrings(["abc"])
    assert stops.push("xab") == StopOutput("x")
    assert stops.flush() == "ab"


def test_no_stop_string_may_end_before_min_tokens() -> None:
    stops = StopStrings(["ab"])
    assert stops.push("ab", can_stop=False) == StopOutput("a")
    assert stops.push(" a") == StopOutput("b ")
    assert stops.push("b") == StopOutput("", "ab")


LETTERS = st.text("ab", max_size=30)


@given(text=LETTERS, stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_letter_by_letter_is_the_same_as_at_once(text: str, stops: list[str]) -> None:
    machine = StopStrings(stops)
    out, stopped = "", None
    for letter in text:
        result = machine.push(letter)
        out += result.text
        if (stopped := result.stop) is not None:
            break
    else:
        out += machine.flush()
    ends = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    if not ends:
        assert (out, stopped) == (text, None)
        return
    first = min(end for end, _ in ends)
    assert (first, stopped) in ends
    assert out == text[: first - len(stopped or "")]
