"""What another engine generates again, compared with what the client has of it.

    lane = Lane();  lane.add(parts)       what was delivered of one choice
    lane.cut(parts)                       the same from the next engine: equal parts are removed

A choice consists of texts (content, reasoning, a tool call's arguments …), of token ids where they
were asked for, and of entries of logprobs. Each is compared by itself and joined, since engines
divide it into events as they come. What is new follows everything that was delivered; a text that
differs, or one that is new before, is another answer, of which the client gets nothing.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from .errors import AnswerDiffers
from .event_shapes import check_chunk

_DATA: Final = b"data: "
_KEPT_EMPTY: Final = frozenset({"text", "content"})
"""Members that readers expect in each event, even without a text."""


class Part(NamedTuple):
    """A text of an event: `holder[name]`, part of what `key` names."""

    key: str
    holder: dict[str, Any]
    name: str


class Lane:
    """One choice, or the only sequence of an API without choices."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        """Key → what was delivered of this text."""
        self._ids: list[int] = []
        self._entries = 0
        """How many tokens' logprobs were, of tokens without ids."""

    def __bool__(self) -> bool:
        """Whether it has anything."""
        return bool(self._texts or self._ids or self._entries)

    def copy(self) -> "Lane":
        """The same, to be cut."""
        made = Lane()
        made._texts, made._ids = dict(self._texts), [*self._ids]
        made._entries = self._entries
        return made

    def add(self, choice: dict[str, Any], parts: list[Part]) -> None:
        """Note that `choice` is delivered, which has these parts."""
        for key, holder, name in parts:
            if text := holder[name]:
                self._texts[key] = self._texts.get(key, "") + text
        if ids := choice.get("token_ids"):
            self._ids += ids
        else:
            self._entries += _entry_count(choice)

    def set_tokens(self, key: str, text: str, ids: list[int], entries: int = 0) -> None:
        """The lane has these tokens, with the text that `key` names; `entries`: so many logprobs of
        tokens without ids."""
        if text:
            self._texts[key] = text
        self._ids += ids
        if not ids:
            self._entries += entries

    def cut(self, choice: dict[str, Any], parts: list[Part]) -> bool:
        """Remove from `choice` what was delivered; returns whether anything is left. Raises
        AnswerDiffers."""
        ids = choice.get("token_ids") or []
        known = min(len(ids), len(self._ids))
        is_same = ids[:known] == self._ids[:known]
        del self._ids[:known]
        is_new = len(ids) > known
        for part in parts:
            part_is_same, part_is_new = self._cut_text(part)
            is_same, is_new = is_same and part_is_same, is_new or part_is_new
        if 0 < len(ids) == known and is_new:
            # These tokens had no more text, and the last of them was not the last.
            is_same = False
        if known:
            choice["token_ids"] = ids[known:]
        delivered = known
        if not ids:
            count = _entry_count(choice)
            delivered = min(count, self._entries)
            self._entries -= delivered
            is_new = is_new or count > delivered
        if not is_same or (is_new and self):
            raise AnswerDiffers
        if is_new and delivered:
            for entries in _entry_lists(choice):
                del entries[:delivered]
        return is_new

    def _cut_text(self, part: Part) -> tuple[bool, bool]:
        """Whether the part is what was delivered, and whether some of it is new."""
        key, holder, name = part
        text = holder[name] or ""
        delivered = self._texts.pop(key, "")
        length = min(len(text), len(delivered))
        if delivered[length:]:
            self._texts[key] = delivered[length:]
        if length:
            holder[name] = text[length:]
            if length == len(text) and name not in _KEPT_EMPTY:
                del holder[name]
        return text[:length] == delivered[:length], len(text) > length


class Repeated:
    """The choices that the next engine generates again before it goes on."""

    def __init__(self, lanes: dict[int, Lane]) -> None:
        """`lanes`: index of a choice → what was delivered of it."""
        self._lanes = {index: lane.copy() for index, lane in lanes.items() if lane}

    def __bool__(self) -> bool:
        """Whether anything of it is still to come."""
        return bool(self._lanes)

    def rest(self, event: bytes) -> bytes:
        """The part of an event that is new to the client; nothing if it has all of it. Raises
        AnswerDiffers, or one of `whole_events.MALFORMED`."""
        data = event[len(_DATA) :]
        check_chunk(data)
        chunk = msgspec.json.decode(data)
        if not self.cut(chunk):
            return b""
        return b"%b%b\n\n" % (_DATA, msgspec.json.encode(chunk))

    def cut(self, chunk: dict[str, Any]) -> bool:
        """Remove from the choices of `chunk` what was delivered; returns whether any is left."""
        if not chunk["choices"]:
            raise AnswerDiffers
        chunk["choices"] = [choice for choice in chunk["choices"] if self._is_new(choice)]
        return bool(chunk["choices"])

    def cut_lane(self, index: int, choice: dict[str, Any], parts: list[Part]) -> bool:
        """The same of one choice, which has these parts."""
        lane = self._lanes.get(index)
        if lane is None:
            return True
        is_new = lane.cut(choice, parts)
        if not lane:
            del self._lanes[index]
        return is_new

    def _is_new(self, choice: dict[str, Any]) -> bool:
        if choice["index"] not in self._lanes:
            return True
        is_new = self.cut_lane(choice["index"], choice, choice_parts(choice))
        _remove_heads_of_calls(choice)
        return is_new


def choice_parts(choice: dict[str, Any]) -> list[Part]:
    """The texts of a choice of completions or a chat."""
    return list(_choice_parts(choice))


def _choice_parts(choice: dict[str, Any]) -> Iterator[Part]:
    if "text" in choice:
        yield Part("text", choice, "text")
    for name, value in (choice.get("delta") or {}).items():
        if isinstance(value, str):
            yield Part(name, choice["delta"], name)
        elif name == "tool_calls":
            for call in value or ():
                function = call.get("function") or {}
                for member in function.keys() & {"name", "arguments"}:
                    yield Part(f"tool_calls.{call.get('index')}.{member}", function, member)
    if choice.get("finish_reason"):
        yield Part("finish_reason", choice, "finish_reason")


def _remove_heads_of_calls(choice: dict[str, Any]) -> None:
    """Remove id and type of the tool calls whose name was delivered: the client knows another
    id."""
    delta = choice.get("delta") or {}
    if not delta.get("tool_calls"):
        return
    calls = []
    for call in delta["tool_calls"]:
        function = call.get("function") or {}
        if function.get("name"):
            calls.append(call)
        elif function.get("arguments"):
            calls.append({"index": call.get("index"), "function": function})
    delta["tool_calls"] = calls
    if not calls:
        del delta["tool_calls"]


def _entry_count(choice: dict[str, Any]) -> int:
    """Of how many tokens a choice has logprobs."""
    return max(map(len, _entry_lists(choice)), default=0)


def _entry_lists(choice: dict[str, Any]) -> list[list[Any]]:
    """The lists of the logprobs of a choice; each has an entry for each token."""
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, list):
        # Of the responses API.
        return [logprobs]
    return [value for value in (logprobs or {}).values() if isinstance(value, list)]
