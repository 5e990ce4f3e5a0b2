"""Which engines move KV with each other: those that have a key of the set (`--transfer-key-dir`).

    producer's answer    its kv_transfer_params prove that a key's holder named this address
    reader               connects to proven producers only, and has them prove themselves
    producer             serves proven readers only

An engine without a key directory proves nothing, and moves KV only with others without one.

Errors: `KvRefused`: the other engine has not proven itself.
"""

import socket
import time
from collections.abc import Mapping
from typing import Final

from tandem_contract import peer_handshake
from tandem_contract.peer_handshake import Handshake, PeerRejected
from tandem_contract.plan_keys import PlanKeys
from tandem_contract.producer_proof import is_proven, sign_producer
from tandem_contract.transfer_params import TransferParams

from ..types import KvBroken, KvLayout, KvRefused
from .wire import (
    VERSION,
    Challenged,
    Hello,
    Proven,
    Refused,
    receive_frame_async,
    send_frames_async,
    to_producer,
    to_reader,
)

_HANDSHAKE: Final = Handshake(b"tandem-kv-transfer", version=1)
_RELOAD_SECONDS: Final = 1.0
"""The keys are read again before use, at most this often: far less than the time for which a
rotation keeps both keys."""


class Trust:
    """The keys of this engine, and what is proven with them. For one event loop."""

    def __init__(self, keys: PlanKeys | None = None) -> None:
        self._keys = keys or PlanKeys(None)
        self._reload_at = time.monotonic() + _RELOAD_SECONDS

    def producer_proof(self, engine_id: str, host: str, port: int) -> str | None:
        """`tandem_producer_proof` of this engine; None without a key."""
        keys = self._current()
        return sign_producer(engine_id, host, port, keys, now=time.time()) if keys else None

    def check_producer(self, params: TransferParams) -> None:
        """Raise KvRefused unless a holder of a key has named the producer of `params`."""
        keys = self._current()
        engine, host, port = params.remote_engine_id, params.remote_host, params.remote_port
        proof = params.tandem_producer_proof
        if self._keys.is_required and not is_proven(proof, engine, host, port, keys):
            raise KvRefused(
                "tandem_producer_proof is missing or wrong: the prefill engine has no transfer key"
                " of this engine, or the parameters are not a prefill engine's"
            )

    async def introduce(self, sock: socket.socket, engine_id: str, layout: KvLayout) -> None:
        """Say Hello as a reader; with keys, both sides prove themselves.

        Raises KvRefused, KvBroken, OSError.
        """
        keys, first = self._current(), None
        if self._keys.is_required:
            first = _HANDSHAKE.hello("reader", keys)
        await send_frames_async(sock, Hello(VERSION, engine_id, layout, first))
        if first is None:
            return
        frame = await receive_frame_async(sock, to_reader)
        if isinstance(frame, Refused):
            raise KvRefused(frame.reason)
        if not isinstance(frame, Challenged):
            raise KvBroken(f"got the frame {type(frame).__name__}, expected Challenged")
        try:
            proof, _ = _HANDSHAKE.prove(first, frame.answer, keys)
        except PeerRejected as err:
            raise KvRefused(f"the producer's proof: {err}") from err
        await send_frames_async(sock, Proven(proof))

    async def admit(self, sock: socket.socket, first: peer_handshake.Hello | None) -> None:
        """Have a reader prove itself that sent `first` in its Hello.

        Raises KvRefused unless both have a key in common, or neither has any; KvBroken, OSError.
        """
        if first is None and not self._keys.is_required:
            return
        if first is None:
            raise KvRefused("this engine serves readers with a transfer key only")
        if not self._keys.is_required:
            raise KvRefused("the reader has transfer keys, this engine has no --transfer-key-dir")
        try:
            answer = _HANDSHAKE.challenge(first, "producer", self._current(), time.time())
            await send_frames_async(sock, Challenged(answer))
            proven = await receive_frame_async(sock, to_producer)
            if not isinstance(proven, Proven):
                raise KvRefused("the second frame is not Proven")
            _HANDSHAKE.accept(proven.proof, first, answer, self._current())
        except PeerRejected as err:
            raise KvRefused(f"the reader's proof: {err}") from err

    def _current(self) -> Mapping[str, bytes]:
        if time.monotonic() >= self._reload_at:
            self._keys.reload()
            self._reload_at = time.monotonic() + _RELOAD_SECONDS
        return self._keys.current
