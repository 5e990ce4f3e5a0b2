"""Mutual authentication by shared keys, and the MAC of messages after it. Pure.

Used by the channel between the replicas of an EPP (`tandem_epp.replicas.peers`) and by the KV
transfer of the reference engine (`tandem_engine.transfer`), each with a name and version of its
own.

    T        = msgpack [Hello, Challenge without proof]: versions, instances, nonces, key ids, key
    listener proof    HMAC-SHA256(key, name " listener " T), checked by the dialer
    dialer proof      HMAC-SHA256(key, name " dialer " T), checked by the listener
    frames            HMAC-SHA256(key, name " frames " T) is the key of frames' MACs
    acknowledgements  HMAC-SHA256(key, name " acknowledgements " T) is that of their MACs

    message = MAC, 16 bytes · content        MAC = HMAC-SHA256(session key, counter · content)

The key is the one that would sign a plan now among those that both hold, so a rotation needs no
restart: both hold the old and the new key for a while. Both sides choose a random nonce, so no
recorded handshake can be replayed. The counter, which is not sent, makes a message that is
repeated, reordered or left out fail. Messages are authenticated, not encrypted.

Errors: `PeerRejected` with the reason `no_keys`, `other_keys`, `wrong_proof`, `version`,
`malformed` or `wrong_mac`.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from .plan import signing_key

MAC_BYTES: Final = 16
_NONCE_BYTES: Final = 32


class PeerRejected(Exception):
    """The peer is none of ours, or a message is not the peer's; `reason` is a metric label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Dialer → listener."""

    version: int
    instance: str
    """Random id of the dialer's process."""
    nonce: bytes
    keys: list[str]
    """Ids of the keys that the dialer holds."""


class Challenge(msgspec.Struct, frozen=True, array_like=True):
    """Listener → dialer."""

    version: int
    instance: str
    nonce: bytes
    key: str
    """Id of the key that both use."""
    proof: bytes = b""


class Proof(msgspec.Struct, frozen=True, array_like=True):
    """Dialer → listener."""

    proof: bytes


class Session(NamedTuple):
    """What both sides know after the handshake."""

    peer: str
    """The other side's instance."""
    key: str
    """Id of the plan key."""
    frames: "MessageMac"
    acknowledgements: "MessageMac"


class MessageMac:
    """Seals or opens the messages of one direction, in order."""

    def __init__(self, secret: bytes) -> None:
        self._keyed = hmac.new(secret, digestmod=hashlib.sha256)
        self._counter = 0

    def seal(self, content: bytes) -> bytes:
        """The next message to send."""
        return self._mac(content) + content

    def open(self, message: bytes) -> bytes:
        """The content of the next message. Raises PeerRejected."""
        content = message[MAC_BYTES:]
        if not hmac.compare_digest(message[:MAC_BYTES], self._mac(content)):
            raise PeerRejected("wrong_mac", "a message's MAC is wrong: it was changed or repeated")
        return content

    def _mac(self, content: bytes) -> bytes:
        mac = self._keyed.copy()
        mac.update(self._counter.to_bytes(8))
        mac.update(content)
        self._counter += 1
        return mac.digest()[:MAC_BYTES]


class Handshake(NamedTuple):
    """The handshake of one protocol."""

    name: bytes
    """Keeps the proofs of one protocol from counting in another one with the same keys."""
    version: int
    """Both sides must have the same."""

    def hello(self, instance: str, keys: Mapping[str, bytes]) -> Hello:
        """The dialer's first message."""
        return Hello(self.version, instance, secrets.token_bytes(_NONCE_BYTES), sorted(keys))

    def challenge(
        self, first: Hello, instance: str, keys: Mapping[str, bytes], now: float
    ) -> Challenge:
        """The listener's answer; `now` is Unix seconds. Raises PeerRejected."""
        self._check_version(first.version)
        if len(first.nonce) != _NONCE_BYTES:
            raise PeerRejected("malformed", "the peer's nonce has the wrong length")
        common = {name: keys[name] for name in first.keys if name in keys}
        if not common:
            raise PeerRejected(
                "other_keys" if keys else "no_keys",
                "the peer and this process have no key in common",
            )
        nonce = secrets.token_bytes(_NONCE_BYTES)
        answer = Challenge(self.version, instance, nonce, signing_key(common, now))
        proof = self._derive(keys[answer.key], b"listener", first, answer)
        return msgspec.structs.replace(answer, proof=proof)

    def prove(
        self, first: Hello, answer: Challenge, keys: Mapping[str, bytes]
    ) -> tuple[Proof, Session]:
        """The dialer's proof and session. Raises PeerRejected unless the listener has the key."""
        self._check_version(answer.version)
        key = keys.get(answer.key)
        if key is None or answer.key not in first.keys or len(answer.nonce) != _NONCE_BYTES:
            raise PeerRejected("malformed", "the peer chose a key that was not offered")
        _compare(answer.proof, self._derive(key, b"listener", first, answer))
        proof = Proof(self._derive(key, b"dialer", first, answer))
        return proof, self._session(answer.instance, key, first, answer)

    def accept(
        self, proof: Proof, first: Hello, answer: Challenge, keys: Mapping[str, bytes]
    ) -> Session:
        """The listener's session. Raises PeerRejected unless the dialer has the key."""
        key = keys.get(answer.key)
        if key is None:
            raise PeerRejected("other_keys", "the key was removed during the handshake")
        _compare(proof.proof, self._derive(key, b"dialer", first, answer))
        return self._session(first.instance, key, first, answer)

    def _session(self, peer: str, key: bytes, first: Hello, answer: Challenge) -> Session:
        frames = self._derive(key, b"frames", first, answer)
        acknowledgements = self._derive(key, b"acknowledgements", first, answer)
        return Session(peer, answer.key, MessageMac(frames), MessageMac(acknowledgements))

    def _derive(self, key: bytes, purpose: bytes, first: Hello, answer: Challenge) -> bytes:
        transcript = msgspec.msgpack.encode((first, msgspec.structs.replace(answer, proof=b"")))
        return hmac.digest(key, self.name + b" " + purpose + b" " + transcript, "sha256")

    def _check_version(self, theirs: int) -> None:
        if theirs != self.version:
            raise PeerRejected(
                "version", f"the peer speaks version {theirs}, this process {self.version}"
            )


def _compare(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise PeerRejected("wrong_proof", "the peer's key has the same id and another secret")
