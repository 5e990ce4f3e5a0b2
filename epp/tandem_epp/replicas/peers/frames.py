"""What replicas tell each other, and how it is framed. Pure.

Each replica connects to each other one and sends over the connections that it opened; over those
that others opened it receives. A connection is a WebSocket at `PATH`, port 9005, with binary
messages:

    dialer → listener   Hello       version, instance, nonce, ids of the keys that it holds
    listener → dialer   Challenge   version, instance, nonce, id of the key to use, proof
    dialer → listener   Proof
    dialer → listener   frames: a snapshot first, then updates, an empty one every second at rest
    listener → dialer   acknowledgements: the epoch and number of a frame

`handshake` describes proofs and the MAC that each message after the handshake carries. A message
is msgpack; structs are arrays, so a later version may append fields, which older ones ignore.

A frame is `[epoch, number, is_snapshot, [[kind, event], ...], is_complete]`. A dialer begins a new
epoch with every connection, whenever its queue overflowed, and when an acknowledgement asks for it,
for instance because the receiver discovered pods that it had been told of. The first frame of an
epoch begins a snapshot: the receiver drops the requests that it knew of this peer. Within an epoch
frames are numbered from 0 without a gap. A receiver ignores frames of older epochs, frames that it
already has, and after a gap all frames until the next snapshot; so every frame is applied at most
once and in order.

Events of an unknown kind, and of answers that ended in an unknown way, are ignored. The version of
`HANDSHAKE` changes only when an older replica would misunderstand a newer one; replicas of two
versions do not connect.

Times in events are durations, because the clocks of two nodes differ.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from tandem_contract.chains import Chain
from tandem_contract.peer_handshake import Handshake

from ...exchange import Ending

HANDSHAKE: Final = Handshake(b"tandem-peer", version=1)
PATH: Final = "/v1/peer"
MAX_CHAIN: Final = 32_768
"""Hashes of one chain that are sent, at most: 256 KiB. A longer chain is cut at its end, so other
replicas know a shorter prefix."""

EMPTY: Final = msgspec.Raw(b"\x80")
"""A map without members, in msgpack."""


class RequestStarted(msgspec.Struct, frozen=True, array_like=True):
    """The peer placed a request; in a snapshot: a request that has not ended."""

    request: int
    """Number of the request, unique in one process of the peer."""
    decode: str
    """Name of the decode pod."""
    prefill: tuple[str, ...] = ()
    """Names of the prefill pods: the choice, then the retries; empty without a split."""
    size: msgspec.Raw = EMPTY
    """`estimates.request_load.PlacedPrompt` as a map: unknown members are ignored."""
    status: int = 0
    """HTTP status of the response; 0: its headers have not passed yet."""
    can_fall_back: bool = True
    """Whether the sidecar may serve the request alone when the prefill fails."""
    age: float = 0.0
    """Seconds since the peer placed it."""
    chain: bytes = b""
    """The prompt's prefix chain, `pack`ed; may be cut."""
    model: str = ""
    """The model or LoRA adapter that the client asked for; empty: none, or a name too long."""
    assumed_tokens: int = 0
    """Length of a text before the engine has counted its tokens; 0: not a text."""
    fingerprint: int = 0
    """Equal for equal prompts, by which requests that fail are compared; 0: not read."""


class RequestAnswered(msgspec.Struct, frozen=True, array_like=True):
    """The response headers of a request passed: its prefill is over."""

    request: int
    response: msgspec.Raw
    """`exchange.ResponseHeaders` as a map: unknown members are ignored."""
    path: str = ""
    """The `RoutingPath` on which `beyond` was measured; empty: it was not."""
    beyond: float = 0.0
    """Seconds that the first token took beyond the terms of the cost: `estimates.overheads`."""


class RequestEnded(msgspec.Struct, frozen=True, array_like=True):
    """A request ended, in whatever way."""

    request: int


class PodLearned(msgspec.Struct, frozen=True, array_like=True):
    """What the peer learned of a pod from its answers, in a snapshot."""

    pod: str
    samples: Mapping[str, Sequence[Sequence[float]]]
    """As in `estimates.shared_samples`."""
    token_scale: float = 1.0
    """Tokens per assumed token of the texts that the pod serves."""


class PodEjected(msgspec.Struct, frozen=True, array_like=True):
    """The peer has ejected a pod for its errors, just now or in a snapshot."""

    pod: str
    seconds: float
    """Until the peer probes it."""


class PodFailed(msgspec.Struct, frozen=True, array_like=True):
    """The latest outcomes at a pod as the peer counted them, in a snapshot."""

    pod: str
    failures: float
    """Failures and answers fade as `backends.health` says."""
    answers: float
    in_a_row: int
    """Failures since the last answer."""
    streak: int = 0
    """Ejections of which each came soon after the one before."""
    returned: float = 0.0
    """Seconds since the last of them ended."""
    are_several: bool = True
    """Whether the failures are of more than one request."""


class TextsCounted(msgspec.Struct, frozen=True, array_like=True):
    """How many tokens the texts of a model have, in a snapshot."""

    model: str
    """Empty for requests that name none."""
    assumed: float
    """Tokens that their bytes let assume; newer texts weigh more."""
    counted: float
    """Tokens that engines counted of the same texts."""


class FirstTokensTook(msgspec.Struct, frozen=True, array_like=True):
    """What the latest first tokens of a path took beyond the terms of the cost, in a snapshot."""

    path: str
    """A `RoutingPath`."""
    seconds: tuple[float, ...]
    """The oldest first."""
    age: float
    """Seconds since the latest one."""


