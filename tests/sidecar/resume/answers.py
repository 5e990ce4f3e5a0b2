"""The streams of an engine of every API, and what a client reads in one.

The answer depends on what is asked for: tools are called, a prompt that says `think` is reasoned
about. Ids and times are the engine's own, and so is how it divides the answer into events.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from tandem_contract.request_kinds import RequestKind

from .events import DONE

PROMPT = [1, 2, 3]
TOOL = {"type": "function", "function": {"name": "weather"}}
_FIRST = 100
"""Id of an answer's first token."""
TEXT = ("The ", "lamp", " 灯台", " is", " lit", ".")
_REASONING = ("who", " asks", "?")
_ARGUMENTS = ('{"ci', 'ty":', ' "Os', 'lo"}')
Json = dict[str, Any]
Field = tuple[str, str]
"""Name of a text, and a part of it."""


@dataclass(frozen=True)
class Engine:
    """`joined`: tokens of its events, repeated; `other`: it answers something else from this token
    on; `parses`: it reads the reasoning itself; `silent`: this token has its text in the
    next; `calls`: it calls a tool even where none is named."""

    name: str
    joined: Sequence[int] = (1,)
    other: int | None = None
    parses: bool = True
    silent: int | None = None
    calls: bool = False

    def answer(self, kind: RequestKind, data: bytes) -> list[bytes]:
        """The events of the answer to a request."""
        body = json.loads(data)
        if kind in {RequestKind.COMPLETIONS, RequestKind.CHAT}:
            return [*self._chunks(kind, body), DONE]
        events = self._messages(body) if kind is RequestKind.MESSAGES else self._responses(body)
        return [
            f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events
        ]

    def _tokens(self, body: Json) -> list[Field]:
        """The answer's tokens: in which text each is."""
        tokens = [("content", part) for part in TEXT]
        if self.parses and "think" in json.dumps(body):
            tokens = [*(("reasoning", part) for part in _REASONING), *tokens]
        if body.get("tools") or self.calls:
            tokens[-1:] = (("arguments", part) for part in _ARGUMENTS)
        if self.other is not None:
            name, _ = tokens[self.other]
            tokens[self.other] = name, "other"
        if self.silent is not None:
            (name, first), (_, second) = tokens[self.silent : self.silent + 2]
            tokens[self.silent : self.silent + 2] = (name, ""), (name, first + second)
        return tokens

    def _joined(self, tokens: Sequence[Field]) -> Iterator[list[Field]]:
        """Tokens that one event has."""
        left = [*tokens]
        for size in cycle(self.joined):
            part, left = left[:size], left[size:]
            if not part:
                return
            yield part

    def _chunks(self, kind: RequestKind, body: Json) -> Iterator[bytes]:  # noqa: C901
        is_chat = kind is RequestKind.CHAT
        head = {"id": f"id-{self.name}", "object": "o", "created": len(self.name), "model": "m"}
        prompt, count = _prompt(body)
        tokens, start = self._tokens(body), len(prompt) - len(PROMPT)
        asks = body.get("return_token_ids")
        if is_chat:
            for index in range(count):
                choice = _choice(index, {"delta": {"role": "assistant", "content": ""}})
                yield _event(head, [choice], **({"prompt_token_ids": prompt} if asks else {}))
        place = start
        for part in self._joined(tokens[start:]):
            texts = _texts(part)
            called = any(name == "arguments" for name, _ in tokens[start:place])
            more: Json = {"text": "".join(texts.values())}
            if is_chat:
                more = {"delta": _delta(texts, self.name, called=called)}
            if asks:
                more["token_ids"] = [_FIRST + place + n for n in range(len(part))]
                if not is_chat:
                    more["prompt_token_ids"] = prompt if place == start else None
            if is_chat and not any(texts.values()):
                if not (asks or body.get("logprobs")):
                    place += len(part)
                    continue
                more["delta"] = {}
            place += len(part)
            if body.get("logprobs"):
                more["logprobs"] = {"content": [{"token": text} for _, text in part]}
            if place == len(tokens):
                more["finish_reason"] = "stop"
            for index in range(count):
                yield _event(head, [_choice(index, more)])
        if (body.get("stream_options") or {}).get("include_usage"):
            made = (len(tokens) - start) * count
            usage = {"prompt_tokens": len(prompt), "completion_tokens": made}
            usage["total_tokens"] = sum(usage.values())
            yield _event(head, [], usage=usage)

    def _messages(self, body: Json) -> Iterator[Json]:
        yield {"type": "message_start", "message": {"id": f"m-{self.name}", "content": []}}
        names = {"content": "text", "reasoning": "thinking", "arguments": "partial_json"}
        index, current = -1, ""
        for part in self._joined(self._tokens(body)):
            for name, text in part:
                if name != current:
                    if current:
                        yield from self._stop_block(index, current)
                    index, current = index + 1, name
                    block: Json = {"type": name, names[name]: ""}
                    if name == "arguments":
                        block = {"type": "tool_use", "id": f"t-{self.name}", "name": "weather"}
                    yield {"type": "content_block_start", "index": index, "content_block": block}
                delta = {"type": f"{name}_delta", names[name]: text}
                yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield from self._stop_block(index, current)
        usage = {"output_tokens": 9}
        yield {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}
        yield {"type": "message_stop"}

    def _stop_block(self, index: int, name: str) -> Iterator[Json]:
        if name == "reasoning":
            delta = {"type": "signature_delta", "signature": f"s-{self.name}"}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}

    def _responses(self, body: Json) -> Iterator[Json]:
        for number, event in enumerate(self._response_events(body)):
            yield {**event, "sequence_number": number}

    def _response_events(self, body: Json) -> Iterator[Json]:
        response = {"id": f"resp-{self.name}", "created_at": len(self.name)}
        yield {"type": "response.created", "response": response}
        yield {"type": "response.in_progress", "response": response}
        index, current, whole, items = -1, "", "", []
        for part in [*self._joined(self._tokens(body)), [("", "")]]:
            for name, text in _texts(part).items():
                item = {"id": f"{current}-{self.name}", "type": current}
                if name != current:
                    if current:
                        at: Json = {"output_index": index, "item_id": item["id"]}
                        yield {"type": f"response.{current}.done", "text": whole, **at}
                        yield {"type": "response.output_item.done", "item": item, **at}
                        items.append(item)
                    if not name:
                        break
                    index, current, whole = index + 1, name, ""
                    item = {"id": f"{name}-{self.name}", "type": name}
                    if name == "arguments":
                        item |= {"call_id": f"call-{self.name}", "name": "weather"}
                    added = {"output_index": index, "item": item}
                    yield {"type": "response.output_item.added", **added}
                whole += text
                at = {"output_index": index, "item_id": item["id"]}
                yield {"type": f"response.{name}.delta", "delta": text, **at}
        yield {"type": "response.completed", "response": {**response, "output": items}}


