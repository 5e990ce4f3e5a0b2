r"""The protocol between producer and reader: its frames, and how they are sent and received.

    reader                                  producer
      ── Hello ──────────────────────────────►     engine id, layout, a challenge
      ◄─────────────────────────── Challenged ──   \ only with transfer keys: each side proves that
      ── Proven ─────────────────────────────►     / it has one of them
      ── Read ───────────────────────────────►     request id, prompt hash, tokens wanted
      ◄───────────────────────────── Welcome ──    or Refused, naming the field and both values
      ◄── Segment │ payload │ digest ─────────┐    one layer, a run of the prompt's blocks;
      ◄── Segment │ payload │ digest          │    as soon as the prefill published them
      ◄── Waiting ────────────────────────────┘    nothing is ready yet: the producer is alive
      ── Done ───────────────────────────────►     every digest was right
      ◄────────────────────────────────── Ok ──    the blocks are freed

      ── Hello, …, Renew ──►  ◄── Welcome, Ok ──   the lease starts again
      ── Hello, …, Release ─► ◄── Welcome, Ok ──   freed without a read

A frame is four bytes of length, big-endian, and a msgpack map tagged `type`, at most MAX_FRAME
bytes. The payload of a Segment is raw: the blocks in prompt order, each `layers[l][block]` as it
lies in memory; its length follows from the layout. The digest is xxh3-64 of the payload, eight
bytes, big-endian, and comes last: the producer does not send it when the blocks were freed
meanwhile. The reader names no block: the producer knows which blocks a request has.

The keys prove who connects and who answers (`trust`); what follows is neither encrypted nor
authenticated, so a network whose packets others can change needs an encrypting overlay.

Errors: `KvBroken` for a closed connection and for malformed frames. OSError and TimeoutError of the
socket are passed on, since only the caller knows the peer's name.
"""

import asyncio
import socket
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec

from tandem_contract import peer_handshake

from ..types import KvBroken, KvLayout

VERSION: Final = 2
"""Incremented when an older peer could misread a frame; both sides must have the same."""
MAX_FRAME: Final = 8192
"""Most bytes of a frame's body; the longest frame, a Hello, needs half of it."""
MAX_ID: Final = 512
"""Most characters of an engine id or request id."""
MAX_SECONDS: Final = 86400.0
"""Most seconds of a lease, or of a reader's patience: a day."""
DIGEST_BYTES: Final = 8
_LENGTH_BYTES: Final = 4

_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID)]
# Bounds keep a hostile frame from costing memory or overflowing an offset.
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Limits for slow, silent and many peers; each side applies its own."""

    handshake: float = 5.0
    """Seconds to connect and to exchange the first frames. Too low: refusals on a loaded host."""
    idle: float = 10.0
    """Seconds without a byte moving before a peer counts as gone; the hand-off's own time limit
    is 10 s too. Too low: broken pulls when a host pauses; too high: a dead peer is noticed late."""
    pull: float = 120.0
    """Seconds that a pull may take, its wait for a running prefill included: a producer that sends
    only Waiting must not hold a request for ever. Too low: long prompts on slow networks are
    recomputed; too high: clients of a stalled producer wait that long."""
    connections: int = 128
    """Readers served, or pulls running, at the same time; each may need a thread. Too low: pulls
    are refused in a burst."""


DEFAULT_LIMITS: Final = TransferLimits()


class Frame(msgspec.Struct, frozen=True, tag=True):
    """Root of all frames; the tag is the class's name."""


class Hello(Frame, frozen=True):
    """First frame of a connection: the engine that the reader expects, and its own KV layout."""

    version: int
    engine_id: _Id
    layout: KvLayout
    challenge: peer_handshake.Hello | None = None
    """The beginning of the proof that both have a transfer key; None: the reader has none."""


class Proven(Frame, frozen=True):
    """The reader has the key, too."""

    proof: peer_handshake.Proof


class Read(Frame, frozen=True):
    """Send the KV of the first `tokens` prompt tokens, except the first `skip_blocks` blocks."""

    request_id: _Id
    skip_blocks: _Count
    tokens: _Count
    patience: Annotated[float, msgspec.Meta(ge=0.01, le=MAX_SECONDS)]
    """Seconds of silence after which the reader gives up; Waiting comes three times as often."""
    prompt_hash: _Id
    """`prefix.prompt_hash` of the reader's prompt, which the producer's must equal."""
    is_stream: bool = False
    """Whether `request_id` is a stream's, whose prompt may not have been submitted yet."""


class Renew(Frame, frozen=True):
    """The reader is queued and will read: start the lease again."""

    request_id: _Id


class Release(Frame, frozen=True):
    """The KV will not be read: free it."""

    request_id: _Id


