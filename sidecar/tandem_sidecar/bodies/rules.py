"""Which requests one engine must serve, whatever the route says.

Each reason names something that two legs would get wrong:

    n, best_of, beam_search   sequences that share one remote id: the first reader frees the blocks
    batch                     one hand-over for several prompts
    prompt_logprobs, echo_logprobs   of tokens that decode does not compute
    prompt_embeds             no token ids to find KV by
    truncation                to what the tokens asked for leave free, which the legs ask otherwise
    previous_response         kept by the engine that answered it
    background                answered before anything ran: nothing could be retried or released
    builtin_tools             the engine generates again by itself, with the same kv_transfer_params
    media_by_url              both engines would fetch it, and may get two things
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from .kinds import SAMPLING, Kind
from .parse import UNREADABLE, Body, Members, bad_body, decode_members

_list: Final = msgspec.json.Decoder(list[msgspec.Raw])


def unified_reason(kind: Kind, body: Body) -> str | None:
    """Why this request must be served by one engine, as a metric label; None when it need not.

    Raises BadBody.
    """
    try:
        return _reason(kind, body.data, _flat(kind, body.members))
    except UNREADABLE as err:
        raise bad_body(err) from err


def _reason(kind: Kind, data: bytes, members: Members) -> str | None:
    named = not _NAMES.isdisjoint(members)
    if named:
        for field, reason, holds in _FIELDS:
            if field in members and holds(msgspec.json.decode(members[field])):
                return reason
    if kind in _MEDIA_IN and _may_name_a_url(data) and _fetches(kind, members):
        return "media_by_url"
    if not named:
        return None
    return next((reason for reason, holds in _RULES if holds(kind, members)), None)


def _flat(kind: Kind, members: Members) -> Members:
    """Generate's sampling parameters beside its other members."""
    if kind is not Kind.GENERATE or SAMPLING not in members:
        return members
    try:
        return {**members, **decode_members(members[SAMPLING])}
    except msgspec.ValidationError:
        return members


def _is_on(value: Any) -> bool:
    return value not in (None, False)


def _is_given(value: Any) -> bool:
    return value is not None


def _is_several(value: Any) -> bool:
    return value not in (None, 1)


def _is_relative(value: Any) -> bool:
    """Whether a truncation depends on the tokens asked for: a fixed length does not."""
    return value is not None and not (isinstance(value, int) and value >= 0)


_FIELDS: Final[tuple[tuple[str, str, Callable[[Any], bool]], ...]] = (
    ("n", "n", _is_several),
    ("best_of", "best_of", _is_several),
    ("use_beam_search", "beam_search", _is_on),
    ("previous_response_id", "previous_response", _is_on),
    ("background", "background", _is_on),
    ("prompt_logprobs", "prompt_logprobs", _is_given),
    ("prompt_logprob_token_ids", "prompt_logprobs", _is_given),
    ("prompt_embeds", "prompt_embeds", _is_given),
    ("truncate_prompt_tokens", "truncation", _is_relative),
    ("truncation", "truncation", lambda value: value not in (None, "disabled")),
)


def _echoes_logprobs(kind: Kind, members: Members) -> bool:
    """For chat vLLM takes top_logprobs for the prompt's, and its default 0 asks for them too."""
    if "echo" not in members or not _is_on(msgspec.json.decode(members["echo"])):
        return False
    return kind is Kind.CHAT or bytes(members.get("logprobs", b"null")) != b"null"


def _is_batch(kind: Kind, members: Members) -> bool:
    """More than one prompt: strings, or lists of token ids."""
    raw = members.get("prompt")
    if kind is not Kind.COMPLETIONS or raw is None or bytes(memoryview(raw)[:1]) != b"[":
        return False
    if bytes(raw)[1:].lstrip()[:1] not in (b'"', b"["):
        return False
    return len(_list.decode(raw)) > 1


def _has_builtin_tools(kind: Kind, members: Members) -> bool:
    if kind is not Kind.RESPONSES or "tools" not in members:
        return False
    tools = msgspec.json.decode(members["tools"])
    return isinstance(tools, list) and any(
        isinstance(tool, dict) and tool.get("type") != "function" for tool in tools
    )


_MEDIA_IN: Final = {
    Kind.CHAT: "messages",
    Kind.MESSAGES: "messages",
    Kind.RESPONSES: "input",
    Kind.GENERATE: "content_parts",
}


def _may_name_a_url(data: bytes) -> bool:
    """A key ends so, or may once its escapes are read; quick, as most bodies hold neither.

    No encoder escapes letters; other escapes are common.
    """
    if b'url"' in data:
        return True
    return b"\\u00" in data and (b"\\u006" in data or b"\\u007" in data)


def _fetches(kind: Kind, members: Members) -> bool:
    """Whether media is named by a URL that both engines would fetch."""
    field = _MEDIA_IN[kind]
    return field in members and _names_remote(msgspec.json.decode(members[field]))


def _names_remote(value: Any) -> bool:
    if isinstance(value, list):
        return any(_names_remote(item) for item in value)
    if not isinstance(value, dict):
        return False
    named = [key for key in value if key.endswith("_url")]
    # Of messages and generate; elsewhere a `url` is what a tool found, or is quoted.
    if str(value.get("type")).endswith("url") and "url" in value:
        named.append("url")
    return any(_is_remote(value[key]) for key in named) or any(
        _names_remote(item) for key, item in value.items() if key not in named
    )


def _is_remote(value: Any) -> bool:
    """Not a data URI: a null names what only one engine's cache may hold."""
    url = value.get("url") if isinstance(value, dict) else value
    return not (isinstance(url, str) and url.startswith("data:"))


_RULES: Final[tuple[tuple[str, Callable[[Kind, Members], bool]], ...]] = (
    ("echo_logprobs", _echoes_logprobs),
    ("batch", _is_batch),
    ("builtin_tools", _has_builtin_tools),
)
_NAMES: Final = frozenset(field for field, _, _ in _FIELDS) | {"echo", "prompt", "tools"}
"""What any rule but the one on media looks at: most chats hold none of it."""
