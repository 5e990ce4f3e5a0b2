"""A conversation as input of the prefix hash: its bytes as they came, with two exceptions.

A media part (an image, a sound, a file, embeddings) counts as one block whatever its size: its hash
stands in its place, as in the engine's own key. And Anthropic's cache_control is left out: clients
move it to the newest message, and no chat template renders it.
"""

import re
from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import Raw, Struct
from xxhash import xxh3_128_digest

from tandem_contract.prefix import BYTES_PER_TOKEN, FINE_TOKENS

from .body_fields import BadBody

MEDIA_FIELDS: Final = frozenset(
    {
        # A sound or a file as base64, and Anthropic's image or document.
        "input_audio",
        "file",
        "file_data",
        "source",
        # Embeddings as base64; `data` holds prompt embeddings or thinking that is encrypted.
        "image_embeds",
        "audio_embeds",
        "video_embeds",
        "data",
    }
)
"""Members of a part that hold media, besides those whose name ends in `_url`."""
BLOCK_BYTES: Final = FINE_TOKENS * BYTES_PER_TOKEN
_CACHE_CONTROL: Final = "cache_control"
_MAX_DEPTH: Final = 4
"""Lists in lists that are read: a message's content, a tool result in it, and its parts."""
_COUNTED_BYTES: Final = 512 * 1024
_MAX_OBJECTS: Final = 20_000
"""Objects in a conversation of more than `_COUNTED_BYTES` that is read; one with more is hashed as
it came. To read the millions that a body can hold would block the event loop for seconds; in a
smaller conversation there is no need to count."""
_MAX_MEDIA: Final = 1024
"""Media parts of a request that are replaced; further ones are hashed as they came."""
_MAX_TRIES: Final = 100
"""Places that are compared with a value before it is hashed as it came."""
_SEARCHED: Final = 64
"""Bytes of a value by which it is found in the conversation."""

Pieces = list[bytes | memoryview | Raw]
_NONE: Final = Raw()


class _Turn(Struct):
    """The members of a message or item that may hold parts."""

    content: Raw = _NONE
    output: Raw = _NONE


_turns: Final = msgspec.json.Decoder(list[_Turn])
_parts: Final = msgspec.json.Decoder(list[dict[str, Raw]])
_part: Final = msgspec.json.Decoder(dict[str, Raw])
_cache_control: Final = re.compile(rb'"cache_control"\s*:\s*(?:null|\{[^{}]*\})')
_comma: Final = re.compile(rb"\s*,\s*")


class Conversation(Struct, frozen=True):
    """A conversation as input of the hash."""

    pieces: Pieces
    is_plain: bool
    """Whether every turn is a text, so that no rule about media can apply."""
    media_parts: int = 0
    """Images, sounds and other media in it."""


def read_conversation(raw: Raw, name: str = "messages") -> Conversation:
    """The input of the hash for a list of messages or items, the member `name`. Raises BadBody."""
    view = memoryview(raw)
    end = _end_of_turns(view)
    if len(view) > _COUNTED_BYTES and bytes(view).count(b"{") > _MAX_OBJECTS:
        return Conversation([view[:end]], is_plain=False)
    try:
        turns = _turns.decode(raw)
    except msgspec.ValidationError as err:
        if view[0] == ord("["):
            raise BadBody(f"{name}: {err}: send a list of objects") from err
        # A text instead of a list.
        return Conversation([view[:end]], is_plain=view[0] == ord('"'))
    structures = [
        value
        for turn in turns
        for value in (turn.content, turn.output)
        if value is not _NONE and _is_structure(value)
    ]
    if not structures:
        return Conversation([view[:end]], is_plain=True)
    special = [member for value in structures for member in _special(value, _MAX_DEPTH)]
    data = bytes(view[:end])
    media = [value for name, value in special if name != _CACHE_CONTROL]
    pieces = _with_media_blocks(data, media[:_MAX_MEDIA])
    if len(media) < len(special):
        pieces = _without_cache_control(b"".join(pieces))
    return Conversation(pieces, is_plain=False, media_parts=len(media))


def media_block(value: bytes) -> bytes:
    """What stands for media in the input of the hash: one block."""
    return xxh3_128_digest(value).ljust(BLOCK_BYTES, b"\0")


def _is_structure(value: Raw) -> bool:
    """Whether a JSON value is a list or an object."""
    return memoryview(value)[0] in b"[{"


def _end_of_turns(view: memoryview) -> int:
    """Where the last turn ends: the next request has a comma where this one closes the list."""
    end = len(view)
    if end and view[end - 1] == ord("]"):
        end -= 1
        while end and view[end - 1] in b" \t\r\n":
            end -= 1
    return end


def _special(value: Raw, depth: int) -> Iterator[tuple[str, Raw]]:
    """The members of the parts in `value` that do not enter the hash as they are, in order."""
    try:
        parts = [_part.decode(value)] if memoryview(value)[0] == ord("{") else _parts.decode(value)
    except msgspec.ValidationError:
        return
    for part in parts:
        for name, member in part.items():
            if name in MEDIA_FIELDS or name.endswith("_url") or name == _CACHE_CONTROL:
                yield name, member
            elif depth > 1 and memoryview(member)[0] == ord("["):
                yield from _special(member, depth - 1)


def _with_media_blocks(data: bytes, values: list[Raw]) -> Pieces:
    """`data` in pieces, with a block in the place of each value that is longer than one."""
    view, at = memoryview(data), 0
    pieces: Pieces = []
    for value in values:
        media = bytes(value)
        if len(media) > BLOCK_BYTES and (start := _find(data, media, at)) >= 0:
            pieces += (view[at:start], media_block(media))
            at = start + len(media)
    return [*pieces, view[at:]]


def _find(data: bytes, value: bytes, at: int) -> int:
    """Where `value` is in `data` from `at` on; -1: not found."""
    # By its beginning: `bytes.find` prepares a long needle byte by byte.
    start = data.find(value[:_SEARCHED], at)
    for _ in range(_MAX_TRIES):
        if start < 0 or data.startswith(value, start):
            return start
        start = data.find(value[:_SEARCHED], start + 1)
    return -1


def _without_cache_control(data: bytes) -> Pieces:
    """`data` in pieces, without members named cache_control and one comma beside each."""
    view, at = memoryview(data), 0
    pieces: Pieces = []
    for found in _find_all(data, b'"cache_control"'):
        if (member := _cache_control.match(data, found)) is None:
            continue
        before = data[at:found].rstrip()
        if before.endswith(b","):
            pieces.append(before[:-1])
            at = member.end()
        else:
            # The first member of its object: the comma after it goes as well.
            comma = _comma.match(data, member.end())
            pieces.append(view[at:found])
            at = comma.end() if comma else member.end()
    return [*pieces, view[at:]]


def _find_all(data: bytes, needle: bytes) -> Iterator[int]:
    at = data.find(needle)
    while at >= 0:
        yield at
        at = data.find(needle, at + len(needle))
