"""The text in an event of completions or chat.

A module of its own, which is not compiled: msgspec needs the annotations of the structs, which a
compiled class loses.
"""

from typing import Final

import msgspec


class _TextOffsets(msgspec.Struct):
    text_offset: list[int] = []
    tokens: list[str] = []


class _Delta(msgspec.Struct):
    content: str = ""


class Choice(msgspec.Struct):
    """What a choice of an event adds to the answer."""

    text: str = ""
    delta: _Delta = msgspec.field(default_factory=_Delta)
    logprobs: _TextOffsets | None = None


class _Event(msgspec.Struct):
    choices: list[Choice]


_event: Final = msgspec.json.Decoder(_Event)


def choice_of(event: bytes) -> Choice:
    """The only choice of an event's JSON. Raises ValueError if it has none, or several."""
    [choice] = _event.decode(event).choices
    return choice


def text_of(event: bytes) -> str:
    """The text of an event's only choice. Raises ValueError as `choice_of`."""
    choice = choice_of(event)
    return choice.text or choice.delta.content
