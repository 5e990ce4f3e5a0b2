"""A scripted engine that parses its answer, and serves the paths of `--enable-scale-out`."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle
from typing import Any, Final

import msgspec

from ..peers import Turn
from .events import DONE, chat_event, role_event
from .scripted import PROMPT, Pause, dies

RENDER: Final = "/v1/chat/completions/render"
DERENDER: Final = "/v1/chat/completions/derender"
GENERATE: Final = "/inference/v1/generate"
_FIRST: Final = 100
ANSWER: Final = (
    *("<think>", "who", " asks", "?", "</think>", "The ", "lamp", " 灯台"),
    *("<call>", '{"ci', 'ty": "', 'Oslo"', "}", "</call>", "<end>"),
)
LENGTH: Final = len(ANSWER)
_MARKS: Final = {"<think>": "reasoning", "</think>": "content", "<call>": "arguments"}
Json = dict[str, Any]


@dataclass(frozen=True)
class ParsingEngine:
    """`after`: it dies after so many tokens, or with `pause` waits for that and goes on, unless its
    peer is gone by then; `joined`: tokens of its events, repeated; `refuses`: a path that it
    answers with `status`; `wrong`: one, and what it answers; `more`: sampling parameters that it
    adds to a request."""

    name: str
    after: int | None = None
    pause: Pause | None = None
    joined: Sequence[int] = (1,)
    refuses: str = ""
    status: int = 403
    wrong: tuple[str, bytes] = "", b""
    more: tuple[tuple[str, Any], ...] = ()

    async def __call__(self, turn: Turn) -> None:
        target, body = turn.request.target, turn.request.json
        if target == self.refuses:
            turn.answer(self.status, b'{"error": {"message": "disabled"}}')
        elif target == self.wrong[0]:
            turn.answer(200, self.wrong[1])
        elif target == RENDER:
            turn.answer(200, msgspec.json.encode(self._rendered(body)))
        elif target == DERENDER:
            turn.answer(200, msgspec.json.encode(self._derendered(body)))
        elif target == GENERATE:
            await self._send(turn, self.tokens(body))
        else:
            await self._send(turn, self._chat(body))

    async def _send(self, turn: Turn, events: list[bytes]) -> None:
        turn.stream()
        for event in events:
            turn.chunk(event)
        await turn.writer.drain()
        if events[-1] != DONE and self.pause is not None:
            await self.pause(turn)
            if turn.gone.is_set():
                return
            whole = replace(self, after=None)._chat(turn.request.json)
            for event in whole[len(events) :]:
                turn.chunk(event)
            turn.end()
        elif events[-1] == DONE:
            turn.end()
        else:
            dies(turn, b"")

    def _groups(self, most: int, start: int) -> list[range]:
        """The tokens of each event, from token `start` on."""
        length = min(LENGTH, start + most)
        ends = accumulate(cycle(self.joined), initial=start)
        groups, begin = [], next(ends)
        while begin < length:
            end = min(next(ends), length)
            groups.append(range(begin, end))
            begin = end
        return groups

    def _is_dead(self, group: range) -> bool:
        return self.after is not None and group.stop > self.after

    def _chat(self, body: Json) -> list[bytes]:
        made = [role_event(PROMPT, id=self.name)]
        groups = self._groups(body["max_tokens"], 0)
        for group in groups:
            if self._is_dead(group):
                return made
            finish = _finish(group, groups)
            delta = _delta(range(group.start), group, f"call-{self.name}")
            finish = "tool_calls" if finish == "stop" else finish
            ids = [_FIRST + n for n in group] if body.get("return_token_ids") else None
            made.append(chat_event(delta, ids, finish=finish, id=self.name))
        head = {"id": self.name, "object": "o", "created": 5, "model": "m", "choices": []}
        if body.get("stream_options"):
            usage = {"prompt_tokens": len(PROMPT), "completion_tokens": groups[-1].stop}
            usage["total_tokens"] = sum(usage.values())
            made.append(_event({**head, "usage": usage}))
        return [*made, DONE]

    def _rendered(self, body: Json) -> Json:
        sampling = {"temperature": 0.9, "max_tokens": body["max_tokens"]}
        sampling |= {"skip_special_tokens": False, **dict(self.more)}
        omitted = {"temperature": 1.0, "max_tokens": 16, "skip_special_tokens": True}
        return {
            "request_id": "chatcmpl-rendered",
            "token_ids": PROMPT,
            "features": None,
            # As vLLM does: without defaults.
            "sampling_params": {
                name: value for name, value in sampling.items() if omitted.get(name) != value
            },
            "model": body["model"],
            "stream": True,
            # vLLM writes the others as null.
            **dict.fromkeys(("cache_salt", "content_parts", "kv_transfer_params")),
        }

    def tokens(self, body: Json) -> list[bytes]:
        """The events that have the tokens."""
        start = len(body["token_ids"]) - len(PROMPT)
        assert body["token_ids"] == [*PROMPT, *(_FIRST + n for n in range(start))]
        assert body["stream"]
        made = []
        groups = self._groups(body["sampling_params"]["max_tokens"], start)
        for group in groups:
            if self._is_dead(group):
                return made
            ids, finish = [_FIRST + n for n in group], _finish(group, groups)
            choice = {"index": 0, "token_ids": ids, "finish_reason": finish, "stop_reason": None}
            made.append(_event({"request_id": "g", "usage": None, "choices": [choice]}))
        prompt, count = len(PROMPT) + start, groups[-1].stop - start
        usage = {"prompt_tokens": prompt, "completion_tokens": count}
        made.append(_event({"choices": [], "usage": {**usage, "total_tokens": prompt + count}}))
        return [*made, DONE]

    def _derendered(self, body: Json) -> Json:
        [choice], state = body["generate_chunk"]["choices"], body["stream_state"]
        ids = state["output_token_ids"]
        assert body["prompt_token_ids"] == PROMPT
        assert body["chat_request"]["messages"]
        assert ids == [_FIRST + n for n in range(len(ids))]
        assert sum(state["output_chunk_lens"]) == len(ids)
        new = choice["token_ids"]
        assert new == [_FIRST + len(ids) + n for n in range(len(new))]
        known = state["last_tool_call_ids"]
        read = range(len(ids), len(ids) + len(new))
        delta = _delta(range(len(ids)), read, known[0] if known else f"call-{self.name}")
        for call in delta.get("tool_calls", ()):
            call["function"].setdefault("name", None)
        # As vLLM does, whatever ended the answer.
        calls = state["tools_streamed"] or "tool_calls" in delta
        finish = choice["finish_reason"] and ("tool_calls" if calls else choice["finish_reason"])
        made = {"index": 0, "delta": {"role": None, "content": None, **delta}}
        named = [call["id"] for call in delta.get("tool_calls", ()) if "id" in call]
        lens = [*state["output_chunk_lens"], len(new)] if new else state["output_chunk_lens"]
        return {
            "chunk": {"id": "g", "choices": [{**made, "finish_reason": finish}]},
            "stream_state": {
                **state,
                "output_token_ids": [*ids, *new],
                "output_chunk_lens": lens,
                "tools_streamed": calls,
                "last_tool_call_ids": known or named,
            },
        }


class FailsWhile:
    """An engine that does not answer requests for `path`, and ends its tokens when it got one."""

    def __init__(self, path: str, *, dies: bool = False) -> None:
        self._path, self._dies, self.asked = path, dies, asyncio.Event()
        self.is_left = asyncio.Event()
        """Set when the request for `path` is aborted."""

    async def __call__(self, turn: Turn) -> None:
        if turn.request.target == self._path:
            self.asked.set()
            await turn.gone.wait()
            self.is_left.set()
        elif turn.request.target == GENERATE and self._dies:
            turn.stream()
            [first, *_] = ParsingEngine("other").tokens(turn.request.json)
            turn.chunk(first)
            await self.asked.wait()
            turn.die()
        else:
            await ParsingEngine("other")(turn)


def _finish(group: range, groups: list[range]) -> str | None:
    if group is not groups[-1]:
        return None
    return "stop" if group.stop == LENGTH else "length"


def _delta(before: range, new: range, call_id: str) -> Json:
    """What the parser says of the new tokens. Only it knows which text each is of."""
    place, delta = "content", Json()
    for number in [*before, *new]:
        token = ANSWER[number]
        is_new = number in new
        if token in _MARKS:
            place = _MARKS[token]
            if place == "arguments" and is_new:
                function = {"name": "weather", "arguments": ""}
                call = {"index": 0, "id": call_id, "type": "function", "function": function}
                delta["tool_calls"] = [call]
        elif token == "<end>" and is_new:
            # The engine's own parser gets no text of the token that ends the answer.
            delta["content"] = delta.get("content", "") if place == "arguments" else token
            delta = {name: value for name, value in delta.items() if value}
        elif token != "</call>" and is_new:
            if place == "arguments":
                call = delta.setdefault("tool_calls", [{"index": 0, "function": {"arguments": ""}}])
                call[0]["function"]["arguments"] += token
            else:
                delta[place] = delta.get(place, "") + token
    return delta


def _event(value: Json) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
