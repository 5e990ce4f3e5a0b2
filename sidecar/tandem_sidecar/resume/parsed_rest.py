"""The rest of a chat whose engine reads reasoning or tool calls from the answer.

    rest.generation(rendered)      the request for the tokens, by what the engine makes of the chat
    rest.take(payload)             notes the tokens that it sends
    rest.next_parse()              the request that has them parsed, after all that were delivered
    rest.events(parsed)            the client's events of the answer to that
    rest.end()                     those after the last token

A parser's state is not known by ids, but vLLM's derender endpoint makes it anew for each call: it
reads all earlier tokens, as they were parsed together, and returns what the new ones add
(vLLM 0.32, `renderers/online_derenderer.py`). That is what the first engine's parser would have
said of them. The tokens of each event are parsed by themselves, though more have come: some parsers
say something else of tokens that they get together.

Two things of that endpoint are not as in a chat, and are set right here: it writes the text of
the token that ended the answer, and it calls every end of an answer with a call `tool_calls`.

Pure.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw

from ..bodies.parse import Body
from .errors import StreamBroken
from .event_shapes import (
    check_chunk,
    read_delta,
    read_parsed,
    read_rendered,
    read_state,
    read_tokens,
)
from .ledger import DONE, Ledger
from .whole_events import WholeEvents

_DATA: Final = b"data: "
_STOPPED: Final = "stop"
_FAILED: Final = frozenset({"abort", "error"})

_DEPENDS_ON_IDS: Final[Mapping[str, tuple[Any, ...] | None]] = {
    "allowed_token_ids": None,
    "bad_words": ([],),
    "detokenize": None,
    "frequency_penalty": (0,),
    "ignore_eos": None,
    "include_stop_str_in_output": (False,),
    "logit_bias": None,
    "max_tokens": None,
    "min_p": None,
    "min_tokens": None,
    "n": (1,),
    "output_kind": None,
    "presence_penalty": (0,),
    "repetition_penalty": None,
    "skip_clone": None,
    "skip_reading_prefix_cache": None,
    # The derender endpoint writes special tokens, whatever the request says.
    "skip_special_tokens": (False,),
    "spaces_between_special_tokens": None,
    "stop": ([],),
    "stop_token_ids": None,
    "temperature": None,
    "top_k": None,
    "top_p": None,
}
"""Sampling parameters with which the next token depends only on the ids before it → values for
which that holds; None: all."""

_DEFAULTS: Final[Mapping[str, Raw]] = {
    "max_tokens": Raw(b"16"),
    "min_tokens": Raw(b"0"),
    "skip_special_tokens": Raw(b"true"),
}
"""Of vLLM's SamplingParams, which are written without those that have their default. The defaults
of the others are among the values above."""


class _Tokens(NamedTuple):
    """The tokens of one event of the engine."""

    ids: list[int]
    finish: str | None
    stop: int | str | None


_NONE: Final = _Tokens([], None, None)


class NotContinued(Exception):
    """The next engine cannot go on by ids; the message says why."""


class ParsedRest:
    """What is left of one stream, at the next engine."""

    def __init__(self, asked: Body, ledger: Ledger, *, usage: bool, continuous: bool) -> None:
        """`asked`: the chat; `ledger`: what its client has; `usage`: it gets one at the end;
        `continuous`: and in each event."""
        self._chat = Raw(asked.data)
        self._model = asked.members.get("model", Raw(b"null"))
        self._prompt, self._before = ledger.prompt_ids.tolist(), ledger.ids.tolist()
        self._head = msgspec.structs.asdict(ledger.first)
        self._usage, self._continuous = usage, continuous
        self._state: Any = {
            "output_token_ids": self._before,
            "output_chunk_lens": ledger.groups(),
            "role_sent": True,
            "tools_streamed": bool(ledger.call_ids),
            "last_tool_call_ids": ledger.call_ids,
        }
        self._events = WholeEvents()
        self._left: deque[_Tokens] = deque()
        """Those that are not parsed yet."""
        self._parsing = _NONE
        """Those that are being parsed."""
        self._count = 0
        """How many tokens were parsed."""
        self._has_finish = False
        """Whether the engine told a finish reason."""
        self._cached = 0
        """How many tokens of its prompt the engine had computed before."""
        self.is_whole = False
        """Whether the engine sent its last event."""
        self.prepared: bytes | None = None
        """The body of the request for the tokens; None: the engine is to be asked first."""

    def generation(self, rendered: bytes) -> bytes:
        """The body of the request for the tokens, as `generation_request`."""
        return generation_request(rendered, self._prompt, self._before)

    def take(self, payload: bytes) -> None:
        """Note what the engine sends. Raises StreamBroken."""
        self._events.take(payload, self._read)

    def next_parse(self) -> bytes | None:
        """The body of the request that has all new tokens parsed; None: there are none."""
        if self._parsing is not _NONE or not self._left:
            return None
        self._parsing = tokens = self._left.popleft()
        # The token that ends an answer has no text.
        read = tokens.ids[:-1] if tokens.finish == _STOPPED else tokens.ids
        choice = {
            "index": 0,
            "token_ids": read,
            "finish_reason": tokens.finish,
            "stop_reason": tokens.stop,
        }
        body = {
            "stream": True,
            "model": self._model,
            "generate_chunk": {"request_id": "rest", "choices": [choice]},
            "stream_state": self._state,
            "prompt_token_ids": self._prompt,
            "chat_request": self._chat,
        }
        return msgspec.json.encode(body)

    def events(self, parsed: bytes) -> bytes:
        """The client's event, with the tokens of the last `next_parse`. Raises one of
        `whole_events.MALFORMED`."""
        tokens, self._parsing = self._parsing, _NONE
        answer = read_parsed(parsed)
        check_chunk(answer.chunk)
        [choice] = read_delta(answer.chunk).choices
        state = read_state(answer.stream_state)
        self._state = answer.stream_state
        self._count += len(tokens.ids)
        made: dict[str, Any] = {
            "index": 0,
            "delta": _without_nulls(choice.delta),
            "logprobs": None,
            "finish_reason": None,
        }
        if tokens.finish is not None:
            calls = state.tools_streamed and tokens.finish == _STOPPED
            made["finish_reason"] = "tool_calls" if calls else tokens.finish
            made["stop_reason"] = tokens.stop
        made["token_ids"] = tokens.ids
        event = {**self._head, "choices": [made]}
        if self._continuous:
            event["usage"] = self._counts()
        return b"%b%b\n\n" % (_DATA, msgspec.json.encode(event))

    def end(self) -> bytes | None:
        """The events after the last token; None: some are still to come."""
        if not self.is_whole or self._left or self._parsing is not _NONE:
            return None
        if not self._usage:
            return DONE
        usage = self._counts()
        if self._cached:
            cached = min(self._cached, len(self._prompt))
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        event = {**self._head, "choices": [], "usage": usage}
        return b"%b%b\n\n%b" % (_DATA, msgspec.json.encode(event), DONE)

    def _read(self, event: bytes) -> bytes:
        """Note one event of the engine."""
        if event == DONE:
            if not self._has_finish:
                raise StreamBroken("the stream ended without a finish reason")
            self.is_whole = True
        elif event.startswith(_DATA):
            chunk = read_tokens(event[len(_DATA) :])
            if chunk.choices is None:
                raise StreamBroken("the engine reported an error")
            for choice in chunk.choices:
                finish = choice.finish_reason
                if finish in _FAILED:
                    raise StreamBroken("the engine ended the request")
                self._has_finish = self._has_finish or finish is not None
                self._left.append(_Tokens(choice.token_ids or [], finish, choice.stop_reason))
            if chunk.usage is not None:
                details = chunk.usage.prompt_tokens_details
                self._cached = 0 if details is None else details.cached_tokens or 0
        return b""

    def _counts(self) -> dict[str, Any]:
        prompt, tokens = len(self._prompt), len(self._before) + self._count
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + tokens,
            "completion_tokens": tokens,
        }


def generation_request(rendered: bytes, prompt: list[int], done: list[int]) -> bytes:
    """The body of the request for the tokens that are left after `done`; `rendered`: what the
    engine makes of the chat, whose prompt was `prompt`. Raises NotContinued, or one of
    `whole_events.MALFORMED`."""
    request, chat = _object.decode(rendered), read_rendered(rendered)
    sampling = {**_DEFAULTS, **_object.decode(chat.sampling_params)}
    if chat.token_ids != prompt:
        raise NotContinued("the engine renders another prompt")
    if chat.features is not None:
        raise NotContinued("messages with media are not continued")
    for name, raw in sampling.items():
        value, allowed = msgspec.json.decode(raw), _DEPENDS_ON_IDS.get(name, ())
        if value is not None and allowed is not None and value not in allowed:
            raise NotContinued(f"{name} is not continued")
    left = msgspec.json.decode(sampling["max_tokens"], type=int) - len(done)
    if left <= 0:
        raise NotContinued("all tokens were sent")
    least = msgspec.json.decode(sampling["min_tokens"], type=int)
    changes = {"max_tokens": left, "min_tokens": max(0, least - len(done))}
    changed = {
        "token_ids": prompt + done,
        "sampling_params": {**sampling, **changes},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    # An id of its own, since one engine may get both requests.
    kept = {name: raw for name, raw in request.items() if name not in _OF_THE_CHAT}
    return msgspec.json.encode({**kept, **changed})


_OF_THE_CHAT: Final = frozenset({"request_id", "token_offsets", "features", "reasoning_ended"})


def _without_nulls(value: Any) -> Any:
    """The value without members that are null, as a chat's events have it."""
    if isinstance(value, dict):
        return {name: _without_nulls(v) for name, v in value.items() if v not in (None, [])}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


_object: Final = msgspec.json.Decoder(dict[str, Raw])
