"""Text of an exact number of tokens, by the model's own tokenizer: `ExactTokenizer(path)`.

It picks words that keep their tokens beside each other, in either order, so that the tokens of a
text are the sum of those of its words: text of any length is exact without encoding it.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from .settings import WorkloadError
from .text import WORDS, Costs, TextSource

TOKENIZER_FILE: Final = "tokenizer.json"

_MOST_WORDS: Final = 128
_LEAST_WORDS: Final = 16
"""With fewer words than this, texts would be too alike."""
_ANCHOR: Final = "people"
"""The word after which others are measured."""
_LETTERS: Final = "aeionrst"
_PUNCTUATION: Final = (".", ",", ";", "!", "?")


class TokenizerError(WorkloadError):
    """No text of exact length can be made with this tokenizer; the message names its file."""


class ExactTokenizer:
    """A Hugging Face `tokenizer.json`, and words of known numbers of tokens in it."""

    def __init__(self, path: Path) -> None:
        """`path`: the file, or the directory that has it. Raises TokenizerError."""
        self.file: Final = path / TOKENIZER_FILE if path.is_dir() else path
        self._tokenizer: Final = _load(self.file)
        # Which ids are added depends on the tokenizer's post-processor: `<s>` in most models.
        self.special_tokens: Final = int(self._tokenizer.num_special_tokens_to_add(False))
        """Tokens that the tokenizer puts around every text of a completion."""
        words = self._words()
        self.source: Final = TextSource(words, self._costs(words))
        """Makes text of exact length."""

    def count(self, text: str) -> int:
        """Tokens of `text`, without special tokens around it."""
        return len(self._ids(text))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _after(self, piece: str, word: str = _ANCHOR) -> list[int]:
        """Token ids that `piece` adds after `word`; empty when it changes the word's own."""
        before = self._ids(word)
        ids = self._ids(word + piece)
        return ids[len(before) :] if ids[: len(before)] == before else []

    def _words(self) -> list[str]:
        """Words that are single tokens, if there are enough; else any that keep their tokens."""
        unit = [w for w in WORDS if self.count(w) == len(self._after(" " + w)) == 1]
        words = self._compatible(unit)
        if len(words) < _LEAST_WORDS:
            words = self._compatible(WORDS)
        if len(words) < _LEAST_WORDS:
            raise TokenizerError(
                f"{self.file}: splits words differently depending on the words beside them, so"
                " text of exact length cannot be made; use the prompt style `words`"
            )
        return words

    def _compatible(self, candidates: Iterable[str]) -> list[str]:
        """Words with different tokens, which none of the others changes before or after it."""
        words: dict[str, list[int]] = {}
        known: set[tuple[int, ...]] = set()
        for word in candidates:
            ids = self._after(" " + word)
            # Words that the vocabulary lacks would all be the same unknown token.
            if not ids or tuple(ids) in known:
                continue
            text, expected = word, self._ids(word)
            for other, other_ids in [*words.items(), (word, ids)]:
                text += f" {other} {word}"
                expected += other_ids + ids
            if self._ids(text) == expected:
                words[word] = ids
                known.add(tuple(ids))
            if len(words) == _MOST_WORDS:
                break
        return list(words)

    def _costs(self, words: Sequence[str]) -> Costs:
        first = [self.count(word) for word in words]
        following = [len(self._after(" " + word)) for word in words]
        costs = Costs(first, following)
        if costs.are_unit:
            return costs
        # A word is taken only if nothing is left after it, or enough for an ending. Therefore at
        # most the tokens of the longest word and of the shortest ending remain.
        endings = self._endings(words, most=2 * max(following))
        least = min(endings)
        missing = [n for n in range(least, least + max(following)) if n not in endings]
        if missing:
            raise TokenizerError(
                f"{self.file}: no word or punctuation has {missing[0]} tokens, so text of exact"
                " length cannot be made; use the prompt style `words`"
            )
        starts = {self.count(text): text for text in reversed([*_pieces(words)])}
        return Costs(first, following, starts, endings)

    def _endings(self, words: Sequence[str], most: int) -> dict[int, str]:
        """Tokens → a piece that adds exactly as many after any word, and changes none after it."""
        endings: dict[int, str] = {}
        for piece in _endings_of(words):
            cost = len(self._after(piece))
            if 0 < cost <= most and cost not in endings and self._is_stable(piece, cost, words):
                endings[cost] = piece
        return endings

    def _is_stable(self, piece: str, cost: int, words: Sequence[str]) -> bool:
        follower = self._after(" " + words[0])
        return all(
            len(self._after(piece, word)) == cost
            and self._ids(f"{word}{piece} {words[0]}") == self._ids(word + piece) + follower
            for word in words
        )


def _endings_of(words: Sequence[str]) -> Iterator[str]:
    """Candidates for the end of a text: words, parts of words, and punctuation."""
    for piece in _pieces(words):
        yield " " + piece
    yield from _PUNCTUATION


def _pieces(words: Sequence[str]) -> Iterator[str]:
    yield from _LETTERS
    for word in words[:_LEAST_WORDS]:
        for end in range(2, len(word) + 1):
            yield word[:end]
    for word in words[:_LEAST_WORDS]:
        long = word + words[0] + words[1]
        for end in range(len(word) + 1, len(long) + 1):
            yield long[:end]


def _load(file: Path) -> Any:
    # Imported here, since the library costs start-up time and only this style of prompts needs it.
    from tokenizers import Tokenizer  # noqa: PLC0415

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise TokenizerError(f"{file}: cannot read the tokenizer: {err}") from err
    try:
        tokenizer = Tokenizer.from_str(text)
    # The library raises nothing narrower than Exception for a malformed file.
    except Exception as err:
        raise TokenizerError(f"{file}: not a Hugging Face tokenizer: {err}") from err
    # A tokenizer.json may ask for both, which would change lengths silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
