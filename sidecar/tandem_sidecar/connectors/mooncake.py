"""Mooncake (vLLM's MooncakeConnector): concurrent legs, matched by a transfer id.

0. Peer query: the prefill pod's bootstrap server reports the engine id, which changes with a
   restart. A restart under the same address is not announced, so the query is repeated regularly.
1. Prefill leg: the client's body capped to one token, and `transfer_id`.
2. Decode leg: the client's body, the same `transfer_id`, the bootstrap server and the engine id.
3. Release: the refused completion of NIXL pull, with the decode leg's object.

The producer holds the KV of prefills that ended by length and drops that of all others, whereas
decode keeps asking for it until VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT. So an answer that ended
otherwise counts as a failed hand-off.
"""

import time
from collections.abc import Callable
from typing import Final

import msgspec

from tandem_contract import ports
from tandem_contract.commandline import HostPort
from tandem_contract.concurrent_params import (
    BOOTSTRAP_QUERY,
    MooncakeDecode,
    MooncakePrefill,
    MooncakeRank,
)
from tandem_contract.request_kinds import RequestKind
from tandem_contract.transfer_params import FIELD, ParamsUnusable

from ..bodies.edit import add_transfer_params, cap_to_one_token
from ..bodies.parse import Body
from ..bodies.usage import read_cached_tokens
from .nixl import refused_request
from .protocol import (
    ConnectorOptions,
    HandoffAttempt,
    KvHold,
    PeerQuery,
    ReleaseRequest,
    check_ended_by_length,
)

MAX_PEERS: Final = 1024
"""Prefill pods whose engine id is remembered. Pods come and go, and without signed plans any
address of the allow-list may be named."""
_ENGINE_ID_TTL: Final = 10.0
"""Seconds for which an engine id is used. Too long: after a prefill pod's restart, decode engines
compute prompts again for that long. Too short: a query before every prefill."""

_ranks: Final = msgspec.json.Decoder(dict[str, MooncakeRank])


class Mooncake:
    """The connector. It remembers the engine id of each prefill pod for a while."""

    release_is_notification = True
    decode_may_wait_forever = False

    def __init__(
        self,
        options: ConnectorOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port = (options or ConnectorOptions()).peer_port or ports.MOONCAKE_BOOTSTRAP
        self._clock = clock
        # By prefill pod: its engine id, and until when the id is used. An expired entry stays, so
        # that attempts in flight, which were begun with the id, can still complete.
        self._engines: dict[HostPort, tuple[str, float]] = {}

    def prefill_body(self, kind: RequestKind, body: Body, attempt: HandoffAttempt) -> bytes:
        return cap_to_one_token(kind, body, {FIELD: MooncakePrefill(attempt.attempt_id)})

    def kv_hold(self, attempt: HandoffAttempt, answer: bytes) -> KvHold:
        check_ended_by_length(answer)
        expected = self.expected_kv_hold(attempt)
        return KvHold(expected.transfer_params, cached_tokens=read_cached_tokens(answer))

    def decode_body(self, _kind: RequestKind, body: Body, kv_hold: KvHold) -> bytes:
        return add_transfer_params(body, kv_hold.transfer_params)

    def release_request(
        self, _kind: RequestKind, _body: Body, kv_hold: KvHold
    ) -> ReleaseRequest | None:
        return refused_request(kv_hold)

    # ConcurrentLegs

    def expected_kv_hold(self, attempt: HandoffAttempt) -> KvHold:
        if attempt.prefill not in self._engines:
            raise ParamsUnusable("mooncake: the prefill pod's engine id is not known")
        params = MooncakeDecode(
            transfer_id=attempt.attempt_id,
            remote_bootstrap_addr=f"http://{self._bootstrap(attempt.prefill)}",
            remote_engine_id=self._engines[attempt.prefill][0],
        )
        return KvHold(msgspec.json.encode(params))

    def stream_source(self, _prefill: HostPort) -> None:
        """These legs need no engine's stream."""

    def forget_source(self, _prefill: HostPort) -> None:
        """No source is remembered."""

    # PeerDiscovery

    def peer_query(self, attempt: HandoffAttempt) -> PeerQuery | None:
        _, valid_until = self._engines.get(attempt.prefill, ("", 0.0))
        if self._clock() < valid_until:
            return None
        return PeerQuery(self._bootstrap(attempt.prefill), BOOTSTRAP_QUERY)

    def record_peer(self, attempt: HandoffAttempt, answer: bytes) -> None:
        try:
            ranks = _ranks.decode(answer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
            raise ParamsUnusable(
                f"mooncake's bootstrap server sent no list of ranks: {err}"
            ) from err
        if len(ranks) != 1:
            # Each engine sends a request to a rank of its choice, and no engine id covers them all.
            raise ParamsUnusable(
                f"mooncake's bootstrap server lists {len(ranks)} data-parallel ranks: only one is"
                " supported"
            )
        engine_id = next(iter(ranks.values())).engine_id
        # The newest last, so that the first is the one whose id was asked for longest ago.
        self._engines.pop(attempt.prefill, None)
        self._engines[attempt.prefill] = engine_id, self._clock() + _ENGINE_ID_TTL
        if len(self._engines) > MAX_PEERS:
            del self._engines[next(iter(self._engines))]

    def forget_peer(self, prefill: HostPort) -> None:
        engine_id, _ = self._engines.get(prefill, ("", 0.0))
        # Only its validity ends: attempts in flight still need the id.
        if engine_id:
            self._engines[prefill] = engine_id, 0.0

    def _bootstrap(self, prefill: HostPort) -> HostPort:
        return HostPort(prefill.host, self._port)
