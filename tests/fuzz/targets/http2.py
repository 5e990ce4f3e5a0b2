"""The EPP's HTTP/2 connection and its gRPC calls.

First byte: the size of the pieces; if it is odd, the rest is what a client sends after its preface,
else it describes frames: kind, flags, stream and length, a byte each, and the payload.
"""

from tandem_epp.server.http2 import frames
from tests.epp.server.http2.calls import Calls, check_invariants
from tests.epp.server.http2.client import START, parse

from .pieces import in_pieces

_KINDS = 13


def check(data: bytes) -> None:
    size, wire = data[0] if data else 0, data[1:]
    if size % 2 == 0:
        wire = _frames(wire)
    if b"fail" in wire:
        # The handler of the tests raises an error of its own for it.
        return
    whole, pieces = _received([START + wire]), _received([START, *in_pieces(size, wire)])
    for calls in (whole, pieces):
        parse(calls.connection.take())
    others = _messages(pieces)
    for stream, messages in _messages(whole).items():
        # Those of a stream that is reset in the same read are not delivered.
        assert messages == others.get(stream, [])[: len(messages)]
    for calls in (whole, pieces):
        check_invariants(calls)


def _received(parts: list[bytes]) -> Calls:
    calls = Calls()
    for part in parts:
        calls.session.receive(part, 0.0)
    return calls


def _messages(calls: Calls) -> dict[int, list[bytes]]:
    """What the handlers got, by stream."""
    return {handler.call.stream.id: handler.messages for handler in calls.handlers}


def _frames(data: bytes) -> bytes:
    described, at = [], 0
    while at + 4 <= len(data):
        kind, flags, stream, length = data[at : at + 4]
        payload = data[at + 4 : at + 4 + length]
        described.append(frames.frame(kind % _KINDS, flags, stream, payload))
        at += 4 + length
    return b"".join(described)
