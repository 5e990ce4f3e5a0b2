"""The peer-to-peer tier of vLLM's OffloadingConnector: concurrent legs, matched by an id.

1. Prefill leg: the client's body capped to one token, and the id under which its blocks are stored.
2. Decode leg: the client's body, the id, and the address of the producer's tier.

Decode loads the blocks that the producer stored and computes the rest, so a failed prefill costs
time and no answer. There is no release: the producer drops blocks that are not fetched, and a
cancelled decode leg tells it so.
"""

import msgspec

from tandem_contract import ports
from tandem_contract.commandline import HostPort
from tandem_contract.concurrent_params import (
    OffloadingDecode,
    OffloadingPeerOfDecode,
    OffloadingPeerOfPrefill,
    OffloadingPrefill,
)
from tandem_contract.request_kinds import RequestKind
from tandem_contract.transfer_params import FIELD

from ..bodies.edit import add_transfer_params, cap_to_one_token
from ..bodies.parse import Body
from ..bodies.usage import read_cached_tokens
from .protocol import ConnectorOptions, HandoffAttempt, KvHold, ReleaseRequest


class Offloading:
    """The connector. It holds no state."""

    release_is_notification = True
    decode_may_wait_forever = False

    def __init__(self, options: ConnectorOptions | None = None) -> None:
        self._port = (options or ConnectorOptions()).peer_port or ports.OFFLOADING_P2P

    def prefill_body(self, kind: RequestKind, body: Body, attempt: HandoffAttempt) -> bytes:
        params = OffloadingPrefill(OffloadingPeerOfPrefill(attempt.attempt_id))
        return cap_to_one_token(kind, body, {FIELD: params})

    def kv_hold(self, attempt: HandoffAttempt, answer: bytes) -> KvHold:
        # The answer names no KV: the decode leg has these parameters already.
        expected = self.expected_kv_hold(attempt)
        return KvHold(expected.transfer_params, cached_tokens=read_cached_tokens(answer))

    def decode_body(self, _kind: RequestKind, body: Body, kv_hold: KvHold) -> bytes:
        return add_transfer_params(body, kv_hold.transfer_params)

    def release_request(
        self, _kind: RequestKind, _body: Body, _kv_hold: KvHold
    ) -> ReleaseRequest | None:
        return None

    # ConcurrentLegs

    def expected_kv_hold(self, attempt: HandoffAttempt) -> KvHold:
        peer = OffloadingPeerOfDecode(attempt.attempt_id, attempt.prefill.host, self._port)
        return KvHold(msgspec.json.encode(OffloadingDecode(peer)))

    def stream_source(self, _prefill: HostPort) -> None:
        """These legs need no engine's stream."""

    def forget_source(self, _prefill: HostPort) -> None:
        """No source is remembered."""
