"""Events of the messages and the responses API: what in them is text, and whose ids they have.

A delta is a part of a text: of its block, or of its item. Every other event is compared as a whole,
by its type and place: what it repeats of the answer was compared already.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from .repeated import Part

_PLACES: Final = ("index", "output_index", "content_index", "summary_index")
"""Members that say where in the answer an event belongs."""
_SIGNATURE: Final = "signature"
_NAMED: Final = ("type", "name")
"""What identifies the block or the item that an event begins."""


def is_ping(name: bytes, data: bytes) -> bool:
    """Whether an event only keeps the connection open."""
    return name == b"ping" or data in {b'{"type":"ping"}', b'{"type": "ping"}'}


def is_aborted(event: dict[str, Any]) -> bool:
    """Whether the engine says that it ended the request. vLLM 0.32 has no stop reason for messages
    then, and for responses a status, in some of its modes: in others they look completed."""
    delta, response = event.get("delta"), event.get("response")
    if event["type"] == "message_delta" and isinstance(delta, dict):
        return delta.get("stop_reason", "") is None
    return isinstance(response, dict) and response.get("status") == "cancelled"


def typed_parts(event: dict[str, Any]) -> list[Part]:
    """The texts of an event."""
    place = ".".join(str(event[name]) for name in _PLACES if name in event)
    key = f"{event['type']}.{place}"
    delta = event.get("delta")
    if isinstance(delta, str):
        return [Part(key, event, "delta")]
    if isinstance(delta, dict) and event["type"] == "content_block_delta":
        if _SIGNATURE in delta:
            # Made up by each engine.
            return [Part(f"{key}.{_SIGNATURE}", {"whole": _SIGNATURE}, "whole")]
        return [
            Part(f"{key}.{name}", delta, name)
            if isinstance(value, str)
            else Part(f"{key}.{name}", {"whole": msgspec.json.encode(value).decode()}, "whole")
            for name, value in delta.items()
            if name != "type" and value
        ]
    begun = event.get("content_block") or event.get("item") or event.get("part") or {}
    what: dict[str, Any] = {name: begun[name] for name in _NAMED if name in begun}
    if isinstance(delta, dict):
        what |= delta
    return [Part(key, {"whole": msgspec.json.encode(what).decode()}, "whole")]


class TypedIds:
    """Ids and numbers of a stream's events, which stay the first engine's."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        """Place → id that the client knows."""
        self._renamed: dict[str, str] = {}
        """Id of the engine that serves the stream → the one that the client knows."""
        self._created: object = None
        self._next = 0
        """The next `sequence_number`."""

    def note(self, event: dict[str, Any]) -> None:
        """Note the ids of an event."""
        for member in ("response", "item"):
            for name, value in (event.get(member) or {}).items():
                if name in {"id", "call_id"} and isinstance(value, str):
                    # The events of an item name it by the item's place.
                    known = self._first.setdefault(_place(member, name, event), value)
                    if known != value:
                        self._renamed[value] = known

    def delivered(self, event: dict[str, Any]) -> None:
        """Note an event of the first engine."""
        response = event.get("response")
        if isinstance(response, dict) and self._created is None:
            self._created = response.get("created_at")
        self._next = event.get("sequence_number", self._next) + 1

    def edit(self, event: dict[str, Any]) -> None:
        """Give an event of another engine the ids and numbers that follow the client's."""
        for name, value in event.items():
            event[name] = _renamed(value, self._renamed)
        response = event.get("response")
        if isinstance(response, dict) and "created_at" in response:
            response["created_at"] = self._created
        if "sequence_number" in event:
            event["sequence_number"] = self._next
            self._next += 1


def _place(member: str, name: str, event: Mapping[str, Any]) -> str:
    return f"{member}.{event.get('output_index')}.{name}"


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """A JSON value with other ids."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        return {name: _renamed(each, names) for name, each in value.items()}
    if isinstance(value, list):
        return [_renamed(each, names) for each in value]
    return value
