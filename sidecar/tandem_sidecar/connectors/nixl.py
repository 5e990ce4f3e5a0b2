"""NIXL pull: prefill first, its answer names what decode reads (vLLM's NixlConnector).

1. prefill leg: the client's body capped to one token, and `kv_transfer_params` asking to keep it
2. decode leg: the client's body, and the producer's object verbatim
3. release: a request that the decode engine refuses before it admits it (unknown model, 404), which
   makes it tell the producer to free the blocks

Tokenize once: for text-only chat the prefill is asked for its token ids, and the decode engine
takes them from `prompt_token_ids` of its object in place of rendering the messages again. It checks
that they are ids of its vocabulary and nothing more; it need not, for it reads exactly as much KV
as they are long, and they are what that KV was computed from: so both legs have one prompt even
where their chat templates differ.
"""

from typing import Any, Final

import msgspec
from msgspec import Raw

from tandem_contract import transfer_params
from tandem_contract.commandline import HostPort
from tandem_contract.transfer_params import ParamsUnusable, read_transfer_params

from ..bodies.chat import renders_to_ids
from ..bodies.edit import appended, with_member
from ..bodies.kinds import PATHS, Kind, capped
from ..bodies.parse import Body
from ..bodies.usage import cached_tokens
from .answers import PrefillAnswer, read_answer
from .handover import Attempt, Handover, Inquiry, Outgoing

NAME: Final = "nixl"

RELEASE_MODEL: Final = "tandem-release-kv"
"""A model name no engine serves."""

_PREFILL_LEG: Final = Raw(transfer_params.PREFILL_LEG)


class Nixl:
    """The connector; holds no state."""

    together = False
    light_release = True
    waits_without_end = False
    mode = "pull"

    def __init__(self, *, tokenize_once: bool = True) -> None:
        self.tokenize_once = tokenize_once
        """May change: a hand-off under way uses ids if it was given some."""

    def prefill(self, kind: Kind, body: Body, _attempt: Attempt) -> bytes:
        """Body of the prefill leg."""
        return capped(kind, body, self._asked(kind, body))

    def handover(self, attempt: Attempt, answer: bytes) -> Handover:
        """What a prefill answer hands over. Raises ParamsUnusable."""
        read = read_answer(answer)
        params = bytes(read.kv_transfer_params)
        offer = read_transfer_params(params)
        if offer.transfer_mode not in (None, self.mode):
            raise ParamsUnusable(
                f"{transfer_params.FIELD}.transfer_mode is {offer.transfer_mode}: the prefill pod's"
                " connector is another"
            )
        known = offer.remote_prefill_cached_tokens is not None
        return Handover(
            params,
            cached_tokens=None if known else cached_tokens(answer),
            prompt_token_ids=_token_ids(read),
            engine_id=attempt.engine_id,
        )

    def decode(self, _kind: Kind, body: Body, handover: Handover) -> bytes:
        """Body of the decode leg."""
        params = handover.params
        if handover.prompt_token_ids:
            params = appended(params, transfer_params.PROMPT_TOKEN_IDS, handover.prompt_token_ids)
        return with_member(body, transfer_params.FIELD, params)

    def release(self, _kind: Kind, _body: Body, handover: Handover) -> Outgoing | None:
        """The request that has the prefill pod free what nobody will read."""
        return refused(handover)

    def inquiry(self, _attempt: Attempt) -> Inquiry | None:
        """Nothing: the prefill's answer says it all."""
        return None

    def learned(self, attempt: Attempt, answer: bytes) -> None:
        """Never called: there is no inquiry."""

    def expected(self, _attempt: Attempt) -> Handover:
        """Never called: the legs do not run together."""
        raise ParamsUnusable("only the prefill's answer names the KV")

    def forget(self, prefill: HostPort) -> None:
        """Nothing is known of a pod."""

    def _asked(self, kind: Kind, body: Body) -> dict[str, Any]:
        changes: dict[str, Any] = {transfer_params.FIELD: _PREFILL_LEG}
        if self.tokenize_once and kind is Kind.CHAT and renders_to_ids(body):
            changes["return_token_ids"] = True
        return changes


def refused(handover: Handover) -> Outgoing:
    """A completion of an unknown model: its 404 has the decode engine say that it will not read.

    Other kinds do the same, but not generate, and completions take the least.
    """
    body = {
        "model": RELEASE_MODEL,
        "prompt": "x",
        "max_tokens": 1,
        transfer_params.FIELD: Raw(handover.params),
    }
    return Outgoing(PATHS[Kind.COMPLETIONS], msgspec.json.encode(body), expected=404)


def _token_ids(read: PrefillAnswer) -> bytes:
    """What was asked for, if it came; only then is it in the answer."""
    ids = bytes(read.prompt_token_ids)
    return ids if ids[:1] == b"[" and ids[1:].lstrip() != b"]" else b""
