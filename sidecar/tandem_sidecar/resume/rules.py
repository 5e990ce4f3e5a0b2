"""How another engine goes on with a stream: a table of the fields that a request may have.

It continues the stream by token ids where that is exact; otherwise it generates the whole answer
again, where that gives the same one; otherwise the stream ends with an error.

A continued request is a new prompt: the old one and the delivered tokens, as ids. That is exact
where the next token depends only on the ids before it and on the field's value, or on a count that
can be reduced (max_tokens). A field that is not in the table is not known to be so, and prevents a
continuation: no token may be repeated, lost or wrong.

A token that is sampled without a seed is drawn anew from the distribution that the first engine
would have drawn it from, so that is exact as well.

An answer that is generated again is the other engine's own, for the same request: that serves every
field but those whose effect is not to be had twice. What was delivered is compared, and is the same
where tokens are not drawn, or are drawn by a seed.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

import msgspec

from tandem_contract.request_kinds import RequestKind

from ..bodies.edit import can_reuse_token_ids
from ..bodies.parse import UNREADABLE, Members

_NULL: Final = msgspec.Raw(b"null")
_FALSE: Final = msgspec.Raw(b"false")
_OFF: Final = (b"null", b"false")
_NO_TOOLS: Final = (b"null", b"[]")
_tools: Final = msgspec.json.Decoder(list[dict[str, Any]] | None)


class Method(StrEnum):
    """How another engine goes on."""

    CONTINUED = "continued"
    """By token ids, with tokens that follow those delivered."""
    PARSED = "parsed"
    """By token ids, which the engine parses in requests of their own, if its server offers that;
    otherwise as `AGAIN`."""
    AGAIN = "again"
    """It generates the answer again; only greedily, or with a seed."""
    NO = "no"


ANY: Final = object()
"""Whatever value the field has."""
_NOT_OF_CHATS: Final = frozenset({"best_of", "prompt"})

_COMPLETIONS: Final[Mapping[str, tuple[Any, ...] | object]] = {
    "add_special_tokens": ANY,
    "allowed_token_ids": ANY,
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": ANY,
    "echo": (False,),
    # Counts only the tokens of the answer, of which the new engine takes the first for a prompt's.
    "frequency_penalty": (0,),
    "ignore_eos": ANY,
    "include_stop_str_in_output": ANY,
    "logit_bias": ANY,
    "logprobs": ANY,
    "max_tokens": ANY,
    "min_p": ANY,
    "min_tokens": ANY,
    "model": ANY,
    "n": (1,),
    "presence_penalty": (0,),
    "priority": ANY,
    "prompt": ANY,
    # Counts the tokens of prompt and answer alike.
    "repetition_penalty": ANY,
    "return_token_ids": ANY,
    "return_tokens_as_token_ids": ANY,
    # An engine may draw by the number of tokens of the answer, which begins anew.
    "seed": (),
    "skip_special_tokens": ANY,
    "spaces_between_special_tokens": ANY,
    # See `_stop_obstacle`.
    "stop": ANY,
    "stop_token_ids": ANY,
    "stream": (True,),
    "stream_options": ANY,
    "temperature": ANY,
    "top_k": ANY,
    "top_p": ANY,
    "truncate_prompt_tokens": ANY,
    "user": ANY,
}
"""Field → values, besides null, with which a stream can be continued."""
_CHAT: Final[Mapping[str, tuple[Any, ...] | object]] = {
    **{name: values for name, values in _COMPLETIONS.items() if name not in _NOT_OF_CHATS},
    "add_generation_prompt": ANY,
    "chat_template": ANY,
    "chat_template_kwargs": ANY,
    "continue_final_message": ANY,
    "documents": ANY,
    "include_reasoning": (True,),
    "max_completion_tokens": ANY,
    "messages": ANY,
    "metadata": ANY,
    "parallel_tool_calls": ANY,
    "prompt_cache_key": ANY,
    "reasoning_effort": ANY,
    "response_format": ({"type": "text"},),
    "safety_identifier": ANY,
    "store": ANY,
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": ANY,
    "truncation_side": ANY,
}
FIELDS: Final[Mapping[RequestKind, Mapping[str, tuple[Any, ...] | object]]] = {
    RequestKind.COMPLETIONS: _COMPLETIONS,
    RequestKind.CHAT: _CHAT,
}
PARSED: Final = frozenset({"tools"})
"""Fields of a chat whose other values an engine reads the answer for."""

ONCE: Final[Mapping[RequestKind, Mapping[str, tuple[Any, ...]]]] = {
    RequestKind.COMPLETIONS: {"use_beam_search": (False,)},
    RequestKind.CHAT: {"use_beam_search": (False,)},
    RequestKind.MESSAGES: {},
    # What one engine stores is not known to another.
    RequestKind.RESPONSES: {
        "background": (False,),
        "conversation": (),
        "previous_response_id": (),
    },
}
"""Fields whose other values, besides null, prevent that the answer is generated again."""
_COUNTS: Final = frozenset({"max_tokens", "max_completion_tokens", "min_tokens"})
_MAX_STOP: Final = 256
"""Characters of a stop string that is looked for across the seam: an event takes time for each."""
_WITH_CHOICES: Final = frozenset({RequestKind.COMPLETIONS, RequestKind.CHAT})
"""APIs with `n`, and with a `seed`."""


def obstacle(kind: RequestKind, members: Members) -> str | None:
    """Why another engine cannot continue the stream of a request, in words for its error; None: it
    can."""
    fields = FIELDS.get(kind)
    if fields is None:
        return f"streams of {kind} are not continued"
    try:
        for name, raw in members.items():
            allowed = fields.get(name, ())
            if name in _COUNTS and not _is_count(raw):
                return f"{name} that is no whole number is not continued"
            if allowed is ANY or (kind is RequestKind.CHAT and name in PARSED):
                continue
            value = msgspec.json.decode(raw)
            if value is not None and value not in allowed:  # type: ignore[operator]
                return f"{name} is not continued"
        parsing = parsing_obstacle(members) if has_tools(members) else None
        return parsing or _prompt_obstacle(kind, members) or _stop_obstacle(members)
    except UNREADABLE:
        return "the request cannot be read"


def has_tools(members: Members) -> bool:
    """Whether an engine reads tool calls from a chat's answer."""
    return bytes(members.get("tools", _NULL)) not in _NO_TOOLS


