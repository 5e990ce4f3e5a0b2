"""Which chats are the same prompt to an engine that gets its token ids in place of the messages."""

from typing import Final

import msgspec
from msgspec import Raw

from .parse import Body, Members

_Absent: Final = Raw(b"null")
_OFF: Final = frozenset({b"null", b"false"})


class _Message(msgspec.Struct):
    content: Raw = _Absent


class _Part(msgspec.Struct):
    type: str = ""


_messages: Final = msgspec.json.Decoder(list[_Message])
_parts: Final = msgspec.json.Decoder(list[_Part])


def renders_to_ids(body: Body) -> bool:
    """Whether a chat is text alone and asks for nothing that only rendering it would tell.

    False as well for what cannot be read: the engine refuses it, or renders it itself.
    """
    members = body.members
    if _is_on(members, "echo") or _is_on(members, "return_prompt_text"):
        return False
    try:
        messages = _messages.decode(members.get("messages", _Absent))
        return all(_is_text(message.content) for message in messages)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def _is_on(members: Members, name: str) -> bool:
    return name in members and bytes(members[name]) not in _OFF


def _is_text(content: Raw) -> bool:
    if bytes(memoryview(content)[:1]) != b"[":
        return True
    return all(part.type == "text" for part in _parts.decode(content))
