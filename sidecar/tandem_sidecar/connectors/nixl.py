"""NIXL pull: prefill first, its answer names what decode reads (vLLM's NixlConnector).

1. prefill leg: the client's body capped to one token, and `kv_transfer_params` asking to keep it
2. decode leg: the client's body, and the producer's object verbatim
3. release: a request that the decode engine refuses before it admits it (unknown model, 404), which
   makes it tell the producer to free the blocks
"""

from typing import Final

import msgspec
from msgspec import Raw

from tandem_contract import kvparams
from tandem_contract.kvparams import ParamsUnusable, parse_params

from ..bodies.parse import Body, Kind, with_member, with_members
from .handover import Attempt, Handover, Outgoing

NAME: Final = "nixl"

RELEASE_MODEL: Final = "tandem-release-kv"
"""A model name no engine serves."""

_DROPPED: Final = frozenset({"stream_options", "stop", "stop_token_ids"})
_CAPS: Final = {
    "stream": False,
    "max_tokens": 1,
    "min_tokens": 1,
    "ignore_eos": True,
    kvparams.FIELD: Raw(kvparams.PREFILL_LEG),
}
_CHAT_CAPS: Final = _CAPS | {"max_completion_tokens": 1}


class _Answer(msgspec.Struct):
    """The one field of a prefill answer that is read."""

    kv_transfer_params: Raw = Raw(b"null")


_answer: Final = msgspec.json.Decoder(_Answer)


class Nixl:
    """The connector; holds no state."""

    def prefill(self, kind: Kind, body: Body, _attempt: Attempt) -> bytes:
        """Body of the prefill leg."""
        return with_members(body, _CHAT_CAPS if kind is Kind.CHAT else _CAPS, _DROPPED)

    def handover(self, _attempt: Attempt, answer: bytes) -> Handover:
        """What a prefill answer hands over. Raises ParamsUnusable."""
        try:
            raw = bytes(_answer.decode(answer).kv_transfer_params)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
            raise ParamsUnusable("the answer is no JSON object") from err
        return Handover(parse_params(raw).raw)

    def decode(self, _kind: Kind, body: Body, handover: Handover) -> bytes:
        """Body of the decode leg."""
        return with_member(body, kvparams.FIELD, handover.params)

    def release(self, _kind: Kind, _body: Body, handover: Handover) -> Outgoing:
        """The request that has the prefill pod free what nobody will read."""
        body = {
            "model": RELEASE_MODEL,
            "prompt": "x",
            "max_tokens": 1,
            kvparams.FIELD: Raw(handover.params),
        }
        return Outgoing(Kind.COMPLETIONS.value, msgspec.json.encode(body), expected=404)
