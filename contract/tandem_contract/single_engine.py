"""The rules by which one engine must serve a request alone, whatever the routing decided.

Each reason names something that a prefill leg and a decode leg would get wrong between them:

    n, best_of, beam_search   sequences that share one remote id: the first reader frees the blocks
                              that the second reads
    batch                     several prompts, and one answer with transfer parameters for them all
    prompt_logprobs, echo_logprobs   logprobs of prompt tokens, which decode does not compute
    prompt_embeds             a prompt without token ids, by which KV is found
    truncation                a prompt cut to the room that max_tokens leaves: the prefill leg asks
                              for one token and would cut it elsewhere
    previous_response         a conversation that only the engine that answered it has stored
    background                an answer sent before anything ran: no retry and no release possible
    builtin_tools             the engine generates again by itself with the same kv_transfer_params
    media_by_url              both engines would fetch the URL, and may receive different content

The EPP does not plan a split for such a request; the sidecar, which may be driven by another EPP,
checks again. The table is `RULES`. Each component parses bodies in its own way and passes the
undecoded members to `single_engine_reason`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Raw

from .request_kinds import RequestKind

_ALL: Final = frozenset(RequestKind)
_EXCEPT_CHAT: Final = _ALL - {RequestKind.CHAT}
_CLIENT_TOOLS: Final = ("function", "custom", "local_shell")
_LIST_OF_PROMPTS: Final = re.compile(rb'\[\s*["\[]')
"""The beginning of a list of texts or of token lists; a list of token ids is one prompt."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A field that keeps a request on one engine unless its value is neutral."""

    field: str
    reason: str
    """Label of the sidecar's and the EPP's metrics."""
    is_neutral: Callable[[Any], bool]
    """Whether the decoded value of the field still allows a split."""
    kinds: frozenset[RequestKind] = _ALL
    """The requests in which the field has this meaning."""
    needs: str | None = None
    """Another field that must be given, and not null, for the rule to apply."""
    hint: Callable[[bytes, Raw], bool] | None = None
    """A cheap test of the undecoded body and field; False: the rule cannot apply. For fields that
    are too large to decode in every request."""


def _is_off(value: Any) -> bool:
    return value in (None, False)


def _is_null(value: Any) -> bool:
    return value is None


def _is_at_most_one(value: Any) -> bool:
    return value in (None, 1)


def _is_fixed_length(value: Any) -> bool:
    """A negative length means "as much as max_tokens leaves free", which differs between legs."""
    return value is None or (isinstance(value, int) and value >= 0)


def _is_not_truncated(value: Any) -> bool:
    return value in (None, "disabled")


def _may_be_a_batch(_body: bytes, prompt: Raw) -> bool:
    return _LIST_OF_PROMPTS.match(prompt) is not None


def _is_one_prompt(value: Any) -> bool:
    """A text, a list of token ids, or a list that holds one of either."""
    return not isinstance(value, list) or len(value) < 2


def _has_only_client_tools(value: Any) -> bool:
    """Whether the client runs all tools. Inside vLLM run code interpreters, web searches,
    containers and MCP servers; a type that is not known here might."""
    return not isinstance(value, list) or all(
        not isinstance(tool, dict) or tool.get("type") in _CLIENT_TOOLS for tool in value
    )


def _has_no_remote_media(value: Any) -> bool:
    # A stack instead of recursion: the depth is the client's choice.
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending += item
        elif isinstance(item, dict):
            urls = _media_fields(item)
            if not all(_is_data_uri(item[key]) for key in urls):
                return False
            pending += (child for key, child in item.items() if key not in urls)
    return True


def _media_fields(part: dict[str, Any]) -> list[str]:
    """The fields of an object whose value an engine reads as media: a URL or a data URI."""
    fields = [key for key in part if key.endswith("_url")]
    # Parts of messages and generate name their media `url`. Elsewhere a field `url` is the result
    # of a tool or part of a quotation, and no engine fetches it.
    if str(part.get("type")).endswith("url") and "url" in part:
        fields.append("url")
    return fields


