"""Answers to bodies: chunks that Envoy sends on, and responses whose model is changed. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final

from ...request.answered_model import AnsweredModel
from .messages import Answer, BodyMode, Continue, Part, StreamedChunk

CHUNK: Final = 62 * 1024
"""Bytes of body per answer. Envoy takes at most 64 KiB per message, including its envelope."""

# Constants, because an enum's members are looked up at each use.
_DUPLEX: Final = BodyMode.FULL_DUPLEX_STREAMED
_RESPONSE: Final = Part.RESPONSE_BODY


def answer_body(
    mode: BodyMode,
    model: AnsweredModel | None,
    body: bytes,
    end: bool,
    *,
    has_no_trailers: bool = False,
) -> Sequence[Answer]:
    """The answers to a part of a response, which ends if `end`; `model` changes it.
    `has_no_trailers`: a last part will come, so that the end of this one may wait for it: Tandem's
    Envoy, which alone sends bodies that are asked for, drops trailers of HTTP/1."""
    if mode is not _DUPLEX:
        changed = body
        if model is not None:
            # Otherwise trailers may come, whose answer carries no body.
            changed = model.feed(body, is_last=end) if has_no_trailers else model.replace(body)
        return (Continue(_RESPONSE, body=changed if changed != body else None),)
    # In full duplex Envoy forwards only what the EPP sends back.
    if model is not None:
        body = model.feed(body, is_last=end)
    if 0 < len(body) <= CHUNK:
        # Most chunks are a token or a few: this is the path that gateways take for each.
        return (StreamedChunk(_RESPONSE, body, end),)
    return tuple(split(_RESPONSE, body, end))


def answer_trailers(mode: BodyMode, model: AnsweredModel | None) -> Sequence[Answer]:
    """The answers to a response's trailers, before which comes what was held back of its body."""
    is_held = model is not None and mode is _DUPLEX
    rest = model.feed(b"", is_last=True) if is_held and model is not None else b""
    return (*split(_RESPONSE, rest, end=False), Continue(Part.RESPONSE_TRAILERS))


def split(part: Part, body: bytes, end: bool) -> Iterator[StreamedChunk]:
    """`body` in chunks of at most CHUNK bytes; an empty chunk only where it carries the end."""
    last = max(0, (len(body) - 1) // CHUNK)
    for i in range(last + 1):
        chunk = body[i * CHUNK : (i + 1) * CHUNK] if last else body
        if chunk or end:
            yield StreamedChunk(part, chunk, end and i == last)
