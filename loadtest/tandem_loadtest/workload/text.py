"""Generated text and token ids, of an exact number of words or tokens. Pure.

A key and a length determine a part: equal keys give equal text in every prompt and every process.
Parts of different keys differ from their first words on, so that no prefix cache takes one for the
other. Parts are cut from one long random sequence at a place that follows from the key, since to
draw each word would cost more than to send the request.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate, chain, islice
from typing import Final

VOCABULARY: Final = range(32, 256)
"""Token ids that stand for single bytes in byte-level and in sentencepiece vocabularies, and that
are no special tokens in most of them: prompts of these ids are valid for almost any model."""

_WORDS: Final = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue
side kind head house service friend father power hour game line end member law car city community
name president team minute idea body information back parent face others level office door health
person art war history party result change morning reason research girl guy moment air teacher force
education foot boy age policy music market sense nation plan college interest death experience
effect use class control field development role effort rate heart drug show leader light voice wife
police mind price report decision son view relationship town road arm difference value building
action season society tax director position player record paper space ground form event official
matter center couple site project activity star table need court oil situation cost industry figure
street image phone data picture practice piece land product doctor wall patient worker news test
movie north love support technology step baby computer type attention film tree source hair look
"""
WORDS: Final = tuple(_WORDS.split())
"""Common English words, all different: most are one token in the vocabularies of today's models."""

_IDENTITY: Final = 8
"""Words or ids at the start of a part that follow from its key: with 128 words, 2^56 keys."""
_POOL: Final = 16384
"""Length of the random sequence that parts are cut from."""


def digest(seed: int, key: str) -> bytes:
    """16 bytes that identify a part of a prompt in a run of this seed."""
    return blake2b(f"{seed}/{key}".encode(), digest_size=16).digest()


class IdSource:
    """Token ids from VOCABULARY."""

    def __init__(self) -> None:
        self._pool: Final = tuple(random.Random(0).choices(VOCABULARY, k=_POOL))

    def ids(self, identity: bytes, length: int) -> tuple[int, ...]:
        """Exactly `length` ids of the part with this digest; a longer part begins with these."""
        size, first = len(VOCABULARY), VOCABULARY[0]
        head = tuple([first + byte % size for byte in identity[:_IDENTITY]])
        rest = length - _IDENTITY
        if rest <= 0:
            return head[:length]
        at = _place(identity)
        if at + rest <= _POOL:
            return head + self._pool[at : at + rest]
        return head + (self._pool * (1 + (at + rest) // _POOL))[at : at + rest]


@dataclass(frozen=True, slots=True)
class Costs:
    """Tokens of words, for text that is a whole message (`first`) or continues one."""

    first: Sequence[int]
    """Tokens of each word at the start of a text."""
    following: Sequence[int]
    """Tokens of each word after another, with the space between them."""
    first_endings: Mapping[int, str] = field(default_factory=dict)
    """Tokens → a text of exactly as many, for what no word fits."""
    endings: Mapping[int, str] = field(default_factory=dict)
    """Tokens → a piece of exactly as many after a word, for what no further word fits."""

    @property
    def are_unit(self) -> bool:
        """Whether each word is one token everywhere."""
        return max(self.first) == max(self.following) == 1


class TextSource:
    """Text of words from a list, each of known cost in tokens."""

    def __init__(self, words: Sequence[str], costs: Costs | None = None) -> None:
        """Without `costs`, a token is a word. At most 256 words count."""
        self._words: Final = tuple(words[:256])
        self._costs: Final = costs or Costs([1] * len(self._words), [1] * len(self._words))
        self._unit: Final = self._costs.are_unit
        indices = random.Random(0).choices(range(len(self._words)), k=_POOL)
        self._pool: Final = tuple(indices)
        self._text: Final = " ".join(self._words[i] for i in indices) + " "
        lengths = (len(self._words[i]) + 1 for i in indices)
        self._starts: Final = tuple(accumulate(lengths, initial=0))

    def text(self, identity: bytes, tokens: int, *, first: bool) -> str:
        """Text of exactly `tokens` tokens, which starts a message or, after a space, continues one.

        A longer part begins with the same words; its last piece may differ unless each word is a
        token. Where nothing short enough exists (a single token after a word, in a vocabulary of
        bytes), the text has the fewest tokens possible.
        """
        if not self._unit:
            return self._fill(identity, tokens, first=first)
        words = self._words
        count = len(words)
        head = " ".join([words[byte % count] for byte in identity[: min(tokens, _IDENTITY)]])
        if tokens > _IDENTITY:
            head = f"{head} {self._slice(_place(identity), tokens - _IDENTITY)}"
        return head if first else " " + head

    def _slice(self, at: int, count: int) -> str:
        """`count` words of the pool from position `at` on, from its start again after its end."""
        end = at + count
        if end <= _POOL:
            return self._text[self._starts[at] : self._starts[end] - 1]
        whole, last = divmod(end - _POOL, _POOL)
        text = self._text[self._starts[at] :] + self._text * whole
        return (text + self._text[: self._starts[last]])[:-1]

    def _fill(self, identity: bytes, tokens: int, *, first: bool) -> str:
        """As many words as fit, and a piece for the tokens that are left over."""
        costs, endings = self._costs.following, self._costs.endings
        least = min(endings, default=0)
        head = [byte % len(self._words) for byte in identity[:_IDENTITY]]
        pieces: list[str] = []
        left = tokens
        for i in chain(head, self._cycle(_place(identity))):
            starts = first and not pieces
            after = left - (self._costs.first[i] if starts else costs[i])
            # What is left must be nothing, or enough for an ending.
            if after and after < least:
                break
            pieces.append(self._words[i] if starts else " " + self._words[i])
            left = after
            if not left:
                return "".join(pieces)
        if first and not pieces:
            endings = self._costs.first_endings
        return "".join(pieces) + endings[max(left, min(endings))]

    def _cycle(self, at: int) -> chain[int]:
        """The pool from position `at` on, long enough for any prompt."""
        rest = islice(self._pool, at, None)
        return chain(rest, chain.from_iterable([self._pool] * 1024))


def _place(identity: bytes) -> int:
    return int.from_bytes(identity[_IDENTITY:], "big") % _POOL
