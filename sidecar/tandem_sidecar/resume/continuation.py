"""The request with which another engine continues a stream, and its events as parts of that stream.

Pure. The new request has the prompt and the tokens before the seam as one prompt of ids (a chat has
them beside its messages, which the engine then does not read), and asks for the tokens that are
left. Its events get the id and time of the first stream, counts and places in the text as if one
engine had served it all, and no second list of the prompt's ids.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw

from tandem_contract.request_kinds import RequestKind
from tandem_contract.transfer_params import FIELD, PROMPT_TOKEN_IDS

from ..bodies.edit import add_member, replace_members
from ..bodies.parse import Body, Members, decode_members
from .event_shapes import check_usage
from .ledger import Ledger

_RETURN_IDS: Final = "return_token_ids"
_LIMITS: Final[Mapping[RequestKind, tuple[str, ...]]] = {
    RequestKind.COMPLETIONS: ("max_tokens",),
    RequestKind.CHAT: ("max_completion_tokens", "max_tokens"),
}
"""Fields that limit the answer's tokens; the first one that is set counts."""
_DEFAULT_MAX_TOKENS: Final = 16
"""What a completion without `max_tokens` gets (OpenAI's default, and vLLM's)."""
_TOKENIZING: Final = frozenset({"add_special_tokens", "truncate_prompt_tokens", "truncation_side"})
"""Fields that have had their effect on the prompt's ids."""
_DATA: Final = b"data: "


def asks_for_ids(members: Members) -> bool:
    """Whether the client itself asks for the token ids."""
    return _RETURN_IDS in members and bytes(members[_RETURN_IDS]) == b"true"


def with_ids(body: Body) -> Body:
    """The request as the first engine gets it: it also asks for the token ids."""
    if _RETURN_IDS in body.members:
        data = replace_members(body.members, {_RETURN_IDS: True})
    else:
        data = add_member(body, _RETURN_IDS, b"true")
    # Decoded, because the members of `body` refer to its bytes.
    return Body(data, decode_members(data))


def without_ids(body: Body) -> Body:
    """The request without asking for them."""
    data = replace_members(body.members, {}, (_RETURN_IDS,))
    return Body(data, decode_members(data))


def continued(kind: RequestKind, body: Body, ledger: Ledger) -> Body | None:
    """The request for the rest of the answer; None: nothing is left to ask for."""
    members, start = body.members, ledger.seam.start
    ids = [*ledger.prompt_ids, *ledger.ids[:start]]
    is_chat = kind is RequestKind.CHAT
    prompt = {FIELD: {PROMPT_TOKEN_IDS: ids}} if is_chat else {"prompt": ids}
    changes: dict[str, Any] = {**prompt, _RETURN_IDS: True}
    limits = {name: _count(members, name) for name in _LIMITS[kind]}
    if not is_chat and "max_tokens" not in members:
        limits["max_tokens"] = _DEFAULT_MAX_TOKENS
    for name, most in limits.items():
        if most is not None:
            if most <= ledger.delivered:
                return None
            changes[name] = most - start
            break
    if least := _count(members, "min_tokens"):
        changes["min_tokens"] = max(0, least - start)
    data = replace_members(members, changes, _TOKENIZING)
    # Not `parse_body`, which removes the prompt's ids of a chat: a client may not give them.
    return Body(data, decode_members(data))


def usage_event(ledger: Ledger) -> bytes:
    """The event with the usage of a stream that is finished but for it."""
    prompt, completion = len(ledger.prompt_ids), len(ledger.ids)
    usage = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    event = {**msgspec.structs.asdict(ledger.first), "choices": [], "usage": usage}
    return b"%b%b\n\n" % (_DATA, msgspec.json.encode(event))


def asks_for_usage(members: Members) -> bool:
    """Whether a stream ends with an event that has its usage."""
    options = msgspec.json.decode(members.get("stream_options", Raw(b"null")))
    return isinstance(options, dict) and options.get("include_usage") is True


def _count(members: Members, name: str) -> int | None:
    """A member that is a number; None: it is absent or null, which leaves the engine its own."""
    value = msgspec.json.decode(members[name]) if name in members else None
    return value if isinstance(value, int) else None


class Splice:
    """Makes events of a continuation events of the first stream."""

    def __init__(self, ledger: Ledger) -> None:
        """`ledger`: the stream's, at the seam."""
        self._id, self._created = ledger.first.id, ledger.first.created
        self._before = ledger.seam.start
        self._text_offset = ledger.text_offset
        """Where the text of the first new token begins."""
        self._shift: int | None = None
        """What is added to text offsets; None: no event has had any."""

    def edit(self, event: bytes) -> bytes:
        """Edit one event, whose data is a JSON object."""
        chunk: dict[str, Any] = _chunk.decode(event[len(_DATA) :])
        chunk["id"], chunk["created"] = self._id, self._created
        if usage := chunk.get("usage"):
            chunk["usage"] = self._usage(usage)
        if choices := chunk.get("choices"):
            chunk["choices"] = [self._choice(choice) for choice in _choices.decode(choices)]
        return b"%b%b\n\n" % (_DATA, msgspec.json.encode(chunk))

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        if "prompt_token_ids" in choice:
            choice["prompt_token_ids"] = None
        logprobs = _logprobs.decode(choice.get("logprobs", b"null"))
        if logprobs and "text_offset" in logprobs:
            offsets = _offsets.decode(logprobs["text_offset"])
            if self._shift is None and offsets:
                self._shift = self._text_offset - offsets[0]
            made: dict[str, Any] = {**logprobs}
            made["text_offset"] = [offset + (self._shift or 0) for offset in offsets]
            choice["logprobs"] = made
        return choice

    def _usage(self, data: Raw) -> dict[str, Any] | None:
        """Tokens before the seam were a prompt's to the new engine; cached ones, too."""
        usage: dict[str, Any] | None = _usage.decode(data)
        if usage is None:
            return None
        check_usage(data)
        usage["prompt_tokens"] -= self._before
        usage["completion_tokens"] += self._before
        details = usage.get("prompt_tokens_details")
        if details and details.get("cached_tokens"):
            details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])
        return usage


_chunk: Final = msgspec.json.Decoder(dict[str, Raw])
_choices: Final = msgspec.json.Decoder(list[dict[str, Raw]])
_logprobs: Final = msgspec.json.Decoder(dict[str, Raw] | None)
_offsets: Final = msgspec.json.Decoder(list[int])
_usage: Final = msgspec.json.Decoder(dict[str, Any] | None)
