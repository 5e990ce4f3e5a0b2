"""NIXL push: the producer writes into blocks that decode registered (vLLM's NixlPushConnector).

1. prefill leg: as for pull
2. decode leg: the client's body and the producer's object, from which decode takes whom to register
   with; the producer matches it to the prefill by the request id, so both legs have one, in the
   header and, for responses, in the body
3. release: nothing but a request that runs frees the blocks before their lease, so it is run, for
   one token, and its answer thrown away; not once a decode leg went out, which may have registered:
   a second registration under its id waits for a write that never comes, and holds decode's own
   blocks for good, where the producer's lease is short
"""

from typing import Any, Final

import msgspec
from msgspec import Raw

from tandem_contract import transfer_params
from tandem_contract.transfer_params import ParamsUnusable

from ..bodies.edit import appended
from ..bodies.kinds import PATHS, Kind, capped
from ..bodies.parse import Body
from .handover import Attempt, Handover, Outgoing
from .nixl import Nixl

NAME: Final = "nixl-push"


class _Needed(msgspec.Struct):
    tp_size: int | None = None


_needed: Final = msgspec.json.Decoder(_Needed)


class NixlPush(Nixl):
    """The connector; holds no state."""

    light_release = False
    waits_without_end = True
    mode = "push"

    def prefill(self, kind: Kind, body: Body, attempt: Attempt) -> bytes:
        """Body of the prefill leg."""
        return capped(kind, body, self._asked(kind, body) | _id_in_body(kind, attempt.engine_id))

    def handover(self, attempt: Attempt, answer: bytes) -> Handover:
        """What a prefill answer hands over. Raises ParamsUnusable.

        Decode registers with so many ranks as the object says, and fails as a whole when it does
        not say how many.
        """
        handover = super().handover(attempt, answer)
        if not _needed.decode(handover.params).tp_size:
            raise ParamsUnusable(f"{transfer_params.FIELD}.tp_size is missing")
        return handover

    def decode(self, kind: Kind, body: Body, handover: Handover) -> bytes:
        """Body of the decode leg."""
        data = super().decode(kind, body, handover)
        for name, value in _id_in_body(kind, handover.engine_id).items():
            data = appended(data, name, msgspec.json.encode(value))
        return data

    def release(self, kind: Kind, body: Body, handover: Handover) -> Outgoing | None:
        """The request that has the prefill pod write, and be done with, what nobody will read."""
        changes = {transfer_params.FIELD: Raw(handover.params)} | _id_in_body(
            kind, handover.engine_id
        )
        return Outgoing(PATHS[kind], capped(kind, body, changes), expected=200)


def _id_in_body(kind: Kind, engine_id: str) -> dict[str, Any]:
    """Responses take their id from the body alone."""
    return {transfer_params.REQUEST_ID: f"resp_{engine_id}"} if kind is Kind.RESPONSES else {}