def _is_data_uri(value: Any) -> bool:
    """A null is none: it refers to media that only one engine's cache may hold."""
    url = value.get("url") if isinstance(value, dict) else value
    return isinstance(url, str) and url.startswith("data:")


def _may_hold_a_url(body: bytes, _field: Raw) -> bool:
    """Whether some key can end in `url`, also one that is written with JSON escapes.

    No encoder escapes letters, while other escapes are common; so both escaped letters that `url`
    could begin with are looked for before the whole value is decoded.
    """
    if b'url"' in body:
        return True
    return b"\\u00" in body and (b"\\u006" in body or b"\\u007" in body)


def _media(field: str, *kinds: RequestKind) -> Rule:
    return Rule(field, "media_by_url", _has_no_remote_media, frozenset(kinds), hint=_may_hold_a_url)


RULES: Final[tuple[Rule, ...]] = (
    Rule("n", "n", _is_at_most_one),
    Rule("best_of", "best_of", _is_at_most_one),
    Rule("use_beam_search", "beam_search", _is_off),
    Rule("previous_response_id", "previous_response", _is_off),
    Rule("background", "background", _is_off),
    Rule("prompt_logprobs", "prompt_logprobs", _is_null),
    Rule("prompt_logprob_token_ids", "prompt_logprobs", _is_null),
    Rule("prompt_embeds", "prompt_embeds", _is_null),
    Rule("truncate_prompt_tokens", "truncation", _is_fixed_length),
    Rule("truncation", "truncation", _is_not_truncated),
    _media("messages", RequestKind.CHAT, RequestKind.MESSAGES),
    _media("input", RequestKind.RESPONSES),
    _media("content_parts", RequestKind.GENERATE),
    # For chat, vLLM reads top_logprobs as the prompt's, and its default 0 asks for them too.
    Rule("echo", "echo_logprobs", _is_off, frozenset({RequestKind.CHAT})),
    Rule("echo", "echo_logprobs", _is_off, _EXCEPT_CHAT, needs="logprobs"),
    Rule(
        "prompt",
        "batch",
        _is_one_prompt,
        frozenset({RequestKind.COMPLETIONS}),
        hint=_may_be_a_batch,
    ),
    Rule("tools", "builtin_tools", _has_only_client_tools, frozenset({RequestKind.RESPONSES})),
)
"""The first rule that applies gives the reason."""

_BY_KIND: Final[Mapping[RequestKind, tuple[Rule, ...]]] = {
    kind: tuple(rule for rule in RULES if kind in rule.kinds) for kind in RequestKind
}
FIELDS: Final[Mapping[RequestKind, frozenset[str]]] = {
    kind: frozenset(rule.field for rule in rules) for kind, rules in _BY_KIND.items()
}
"""The fields that a body parser must keep for `single_engine_reason`, besides `Rule.needs`."""


def single_engine_reason(kind: RequestKind, body: bytes, members: Mapping[str, Raw]) -> str | None:
    """Why one engine must serve this request alone; None: it may be split.

    `members` are the undecoded members of the JSON object `body`; for a generate request, those of
    its `sampling_params` beside them. Raises msgspec.DecodeError, UnicodeDecodeError or
    RecursionError for a member that cannot be decoded.
    """
    if FIELDS[kind].isdisjoint(members):
        return None
    for rule in _BY_KIND[kind]:
        if rule.field in members and _applies(rule, body, members):
            return rule.reason
    return None


def _applies(rule: Rule, body: bytes, members: Mapping[str, Raw]) -> bool:
    # The cheap test first: messages and prompts may be megabytes.
    if rule.hint is not None and not rule.hint(body, members[rule.field]):
        return False
    # Undecoded: `null` is the only JSON text that means "not given".
    if rule.needs is not None and bytes(members.get(rule.needs, b"null")) == b"null":
        return False
    return not rule.is_neutral(msgspec.json.decode(members[rule.field]))
