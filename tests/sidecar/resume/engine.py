"""The streams of an engine that divides text, holds it back and stops as vLLM does.

Its answer to every prompt is the same. Its next token follows from the last one of the prompt; if
that is within a character, it writes what no answer has: LEAK.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final

from .events import DONE, chat_event, event, role_event, usage_event

PROMPT: Final = (1, 2, 3)
LEAK: Final = "the prompt"
_FIRST: Final = 100
"""Id of the answer's first token."""


@dataclass
class _Step:
    ids: list[int]
    text: str
    token: str
    finish: str | None = None
    stop: str | None = None


@dataclass(frozen=True)
class Engine:
    """`sizes`: bytes of its tokens, repeated; `joined`: tokens of its events, repeated."""

    text: str
    sizes: Sequence[int] = (1,)
    joined: Sequence[int] = (1,)

    @property
    def tokens(self) -> list[bytes]:
        """The bytes of the answer's tokens."""
        data, made = self.text.encode(), []
        for size in cycle(self.sizes):
            if not data:
                return made
            made.append(data[:size])
            data = data[size:]
        raise AssertionError

    def answer(self, body: dict[str, Any]) -> list[bytes]:
        """The events of the answer to a request for a stream with ids."""
        is_chat = "messages" in body
        given = body.get("kv_transfer_params", {}).get("prompt_token_ids")
        prompt = given or (list(PROMPT) if is_chat else body["prompt"])
        start = len(prompt) - len(PROMPT)
        assert prompt == [*PROMPT, *range(_FIRST, _FIRST + start)]
        steps, made, offset = list(self._steps(body, start)), [], 0
        count, id = len(steps), f"cmpl-{start}"
        for size in cycle(self.joined):
            if not steps:
                break
            part, steps = steps[:size], steps[size:]
            offsets = []
            for step in part:
                offsets.append(offset)
                offset += len(step.token)
            names = {"text_offset": offsets, "tokens": [step.token for step in part]}
            numbers = {"token_logprobs": offsets, "top_logprobs": offsets}
            text, ids = "".join(step.text for step in part), [i for step in part for i in step.ids]
            ends: dict[str, Any] = {"finish": part[-1].finish, "stop": part[-1].stop, "id": id}
            if is_chat:
                entries = [{"token": step.token} for step in part]
                logprobs = {"content": entries} if "logprobs" in body else None
                made.append(chat_event(text, ids, logprobs=logprobs, **ends))
            else:
                lists = names | numbers if "logprobs" in body else None
                first = None if made else prompt
                made.append(event(text, ids, first, logprobs=lists, **ends))
        role = [role_event(prompt, id=id)] if is_chat else []
        return [*role, *made, usage_event(len(prompt), count, id=id), DONE]

    def _steps(self, body: dict[str, Any], start: int) -> Iterator[_Step]:
        tokens, stops = self.tokens, body.get("stop", [])
        included = body.get("include_stop_str_in_output", False)
        held_back = 0 if included or not stops else max(map(len, stops)) - 1
        text, sent, unfinished = "", 0, b""
        if _decoded(b"".join(tokens[:start])) is None:
            text = LEAK
        for number in range(body["max_tokens"]):
            unfinished += tokens[start + number]
            new = _decoded(unfinished)
            unfinished = unfinished if new is None else b""
            text += new or ""
            found = None
            if new and number >= body.get("min_tokens", 0):
                found = _first_stop(text, len(new), stops)
            if found is not None:
                end, stop = found
                text = text[: end if included else end - len(stop)]
            is_last = found is not None or number == body["max_tokens"] - 1
            length = len(text) if is_last else max(sent, len(text) - held_back)
            step = _Step([_FIRST + start + number], text[sent:length], new or "")
            sent = length
            if is_last:
                step.finish, step.stop = ("stop", found[1]) if found else ("length", None)
            yield step
            if is_last:
                return


def _decoded(data: bytes) -> str | None:
    """None: the bytes end within a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _first_stop(text: str, new: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """End and text of the stop string that ends first in the `new` last characters."""
    ends = [
        (place + len(stop), stop)
        for stop in stops
        if (place := text.find(stop, max(0, len(text) + 1 - new - len(stop)))) >= 0
    ]
    return min(ends, default=None)
