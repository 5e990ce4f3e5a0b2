"""Edits of JSON objects that leave what they do not touch as it was."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from .parse import Body, Members


def with_member(body: Body, name: str, value: bytes) -> bytes:
    """The body with one more member, after the others; `value` is encoded JSON."""
    return _appended(body.data, name, value, b"," if body.members else b"")


def appended(data: bytes, name: str, value: bytes) -> bytes:
    """The same for a JSON object that is not empty."""
    return _appended(data, name, value, b",")


def with_members(members: Members, changes: Mapping[str, Any], drop: Collection[str] = ()) -> bytes:
    """The object with `changes` set (a new key goes last) and `drop` left out."""
    kept: dict[str, Any] = {k: v for k, v in members.items() if k not in drop}
    return msgspec.json.encode(kept | dict(changes))


def _appended(data: bytes, name: str, value: bytes, comma: bytes) -> bytes:
    return b'%b%b"%b":%b}' % (data[: data.rindex(b"}")], comma, name.encode(), value)
