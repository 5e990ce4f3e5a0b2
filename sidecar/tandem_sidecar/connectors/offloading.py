"""OffloadingConnector's peer-to-peer tier: both legs at once, matched by an id.

1. prefill leg: the client's body capped to one token, and the id its blocks are parked under
2. decode leg: the client's body, the id, and where the producer's tier listens

Decode loads what the producer parked and computes the rest, so a prefill that fails costs time and
no answer. What nobody fetches the producer drops by itself, and a decode leg that is cancelled
says so: there is no release.
"""

from typing import Final

import msgspec

from tandem_contract import concurrent_params, ports, transfer_params
from tandem_contract.commandline import HostPort

from ..bodies.edit import with_member
from ..bodies.kinds import Kind, capped
from ..bodies.parse import Body
from ..bodies.usage import cached_tokens
from .handover import Attempt, Handover, Inquiry, Outgoing

NAME: Final = "offloading"


class Offloading:
    """The connector; holds no state."""

    together = True
    light_release = True
    waits_without_end = False

    def __init__(self, *, peer_port: int = ports.OFFLOADING_P2P) -> None:
        self._port = peer_port

    def prefill(self, kind: Kind, body: Body, attempt: Attempt) -> bytes:
        """Body of the prefill leg."""
        params = concurrent_params.OffloadingPrefill(
            concurrent_params.OffloadingPeerOfPrefill(attempt.engine_id)
        )
        return capped(kind, body, {transfer_params.FIELD: params})

    def handover(self, attempt: Attempt, answer: bytes) -> Handover:
        """What was expected, once the prefill is done."""
        return Handover(self.expected(attempt).params, cached_tokens=cached_tokens(answer))

    def decode(self, _kind: Kind, body: Body, handover: Handover) -> bytes:
        """Body of the decode leg."""
        return with_member(body, transfer_params.FIELD, handover.params)

    def release(self, _kind: Kind, _body: Body, _handover: Handover) -> Outgoing | None:
        """Nothing: see above."""
        return None

    def inquiry(self, _attempt: Attempt) -> Inquiry | None:
        """Nothing: the id is ours."""
        return None

    def learned(self, attempt: Attempt, answer: bytes) -> None:
        """Never called: there is no inquiry."""

    def expected(self, attempt: Attempt) -> Handover:
        """What the decode leg needs, before the prefill answered."""
        peer = concurrent_params.OffloadingPeerOfDecode(
            attempt.engine_id, attempt.prefill.host, self._port
        )
        return Handover(msgspec.json.encode(concurrent_params.OffloadingDecode(peer)))

    def forget(self, prefill: HostPort) -> None:
        """Nothing is known of a pod."""