class AnswerBroke(msgspec.Struct, frozen=True, array_like=True):
    """An answer to a request of the peer ended too early, after its headers."""

    backend: str
    """`ip:port` of the pod."""
    age: float
    """Seconds since the peer placed the request."""
    ending: Ending = Ending.BROKEN


class BrokenLogged(msgspec.Struct, frozen=True, array_like=True):
    """The peer's access log shows a broken answer of a request that the peer did not place. It
    counts if the receiver placed it, who then tells all with `AnswerBroke`."""

    request_id: str
    backend: str
    """`ip:port` of the pod."""
    ending: Ending = Ending.BROKEN


class PrefixCached(msgspec.Struct, frozen=True, array_like=True):
    """A pod caches the KV of this chain, in a snapshot."""

    pod: str
    chain: bytes
    """`pack`ed."""


class AdaptersLoaded(msgspec.Struct, frozen=True, array_like=True):
    """LoRA adapters that the slots of a pod probably hold, in a snapshot."""

    pod: str
    adapters: tuple[str, ...]
    """The least recently used first."""


class RequestsWait(msgspec.Struct, frozen=True, array_like=True):
    """So many requests wait at the peer in flow control, now or in a snapshot."""

    model: str
    """Empty: all models are one."""
    priority: int
    is_split: bool
    """Whether they need a prefill pod."""
    requests: int
    size: int = 0
    """Bytes of their bodies."""
    turn: float = 0.0
    """The virtual time at which the next of them begins: `flow.queue`."""
    tenant: str = ""
    """Whose request went just now."""
    tokens: float = 0.0
    """Of its prompt and expected answer; 0: none went."""


Event: TypeAlias = (
    RequestStarted
    | RequestAnswered
    | RequestEnded
    | PodLearned
    | PodEjected
    | PrefixCached
    | AnswerBroke
    | BrokenLogged
    | PodFailed
    | TextsCounted
    | AdaptersLoaded
    | FirstTokensTook
    | RequestsWait
)

_KINDS: Final[dict[type, int]] = {
    RequestStarted: 1,
    RequestAnswered: 2,
    RequestEnded: 3,
    PodLearned: 4,
    PodEjected: 5,
    PrefixCached: 6,
    AnswerBroke: 7,
    BrokenLogged: 8,
    PodFailed: 9,
    TextsCounted: 10,
    AdaptersLoaded: 13,
    FirstTokensTook: 14,
    RequestsWait: 15,
}
"""Numbers are never used again for another kind: 11 and 12 were."""
_DECODERS: Final[dict[int, msgspec.msgpack.Decoder[Event]]] = {
    kind: msgspec.msgpack.Decoder(event) for event, kind in _KINDS.items()
}


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A batch of events."""

    epoch: int
    number: int
    is_snapshot: bool
    """Whether it is the first one of its epoch."""
    events: list[tuple[int, msgspec.Raw]] = []
    """Kind and event."""
    is_complete: bool = False
    """Whether all of the epoch's snapshot has been sent, this frame included. A peer of an older
    version does not say."""


class Acknowledgement(msgspec.Struct, frozen=True, array_like=True):
    """The listener has received this frame."""

    epoch: int
    number: int
    needs_snapshot: bool = False
    """Whether it missed events of this epoch: the dialer begins another one, with a snapshot."""


_encoder: Final = msgspec.msgpack.Encoder()
_frame: Final = msgspec.msgpack.Decoder(Frame)
_acknowledgement: Final = msgspec.msgpack.Decoder(Acknowledgement)


def pack(chain: Chain) -> bytes:
    """The hashes of a chain, 8 bytes each, little-endian; at most MAX_CHAIN."""
    return chain[:MAX_CHAIN].tobytes()


def unpack(chain: bytes) -> Chain:
    """The hashes of a `pack`ed chain; bytes at the end that are no whole hash are ignored."""
    hashes = array("Q")
    hashes.frombytes(chain[: len(chain) & ~7][: 8 * MAX_CHAIN])
    return hashes


def encode_event(event: Event) -> bytes:
    """The event as an element of a frame: kind and content."""
    return _encoder.encode((_KINDS[type(event)], event))


def encode_frame(
    epoch: int,
    number: int,
    events: Iterable[bytes],
    *,
    is_snapshot: bool,
    is_complete: bool = True,
) -> bytes:
    """A frame of encoded events."""
    raw = [msgspec.Raw(event) for event in events]
    return _encoder.encode((epoch, number, is_snapshot, raw, is_complete))


def decode_frame(data: bytes) -> Frame:
    """Raises msgspec.MsgspecError."""
    return _frame.decode(data)


def decode_events(frame: Frame) -> Iterator[Event | None]:
    """The events of a frame in order; None for one that only a newer version understands. Raises
    msgspec.MsgspecError at an event that is malformed."""
    for kind, content in frame.events:
        decoder = _DECODERS.get(kind)
        event = None if decoder is None else decoder.decode(content)
        if isinstance(event, AnswerBroke | BrokenLogged) and event.ending is Ending.UNKNOWN:
            event = None
        yield event


def encode_acknowledgement(frame: Frame, *, needs_snapshot: bool = False) -> bytes:
    return _encoder.encode(Acknowledgement(frame.epoch, frame.number, needs_snapshot))


def decode_acknowledgement(data: bytes) -> Acknowledgement:
    """Raises msgspec.MsgspecError."""
    return _acknowledgement.decode(data)