class Done(Frame, frozen=True):
    """Every segment arrived and every digest was right."""


class Challenged(Frame, frozen=True):
    """The producer has a key of the reader's, and asks for the reader's proof."""

    answer: peer_handshake.Challenge


class Welcome(Frame, frozen=True):
    """Engine id and layout agree; `lease` is in seconds."""

    lease: _Seconds


class Refused(Frame, frozen=True):
    """The producer refuses and closes the connection."""

    reason: str


class Segment(Frame, frozen=True):
    """Payload and digest follow: blocks `first` to `first + blocks` of the prompt, one layer."""

    layer: _Count
    first: _Count
    blocks: _Count


class Waiting(Frame, frozen=True):
    """The prefill is still running and nothing is ready to be sent."""


class Ok(Frame, frozen=True):
    """The answer to Renew, Release and Done."""


ToProducer: TypeAlias = Hello | Proven | Read | Renew | Release | Done
ToReader: TypeAlias = Challenged | Welcome | Refused | Segment | Waiting | Ok

to_producer: Final = msgspec.msgpack.Decoder[ToProducer](ToProducer)
to_reader: Final = msgspec.msgpack.Decoder[ToReader](ToReader)
_encode: Final = msgspec.msgpack.Encoder().encode

_T = TypeVar("_T")


def pack(*frames: Frame) -> bytes:
    """The frames as they go over the wire, one after the other."""
    bodies = [_encode(frame) for frame in frames]
    return b"".join(len(body).to_bytes(_LENGTH_BYTES, "big") + body for body in bodies)


def disagreement(hello: Hello, engine_id: str, layout: KvLayout) -> str | None:
    """The first field in which a reader's Hello differs, with both values; None when all agree."""
    pairs = [("version", hello.version, VERSION), ("engine_id", hello.engine_id, engine_id)]
    pairs += [
        (f"layout.{name}", getattr(hello.layout, name), getattr(layout, name))
        for name in KvLayout.__dataclass_fields__
    ]
    for name, theirs, ours in pairs:
        # The first difference is enough: the reader refuses or recomputes in any case.
        if theirs != ours:
            return f"{name}: the reader expects {theirs!r}, the producer has {ours!r}"
    return None


def prepare(sock: socket.socket, limits: TransferLimits) -> None:
    """Set socket options: send small frames at once, end the connection to an unreachable peer."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Linux only. Without it the kernel retransmits to a vanished peer for many minutes.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.idle * 1000))


def receive_frame(sock: socket.socket, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    """The next frame from a blocking socket. Raises KvBroken, OSError, TimeoutError."""
    head = memoryview(bytearray(_LENGTH_BYTES))
    receive_into(sock, [head])
    body = memoryview(bytearray(_body_length(head)))
    receive_into(sock, [body])
    return _decode(decoder, body)


def receive_into(sock: socket.socket, buffers: list[memoryview]) -> None:
    """Fill the buffers from a blocking socket. Raises KvBroken at the end of the stream."""
    while buffers:
        # May fill only a part of the buffers; 0 is the end of the stream.
        count = sock.recvmsg_into(buffers)[0]
        if count == 0:
            raise KvBroken("the peer closed the connection")
        buffers = unfilled(buffers, count)


def unfilled(buffers: list[memoryview], count: int) -> list[memoryview]:
    """The rest of the buffers after their first `count` bytes."""
    for i, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[i + 1 :]]
        count -= len(buffer)
    return []


async def receive_frame_async(sock: socket.socket, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    """The next frame from a non-blocking socket. Raises KvBroken, OSError."""
    length = _body_length(await _receive_exactly(sock, _LENGTH_BYTES))
    return _decode(decoder, await _receive_exactly(sock, length))


async def send_frames_async(sock: socket.socket, *frames: Frame) -> None:
    """Send the frames over a non-blocking socket. Raises OSError."""
    await asyncio.get_running_loop().sock_sendall(sock, pack(*frames))


async def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    # Frames are small, so joining the parts costs little.
    received = b""
    while len(received) < count:
        data = await loop.sock_recv(sock, count - len(received))
        if not data:
            raise KvBroken("the peer closed the connection")
        received += data
    return received


def _body_length(head: bytes | memoryview) -> int:
    length = int.from_bytes(head, "big")
    # Before the body is allocated: a peer must not choose how much memory this takes.
    if not 0 < length <= MAX_FRAME:
        raise KvBroken(f"malformed frame: a length of {length} bytes, the limit is {MAX_FRAME}")
    return length


def _decode(decoder: msgspec.msgpack.Decoder[_T], body: bytes | memoryview) -> _T:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as err:
        raise KvBroken(f"malformed frame: {err}") from err
