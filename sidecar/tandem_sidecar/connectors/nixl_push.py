"""NIXL push (vLLM's NixlPushConnector): the producer writes into blocks that decode registered.

1. Prefill leg: as for NIXL pull.
2. Decode leg: the client's body and the producer's object, which names the engine to register with.
   The producer matches the registration to the prefill by the request id, so both legs have the
   same id: in the header and, for responses, in the body.
3. Release: only a request that runs frees the blocks before their lease ends. So the client's
   request is run, capped to one token, and its answer discarded. This is not done once a decode leg
   was sent, which may have registered: a second registration under its id waits for a write that
   never comes and holds decode's own blocks for good, whereas the producer's lease is short.
"""

import msgspec
from msgspec import Raw

from tandem_contract.commandline import HostPort
from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_contract.transfer_params import FIELD, REQUEST_ID, ParamsUnusable, TransferParams

from ..bodies.edit import cap_to_one_token, replace_members
from ..bodies.parse import Body
from .nixl import Nixl
from .protocol import HandoffAttempt, KvHold, ReleaseRequest


class NixlPush(Nixl):
    """The connector for pushed KV. It holds no state."""

    release_is_notification = False
    decode_may_wait_forever = True
    transfer_mode = "push"

    def prefill_body(self, kind: RequestKind, body: Body, attempt: HandoffAttempt) -> bytes:
        members = self._prefill_members(kind, body) | _id_member(kind, body, attempt.attempt_id)
        return cap_to_one_token(kind, body, members)

    def decode_body(self, kind: RequestKind, body: Body, kv_hold: KvHold) -> bytes:
        # The id must be the prefill leg's: the producer matches the registration by it.
        if members := _id_member(kind, body, kv_hold.attempt_id):
            body = Body(replace_members(body.members, members), {**body.members, **members})
        return super().decode_body(kind, body, kv_hold)

    def release_request(
        self, kind: RequestKind, body: Body, kv_hold: KvHold
    ) -> ReleaseRequest | None:
        members = {FIELD: Raw(kv_hold.transfer_params)}
        members |= _id_member(kind, body, kv_hold.attempt_id)
        data = cap_to_one_token(kind, body, members)
        return ReleaseRequest(PATHS[kind].encode(), data, expected_status=200)

    def _check(self, params: TransferParams, prefill: HostPort) -> None:
        super()._check(params, prefill)
        # vLLM's decode engine registers with this number of ranks, and the whole engine fails if
        # the number is missing.
        if not params.tp_size:
            raise ParamsUnusable(f"{FIELD}.tp_size is missing")


def _id_member(kind: RequestKind, body: Body, attempt_id: str) -> dict[str, Raw]:
    """A responses request takes its id from the body only: there it is the response's id, with the
    attempt's at the end."""
    if kind is not RequestKind.RESPONSES:
        return {}
    response_id: str = msgspec.json.decode(body.members[REQUEST_ID])
    return {REQUEST_ID: Raw(msgspec.json.encode(f"{response_id}-{attempt_id}"))}