def parsing_obstacle(members: Members) -> str | None:
    """Why the rest of a chat's tokens cannot be parsed by themselves, in words for its error; None:
    they can. vLLM's endpoint for that has no logprobs, and looks for no stop strings."""
    if bytes(members.get("logprobs", _FALSE)) not in _OFF:
        return "logprobs of an answer that is parsed are not continued"
    if stop_strings(members)[0]:
        return "stop of an answer that is parsed is not continued"
    return None


def _is_count(raw: msgspec.Raw) -> bool:
    """Whether a limit can be reduced: engines also take `100.0` and `"100"`."""
    value = msgspec.json.decode(raw)
    return value is None or type(value) is int


def repeat_obstacle(kind: RequestKind, members: Members) -> str | None:
    """Why no other engine generates the same answer again, in words for its error; None: one
    does."""
    if (why := once_obstacle(kind, members)) is not None:
        return why
    try:
        count_choices(kind, members)
        has_seed = kind in _WITH_CHOICES and bytes(members.get("seed", _NULL)) != b"null"
        if is_greedy(members) or has_seed:
            return None
    except UNREADABLE:
        return "the request cannot be read"
    return "without temperature 0 or a seed the answer is not generated again"


def once_obstacle(kind: RequestKind, members: Members) -> str | None:
    """Why no other engine may generate an answer after the first one began to, in words for its
    error; None: one may, though perhaps another answer."""
    once = ONCE.get(kind)
    if once is None:
        return f"answers of {kind} are not generated again"
    try:
        for name in once.keys() & members.keys():
            value = msgspec.json.decode(members[name])
            if value is not None and value not in once[name]:
                return f"with {name} the answer is not generated again"
        if kind is RequestKind.RESPONSES and not _has_functions_only(members):
            return "with tools that an engine calls itself the answer is not generated again"
    except UNREADABLE:
        return "the request cannot be read"
    return None


def _has_functions_only(members: Members) -> bool:
    tools = _tools.decode(members.get("tools", _NULL)) or ()
    return all(tool.get("type") == "function" for tool in tools)


def count_choices(kind: RequestKind, members: Members) -> int:
    """How many choices a stream has; 1 for an API without choices."""
    if kind not in _WITH_CHOICES:
        return 1
    prompt = msgspec.json.decode(members.get("prompt", _NULL))
    is_several = kind is RequestKind.COMPLETIONS and isinstance(prompt, list)
    prompts = len(prompt) if is_several and not _is_ids(prompt) else 1
    return prompts * (msgspec.json.decode(members.get("n", _NULL), type=int | None) or 1)


def _is_ids(prompt: list[Any]) -> bool:
    """Whether a list is one prompt of ids, and none of several prompts."""
    return bool(prompt) and all(type(i) is int for i in prompt)


def _prompt_obstacle(kind: RequestKind, members: Members) -> str | None:
    """Several prompts are several choices in one stream; media cannot be given as ids."""
    if kind is RequestKind.CHAT:
        return None if can_reuse_token_ids(members) else "messages with media are not continued"
    if "prompt" not in members:
        return "the prompt is not known"
    prompt = msgspec.json.decode(members["prompt"])
    if isinstance(prompt, list) and not _is_ids(prompt):
        return "several prompts are not continued"
    return None


def is_greedy(members: Members) -> bool:
    """Whether an engine generates the same tokens again for the same prompt."""
    return "temperature" in members and msgspec.json.decode(members["temperature"]) == 0


def stop_strings(members: Members) -> tuple[list[str], bool]:
    """The stop strings of a request, and whether they are part of the answer."""
    stop = msgspec.json.decode(members.get("stop", _NULL), type=str | list[str] | None) or []
    included = msgspec.json.decode(members.get("include_stop_str_in_output", _NULL))
    return [stop] if isinstance(stop, str) else stop, included is True


def _stop_obstacle(members: Members) -> str | None:
    """Another engine finds a stop string in the text that it generates itself, so it generates
    tokens again that were delivered."""
    stops, _ = stop_strings(members)
    longest = max(map(len, stops), default=0)
    if longest > _MAX_STOP:
        return f"stop of more than {_MAX_STOP} characters is not continued"
    if longest > 1 and not is_greedy(members):
        return "stop is continued only with temperature 0"
    return None
