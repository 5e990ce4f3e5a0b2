"""The types of the fields that a pick reads, as vLLM checks them.

vLLM converts where that loses nothing: `"16"` and `16.0` are whole numbers to it, `"yes"` and `1`
are true. What it takes is taken here as well; what it refuses is refused before a pod is chosen.
A field that no pick reads is left to the engine.

Errors: `BadBody`.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Final

import msgspec
from msgspec import Raw

from tandem_contract.request_kinds import BodyKind, PooledKind, RequestKind

from .body_fields import BadBody, Members

_NAMES: Final = {
    **dict.fromkeys(b"0123456789-", "a number"),
    **dict.fromkeys(b"tf", "true or false"),
    ord('"'): "a text",
    ord("["): "a list",
    ord("{"): "an object",
    ord("n"): "null",
}
"""Types of JSON by the first byte of a value."""
_TRUE: Final = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE: Final = frozenset({"0", "off", "f", "false", "n", "no"})
_MAX_DIGITS: Final = 4300
"""Digits of a number; Python, and so the engine, converts no longer one."""
_SHOWN: Final = 24
"""Bytes of a wrong value in a message."""

_texts: Final = msgspec.json.Decoder(str).decode


def read_flag(members: Members, name: str) -> bool:
    """The value of a member that is true or false; absent and null are false. Raises BadBody."""
    if (raw := members.get(name)) is None:
        return False
    text = bytes(raw)
    if text in (b"true", b"false", b"null"):
        return text == b"true"
    if text[:1] == b'"':
        word = _texts(text).strip().lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
    elif _is_number(text) and float(text) in (0, 1):
        return float(text) == 1
    raise wrong_type(name, text, "true or false")


def read_count(members: Members, name: str) -> int | None:
    """The value of a member that is a whole number; None: absent, null or negative. Raises
    BadBody."""
    if (raw := members.get(name)) is None:
        return None
    text = bytes(raw)
    if text.isdigit() and len(text) < _MAX_DIGITS:
        # More tokens than any engine generates are as many as the first digits say.
        return int(text[:9])
    if text in (b"null", b"true", b"false"):
        return 1 if text == b"true" else 0 if text == b"false" else None
    number = _number(text)
    if number is None:
        raise wrong_type(name, text, "a whole number")
    return min(int(number), 10**9) if isfinite(number) and number >= 0 else None


def check_types(kind: BodyKind, members: Members) -> None:
    """Raises BadBody if a member is of a type that the engine refuses."""
    for name, expected, first in _EXPECTED[kind]:
        if (raw := members.get(name)) is not None and memoryview(raw)[0] not in first:
            raise wrong_type(name, bytes(raw), expected)


def whole_numbers(name: str, raw: Raw) -> list[int]:
    """A list of whole numbers in which some are written in another way. Raises BadBody."""
    items = _items(raw)
    members = {f"{name}[{i}]": item for i, item in enumerate(items)}
    numbers = (_whole(member, bytes(item)) for member, item in members.items())
    return list(numbers)


def wrong_type(name: str, text: bytes, expected: str) -> BadBody:
    """The error for a member with the wrong value `text`."""
    shown = text[:_SHOWN].decode("utf-8", "replace") + ("…" if len(text) > _SHOWN else "")
    actual = _NAMES.get(text[0], "something else") if text else "nothing"
    return BadBody(f"{name}: {actual} ({shown}) instead of {expected}: send {expected}")


_items: Final = msgspec.json.Decoder(list[Raw]).decode


def _whole(name: str, text: bytes) -> int:
    if text in (b"true", b"false"):
        return int(text == b"true")
    number = _number(text)
    if number is None or not isfinite(number) or number < 0 or number > 0xFFFFFFFF:
        raise wrong_type(name, text, "a whole number from 0 to 4294967295")
    return int(number)


def _is_number(text: bytes) -> bool:
    return text[:1] in b"-0123456789" and len(text) < _MAX_DIGITS


def _number(text: bytes) -> float | None:
    """A number, or a text of one; None: neither, or it is not whole."""
    if text[:1] == b'"':
        # Python's own reading: spaces around it and `_` within it are allowed.
        written: str | bytes = _texts(text)
    elif _is_number(text):
        written = text
    else:
        return None
    try:
        number = float(written)
    except ValueError:
        return None
    return number if text[:1] == b'"' or (isfinite(number) and number.is_integer()) else None


_TEXT: Final = b'"n'
_LIST: Final = b"["
_LIST_OR_NULL: Final = b"[n"
_OBJECT_OR_NULL: Final = b"{n"
_Expected = tuple[str, str, bytes]
"""Name of a member, what it should be, and the first bytes of values that are."""

_MODEL: Final[_Expected] = ("model", "the name of a model, in quotes", _TEXT)
_MESSAGES: Final[_Expected] = ("messages", "a list of messages", _LIST)
_TEXTS: Final = ("a text, an object with a content, or a list of these", b'"{[')
_EXPECTED: Final[Mapping[BodyKind, tuple[_Expected, ...]]] = {
    RequestKind.COMPLETIONS: (_MODEL, ("prompt", "a text or a list", b'"[n')),
    RequestKind.CHAT: (_MODEL, _MESSAGES),
    RequestKind.RESPONSES: (
        _MODEL,
        ("input", "a text or a list of items", b'"['),
    ),
    RequestKind.MESSAGES: (
        _MODEL,
        _MESSAGES,
    ),
    RequestKind.GENERATE: (
        _MODEL,
        ("token_ids", "a list of token ids", _LIST),
        ("features", "an object", _OBJECT_OR_NULL),
        ("content_parts", "a list of parts", _LIST_OR_NULL),
    ),
    PooledKind.INPUT: (_MODEL, ("input", "a text or a list", b'"['), _MESSAGES),
    PooledKind.COHERE: (
        _MODEL,
        *((name, "a list", _LIST_OR_NULL) for name in ("texts", "images", "inputs")),
    ),
    PooledKind.SCORE: (
        _MODEL,
        *((name, *_TEXTS) for name in ("queries", "documents", "items")),
        *((name, *_TEXTS) for name in ("data_1", "data_2", "text_1", "text_2")),
    ),
    PooledKind.RERANK: (
        _MODEL,
        ("query", "a text or an object with a content", b'"{'),
        ("documents", *_TEXTS),
    ),
    PooledKind.TOKENIZE: (_MODEL, ("prompt", "a text", b'"'), _MESSAGES),
    PooledKind.DETOKENIZE: (_MODEL, ("tokens", "a list of token ids", _LIST)),
}
