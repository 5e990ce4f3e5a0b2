"""A scripted engine whose streams fail in every way, and how to compare what its client gets."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from ..peers import Script, Turn
from .events import DONE, chat_event, event, role_event, usage_event

PROMPT = [100 + number for number in range(100)]
"""Long enough to be split."""
TOKENS = 8
ERROR = b'data: {"error":{"message":"the core died","code":500}}\n\n'
End = Callable[[Turn, bytes], None]
"""Sends the last event, and ends in some way."""
Pause = Callable[[Turn], Awaitable[None]]
"""Returns when the engine is to go on."""


def dies(turn: Turn, last: bytes) -> None:
    turn.chunk(last)
    turn.die()


def reports_an_error(turn: Turn, last: bytes) -> None:
    turn.chunk(last)
    turn.chunk(ERROR)
    turn.chunk(DONE)
    turn.end()


def reports_an_error_at_once(turn: Turn, last: bytes) -> None:
    turn.chunk(last + ERROR + DONE)
    turn.end()


def aborts(turn: Turn, last: bytes) -> None:
    turn.chunk(last)
    turn.chunk(event("", [], finish="abort"))
    turn.chunk(DONE)
    turn.end()


def reports_a_finish_of_errors(turn: Turn, last: bytes) -> None:
    turn.chunk(last)
    turn.chunk(event("", [], finish="error"))
    turn.chunk(DONE)
    turn.end()


def says_that_it_is_done(turn: Turn, last: bytes) -> None:
    """Without a finish reason."""
    turn.chunk(last)
    turn.chunk(DONE)
    turn.end()


def breaks_within_an_event(turn: Turn, last: bytes) -> None:
    turn.chunk(last + event("lost", [1])[:40])
    turn.die()


def ends_too_early(turn: Turn, last: bytes) -> None:
    turn.chunk(last)
    turn.end()


ENDS = [
    dies,
    reports_an_error,
    reports_an_error_at_once,
    aborts,
    reports_a_finish_of_errors,
    says_that_it_is_done,
    breaks_within_an_event,
    ends_too_early,
]


async def until_gone(turn: Turn) -> None:
    """Generate no more."""
    await turn.gone.wait()


def answer_of(body: dict[str, Any], *, id: str = "cmpl-a") -> list[bytes]:
    """The events of an answer. Each token follows from the one before it; every third one has no
    text: it is the beginning of the next one's character."""
    prompt, asked = prompt_of(body), body.get("return_token_ids")
    last, wanted, pending = prompt[-1], body["max_tokens"], ""
    is_chat = "messages" in body
    made = []
    if is_chat:
        made.append(role_event(prompt if asked else None, id=id, created=len(id)))
    for number in range(wanted):
        last = (last * 7 + 3) % 1000
        pending += f"<{last}>"
        is_last = number == wanted - 1
        text = pending if last % 3 or is_last else ""
        pending = "" if text else pending
        ids, first = ([last], prompt if number == 0 else None) if asked else (None, None)
        finish = "length" if is_last else None
        head: dict[str, Any] = {"id": id, "created": len(id)}
        made.append(_event(text, ids, first, is_chat=is_chat, finish=finish, **head))
    if (body.get("stream_options") or {}).get("include_usage"):
        made.append(usage_event(len(prompt), wanted, id=id))
    return [*made, DONE]


def generates(
    after: int | None = None,
    end: End = dies,
    *,
    id: str = "cmpl-a",
    pause: Pause | None = None,
    pace: float = 0.0,
) -> Script:
    """An engine that sends `answer_of`; after so many tokens it ends as `end` does, or with `pause`
    waits for that and goes on, unless its peer is gone by then. `pace`: seconds for each event."""

    async def script(turn: Turn) -> None:
        body = turn.request.json
        events = answer_of(body, id=id)
        start = 1 if "messages" in body else 0

        async def send(some: list[bytes]) -> None:
            for each in some:
                if pace:
                    await asyncio.sleep(pace)
                turn.chunk(each)

        turn.stream()
        await send(events[:start])
        if after is not None and after <= body["max_tokens"]:
            *tokens, last = events[start : start + after] or [b""]
            start += after
            await send(tokens)
            if not await _goes_on(turn, last, end, pause):
                return
        await send(events[start:])
        turn.end()

    return script


async def _goes_on(turn: Turn, unsent: bytes, end: End, pause: Pause | None) -> bool:
    """End as `end` does; or pause, and return whether the peer still waits for the rest."""
    await turn.writer.drain()
    if pause is None:
        end(turn, unsent)
        return False
    if unsent:
        turn.chunk(unsent)
    await pause(turn)
    return not turn.gone.is_set()


def _event(
    text: str, ids: list[int] | None, first: list[int] | None, *, is_chat: bool, **more: Any
) -> bytes:
    return chat_event(text, ids, **more) if is_chat else event(text, ids, first, **more)


def prompt_of(body: dict[str, Any]) -> list[int]:
    """The ids that an engine reads; messages are rendered to PROMPT."""
    if "prompt" in body:
        ids: list[int] = body["prompt"]
    else:
        ids = (body.get("kv_transfer_params") or {}).get("prompt_token_ids") or PROMPT
    return ids


def asked(*, is_chat: bool = False, **more: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": PROMPT}
    options = {"include_usage": True}
    body = {"model": "m", **prompt, "max_tokens": TOKENS, "stream": True}
    return {**body, "stream_options": options, **more}


def without_head(stream: list[Any]) -> list[Any]:
    """The events without id and time, which are those of the engine that sent the first."""
    assert len({(each["id"], each["created"]) for each in stream[:-1]}) == 1
    return [{**each, "id": "", "created": 0} for each in stream]


def events(stream: bytes) -> list[Any]:
    """The JSON of the events of a stream, which is complete."""
    *whole, rest = stream.decode().split("\n\n")
    assert not rest
    data = [text.removeprefix("data: ") for text in whole]
    return [json.loads(text) for text in data if text != "[DONE]"]


def text_of(stream: bytes) -> str:
    """The text of a stream, which engines may divide into events in different ways."""
    choices = [choice for each in events(stream) for choice in each.get("choices", ())]
    return "".join((each.get("delta") or {}).get("content") or "" for each in choices)
