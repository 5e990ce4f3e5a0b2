"""The request with which another engine continues a stream, and its events as parts of that stream.

Pure. The new request has the prompt and the tokens before the seam as one prompt of ids, and asks
for the tokens that are left. Its events get the id and time of the first stream, counts and places
in the text as if one engine had served it all, and no second list of the prompt's ids.
"""

from typing import Any, Final

import msgspec
from msgspec import Raw

from ..bodies.edit import add_member, replace_members
from ..bodies.parse import Body, Members, parse_body
from .ledger import Ledger

_RETURN_IDS: Final = "return_token_ids"
_DEFAULT_MAX_TOKENS: Final = 16
"""What a completion without `max_tokens` gets (OpenAI's default, and vLLM's)."""
_TOKENIZING: Final = frozenset({"add_special_tokens", "truncate_prompt_tokens"})
"""Fields that have had their effect on the prompt's ids."""
_DATA: Final = b"data: "


def asks_for_ids(members: Members) -> bool:
    """Whether the client itself asks for the token ids."""
    return _RETURN_IDS in members and bytes(members[_RETURN_IDS]) == b"true"


def with_ids(body: Body) -> Body:
    """The request as the first engine gets it: it also asks for the token ids."""
    if asks_for_ids(body.members):
        return body
    if _RETURN_IDS in body.members:
        return parse_body(replace_members(body.members, {_RETURN_IDS: True}))
    value = b"true"
    return Body(add_member(body, _RETURN_IDS, value), {**body.members, _RETURN_IDS: Raw(value)})


def continued(body: Body, ledger: Ledger) -> Body | None:
    """The request for the rest of the answer; None: nothing is left to ask for."""
    members, start = body.members, ledger.seam.start
    changes: dict[str, Any] = {
        "prompt": [*ledger.prompt_ids, *ledger.ids[:start]],
        _RETURN_IDS: True,
    }
    most = _count(members, "max_tokens", _DEFAULT_MAX_TOKENS)
    if most is not None:
        if most <= ledger.delivered:
            return None
        changes["max_tokens"] = most - start
    if least := _count(members, "min_tokens", 0):
        changes["min_tokens"] = max(0, least - start)
    return parse_body(replace_members(members, changes, _TOKENIZING))


def _count(members: Members, name: str, default: int) -> int | None:
    """A member that is a number; None: it is null, which leaves the engine its own."""
    value = msgspec.json.decode(members[name]) if name in members else default
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
            chunk["usage"] = self._usage(msgspec.json.decode(usage))
        if choices := chunk.get("choices"):
            chunk["choices"] = [self._choice(choice) for choice in _choices.decode(choices)]
        return b"%b%b\n\n" % (_DATA, msgspec.json.encode(chunk))

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        if "prompt_token_ids" in choice:
            choice["prompt_token_ids"] = None
        if logprobs := msgspec.json.decode(choice.get("logprobs", b"null")):
            offsets = logprobs["text_offset"]
            if self._shift is None and offsets:
                self._shift = self._text_offset - offsets[0]
            logprobs["text_offset"] = [offset + (self._shift or 0) for offset in offsets]
            choice["logprobs"] = logprobs
        return choice

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Tokens before the seam were a prompt's to the new engine; cached ones, too."""
        usage["prompt_tokens"] -= self._before
        usage["completion_tokens"] += self._before
        details = usage.get("prompt_tokens_details")
        if details and details.get("cached_tokens"):
            details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])
        return usage


_chunk: Final = msgspec.json.Decoder(dict[str, Raw])
_choices: Final = msgspec.json.Decoder(list[dict[str, Raw]])
