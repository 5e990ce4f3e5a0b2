"""Text of exact token counts, checked by encoding it again."""

import subprocess
import sys
from pathlib import Path

import pytest

from tandem_loadtest.workload.text import digest
from tandem_loadtest.workload.tokenizer import ExactTokenizer, TokenizerError

from .tokenizers import KINDS, byte_level, with_start_token, word_crossing, write

LENGTHS = (*range(1, 40), 257, 1024, 20_000)


@pytest.fixture(scope="module", params=KINDS)
def exact(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ExactTokenizer:
    return ExactTokenizer(write(tmp_path_factory.mktemp("model"), KINDS[request.param]()))


def test_text_has_exactly_its_tokens(exact: ExactTokenizer) -> None:
    texts = {n: exact.source.text(digest(1, f"{n}"), n, first=True) for n in LENGTHS}
    assert {n: exact.count(text) for n, text in texts.items()} == {n: n for n in LENGTHS}


def test_text_has_exactly_its_tokens_after_other_text(exact: ExactTokenizer) -> None:
    before = exact.source.text(digest(1, "system"), 77, first=True)
    for n in LENGTHS:
        text = before + exact.source.text(digest(1, f"{n}"), n, first=False)
        assert exact.count(text) == 77 + n
        assert exact.count(text + exact.source.text(digest(2, ""), 50, first=False)) == 127 + n


def test_text_has_no_white_space_at_its_ends(exact: ExactTokenizer) -> None:
    # Chat templates strip it, and the number of tokens would change.
    texts = [exact.source.text(digest(1, f"{n}"), n, first=True) for n in LENGTHS]
    assert texts == [text.strip() for text in texts]


def test_text_of_a_key_is_equal_and_of_another_key_different(exact: ExactTokenizer) -> None:
    texts = [exact.source.text(digest(1, f"{i}"), 64, first=True) for i in range(500)]
    again = [exact.source.text(digest(1, f"{i}"), 64, first=True) for i in range(500)]
    assert texts == again
    # The first tokens differ, so that no prefix cache takes one text for another.
    assert len({text[:40] for text in texts}) == 500


def test_a_file_is_as_good_as_its_directory(tmp_path: Path) -> None:
    tokenizer = byte_level(2000)
    write(tmp_path, tokenizer)
    expected = len(tokenizer.encode("time, year?").ids)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert ExactTokenizer(path).count("time, year?") == expected


def test_special_tokens_are_counted_apart(tmp_path: Path) -> None:
    tokenizer = with_start_token(byte_level(2000))
    exact = ExactTokenizer(write(tmp_path, tokenizer))
    assert exact.special_tokens == 1
    assert exact.count("time, year?") == len(tokenizer.encode("time, year?").ids) - 1


def test_truncation_and_padding_of_the_file_do_not_count(tmp_path: Path) -> None:
    tokenizer = byte_level(2000)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=9)
    exact = ExactTokenizer(write(tmp_path, tokenizer))
    assert exact.count(exact.source.text(digest(1, "a"), 7, first=True)) == 7


def test_a_tokenizer_whose_tokens_span_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"splits words differently .* style `words`"):
        ExactTokenizer(write(tmp_path, word_crossing()))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the tokenizer: .*No such file"),
        (b"{}", "not a Hugging Face tokenizer"),
        (b"\xff", "cannot read the tokenizer: .*utf-8"),
        (b"no JSON", "not a Hugging Face tokenizer"),
    ],
)
def test_a_missing_or_broken_file_is_an_error(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(TokenizerError, match=f"^{file}: {message}"):
        ExactTokenizer(file)


def test_other_styles_do_not_import_the_library() -> None:
    code = "import sys, tandem_loadtest.workload.prompts; print('tokenizers' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout == "False\n"
