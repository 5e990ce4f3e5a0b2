"""Streams of events: the editor of their usage, and the cut between two events.

First byte: the size of the pieces. The rest: the payload of an answer, and, for the cut, the same
bytes as an engine's chunked body.
"""

import json
from contextlib import suppress
from typing import Any

import h11

from tandem_http1.answers import CutPoint, EventChunks
from tandem_http1.framing import LAST_CHUNK, BadFraming, chunk
from tandem_http1.messages import ResponseHead
from tandem_sidecar.bodies.usage import (
    UsageCorrector,
    correct_usage,
    read_cached_tokens,
    read_token_counts,
)

from .pieces import in_pieces

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked"
_CACHED = 32
_EVENT = b"data: the last\n\n"


def check(data: bytes) -> None:
    size, payload = data[0] if data else 0, data[1:]
    pieces = in_pieces(size, payload)
    for stream in (True, False):
        assert _edited(pieces, None, stream=stream) == payload
        whole = _edited([payload], _CACHED, stream=stream)
        assert whole == _edited(pieces, _CACHED, stream=stream), "the edit depends on the pieces"
    _check_edit(payload)
    read_token_counts(payload)
    for sent in (pieces, [chunk(piece) for piece in pieces]):
        _check_cut(sent)


def _edited(pieces: list[bytes], cached: int | None, *, stream: bool) -> bytes:
    corrector = UsageCorrector(cached, stream=stream)
    return b"".join(corrector.take(piece, last=False) for piece in pieces) + corrector.take(
        b"", last=True
    )


def _check_edit(answer: bytes) -> None:
    """Only the counts of the usage change."""
    edited = correct_usage(answer, _CACHED)
    assert correct_usage(edited, _CACHED) == edited
    try:
        answer.decode()
    except UnicodeDecodeError:
        return
    if edited == answer:
        return
    before, after = _object(answer), _object(edited)
    assert _without_usage(before) == _without_usage(after)
    if isinstance(after.get("usage"), dict):
        assert read_cached_tokens(edited) in (0, _CACHED)


def _object(answer: bytes) -> dict[str, Any]:
    read = json.loads(answer, parse_int=str, parse_float=str)
    assert isinstance(read, dict)
    return read


def _without_usage(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer without the members in which its usage may stand."""
    kept = {name: value for name, value in answer.items() if name != "usage"}
    for name in ("response", "message"):
        if isinstance(kept.get(name), dict):
            kept[name] = {key: value for key, value in kept[name].items() if key != "usage"}
    return kept


def _check_cut(pieces: list[bytes]) -> None:
    """A last event may be added where the cut says that it may."""
    head = ResponseHead(_HEAD, b"POST")
    events, sent, received = EventChunks(head, wire=True), b"", b""
    with suppress(BadFraming):
        for piece in pieces:
            received += piece
            head.framing.feed(piece, None)
            sent += events.take(piece)
            assert received.startswith(sent)
            if head.framing.done:
                return
        if events.cut_point() is CutPoint.BETWEEN_CHUNKS:
            payload = _payload_of_h11(sent + chunk(_EVENT) + LAST_CHUNK)
            assert payload is None or payload.endswith(_EVENT)


def _payload_of_h11(body: bytes) -> bytes | None:
    """The payload of a chunked body as h11 reads it; None: h11 refuses the coding."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(_HEAD + b"\r\n\r\n" + body)
    payload = b""
    try:
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            assert event is not h11.NEED_DATA, "a client waits for the rest of the body"
            if isinstance(event, h11.Data):
                payload += event.data
    except h11.RemoteProtocolError:
        return None
    return payload