def _prompt(body: Json) -> tuple[list[int], int]:
    """Ids of the prompt, and how many choices are asked for."""
    count = body.get("n") or 1
    if "messages" in body:
        return (body.get("kv_transfer_params") or {}).get("prompt_token_ids") or PROMPT, count
    named = body["prompt"]
    if isinstance(named, list) and isinstance(named[0], int):
        # A longer one is not continued.
        return (named if named[: len(PROMPT)] == PROMPT else PROMPT), count
    return PROMPT, count * len(named) if isinstance(named, list) else count


def _texts(part: list[Field]) -> dict[str, str]:
    """The texts of an event, joined."""
    texts: dict[str, str] = {}
    for name, text in part:
        texts[name] = texts.get(name, "") + text
    return texts


def _delta(texts: dict[str, str], engine: str, *, called: bool) -> Json:
    delta: Json = {name: text for name, text in texts.items() if name != "arguments"}
    if "arguments" in texts:
        call: Json = {"index": 0, "function": {"arguments": texts["arguments"]}}
        if not called:
            call |= {"id": f"call-{engine}", "type": "function"}
            call["function"]["name"] = "weather"
        delta["tool_calls"] = [call]
    return delta


def _choice(index: int, more: Json) -> Json:
    return {"index": index, "logprobs": None, "finish_reason": None, **more}


def _event(head: Json, choices: list[Json], **more: Any) -> bytes:
    # Without spaces, as engines write it.
    data = json.dumps({**head, "choices": choices, **more}, separators=(",", ":"))
    return f"data: {data}\n\n".encode()


def read(events: Sequence[bytes]) -> Json:
    """What a client reads in a stream: its texts, joined, and all that it has once."""
    texts: dict[str, str] = defaultdict(str)
    lists: dict[str, list[Any]] = defaultdict(list)
    for event in b"".join(events).decode().split("\n\n")[:-1]:
        data = event.rpartition("data: ")[2]
        if data == "[DONE]":
            lists["ends"].append(data)
            continue
        value = json.loads(data)
        if "choices" in value:
            _read_chunk(value, texts, lists)
        else:
            _read_typed(value, texts, lists)
    return {**texts, **lists}


def _read_chunk(chunk: Json, texts: dict[str, str], lists: dict[str, list[Any]]) -> None:
    lists["heads"] = sorted({*lists["heads"], (chunk["id"], chunk["created"])})
    if not chunk["choices"]:
        lists["usage"].append(chunk["usage"])
    for choice in chunk["choices"]:
        at = choice["index"]
        texts[f"{at} text"] += choice.get("text") or ""
        delta = dict(choice.get("delta") or {})
        for call in delta.pop("tool_calls", ()):
            texts[f"{at} arguments"] += call["function"].get("arguments") or ""
            head = [call.get("id"), call.get("type"), call["function"].get("name")]
            lists[f"{at} calls"] += [each for each in head if each]
        for name, text in delta.items():
            texts[f"{at} {name}"] += text or ""
        lists[f"{at} ids"] += choice.get("token_ids") or []
        lists[f"{at} entries"] += (choice["logprobs"] or {}).get("content", [])
        if choice["finish_reason"]:
            lists[f"{at} ends"].append(choice["finish_reason"])


def _read_typed(event: Json, texts: dict[str, str], lists: dict[str, list[Any]]) -> None:
    delta: Any = event.get("delta")
    number = event.pop("sequence_number", None)
    if number is not None:
        # They have no gap.
        assert number == len(lists["numbers"])
        lists["numbers"].append(number)
    if event["type"] == "content_block_delta":
        place = f"{event['index']} {delta['type']}"
        lists[f"blocks of {delta['type']}"] = [event["index"]]
        texts[place] += next(text for name, text in delta.items() if name != "type")
    elif isinstance(delta, str):
        texts[f"{event['type']} {event['output_index']} {event['item_id']}"] += delta
    else:
        lists["events"].append(event)


def comparable(answer: Json) -> Json:
    """The answer as it is by each engine and each division into events. What began at one engine
    has its ids to the end, or else its texts are in pieces here."""
    names = json.dumps({name: value for name, value in answer.items() if name != "numbers"})
    for begun in ("id", "m", "resp"):
        assert f'"{begun}-other"' not in names
    made: Json = json.loads(names.replace('-other"', '-first"'))
    return made
