"""Deltas to pieces: stop strings, stop tokens, min_tokens."""

import pytest

from tandem_engine.output import OutputText, Piece, TextOptions
from tandem_engine.text import Tokenizer
from tandem_engine.types import Delta, TokenLogprobs

from .fake_engine import write_tokenizer

EOS = 257


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("model")
    write_tokenizer(directory)
    return Tokenizer(directory)


def test_tokens_past_a_stop_string_are_dropped(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, TextOptions(stop=("!",)))
    logprobs = tuple(TokenLogprobs(float(-i)) for i in range(4))
    piece = output.push(Delta(token_ids=tuple(b"ab!c"), logprobs=logprobs))
    assert piece == Piece("ab", tuple(b"ab!"), logprobs[:3], "stop", "!")
    assert output.tokens == 3


def test_the_end_of_sequence_leaves_no_text_and_no_reason(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, TextOptions(skip_special_tokens=False))
    last = Delta(token_ids=(97, EOS), finish_reason="stop", stop_token=EOS)
    assert output.push(last) == Piece("a", (97, EOS), (), "stop", None)


def test_a_stop_token_of_the_clients_is_the_reason(tokenizer: Tokenizer) -> None:
    last = Delta(token_ids=(97, 98), finish_reason="stop", stop_token=98)
    silent = OutputText(tokenizer, TextOptions(stop_token_ids=(98,)))
    assert silent.push(last) == Piece("a", (97, 98), (), "stop", 98)
    text_with_stop = OutputText(
        tokenizer, TextOptions(stop_token_ids=(98,), include_stop_str_in_output=True)
    )
    assert text_with_stop.push(last).text == "ab"


def test_no_stop_string_counts_before_min_tokens(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, TextOptions(stop=("b",), min_tokens=2))
    assert output.push(Delta(token_ids=tuple(b"ab"))) == Piece("ab", tuple(b"ab"))
    assert output.push(Delta(token_ids=tuple(b"cb"))).finish_reason == "stop"


def test_what_is_held_back_comes_with_the_last_piece(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, TextOptions(stop=("xyz",)))
    assert output.push(Delta(token_ids=tuple(b"abx"))).text == "a"
    half = "é".encode()[:1]
    assert output.push(Delta(token_ids=tuple(half))).text == ""
    assert output.push(Delta(finish_reason="length")).text == "bx\ufffd"
