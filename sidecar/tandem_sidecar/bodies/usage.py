"""The count of cached tokens, where the decode engine gets it wrong.

An engine that knows nothing of its producer's cache counts every token it received as cached; the
true count is the prefill's. Only the `usage` of an answer is touched; every other byte stays.

    cached_tokens(answer)            what a prefill answer found cached
    corrected(answer, cached)        one JSON answer, whole
    Corrector(cached, stream=…).take(payload, last)   the same for bytes as they come
"""

from typing import Final

import msgspec
from msgspec import Raw

from .parse import decode_members

_USAGE: Final = b'"usage"'
_DATA: Final = b"data:"


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_answer: Final = msgspec.json.Decoder(_Answer)


def cached_tokens(answer: bytes) -> int:
    """What the usage of a prefill answer counts as cached; 0 where it says nothing."""
    try:
        usage = _answer.decode(answer).usage
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0
    if usage is None:
        return 0
    details = usage.prompt_tokens_details or usage.input_tokens_details
    found = usage.cache_read_input_tokens if details is None else details.cached_tokens
    return found or 0


def corrected(answer: bytes, cached: int) -> bytes:
    """A JSON answer, or an event's JSON, with `cached` as its usage's count of cached tokens.

    The same bytes when it has no usage that counts them. In messages' shape input tokens leave
    out the cached ones, so that they change together.
    """
    if _USAGE not in answer:
        return answer
    for path in (("usage",), ("response", "usage"), ("message", "usage")):
        usage = _at(answer, path)
        if usage is not None:
            return _replaced(answer, path, _corrected_usage(usage, cached))
    return answer


class Corrector:
    """Corrects an answer's payload as it comes; payload is what chunked coding has been taken off.

    A stream is handed on by whole lines, at once; one JSON answer is held until it is complete.
    Lengths may change, so the caller frames what comes out anew.
    """

    def __init__(self, cached: int, *, stream: bool) -> None:
        self._cached = cached
        self._stream = stream
        self._held = b""

    def take(self, payload: bytes, *, last: bool) -> bytes:
        """What may be handed on now."""
        data = self._held + payload
        complete = len(data) if last else data.rfind(b"\n") + 1 if self._stream else 0
        self._held, data = data[complete:], data[:complete]
        return self._events(data) if self._stream else corrected(data, self._cached)

    def _events(self, data: bytes) -> bytes:
        if _USAGE not in data:
            return data
        return b"".join(self._line(line) for line in data.splitlines(keepends=True))

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(_DATA) or _USAGE not in line:
            return line
        return _DATA + corrected(line[len(_DATA) :], self._cached)


def _corrected_usage(usage: bytes, cached: int) -> bytes:
    new = str(cached).encode()
    for path in (
        ("prompt_tokens_details", "cached_tokens"),
        ("input_tokens_details", "cached_tokens"),
    ):
        if _at(usage, path) is not None:
            return _replaced(usage, path, new)
    read, rest = (_at(usage, (name,)) for name in ("cache_read_input_tokens", "input_tokens"))
    if read is None or rest is None or not (read.isdigit() and rest.isdigit()):
        return usage
    total = int(rest) + int(read)
    usage = _replaced(usage, ("input_tokens",), str(max(0, total - cached)).encode())
    return _replaced(usage, ("cache_read_input_tokens",), new)


def _at(data: bytes, path: tuple[str, ...]) -> bytes | None:
    """The encoded value at `path`; None where there is none, or not through objects."""
    value: bytes | Raw = data
    for key in path:
        try:
            members = decode_members(value)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        if key not in members:
            return None
        value = members[key]
    return bytes(value)


def _replaced(data: bytes, path: tuple[str, ...], new: bytes) -> bytes:
    """`data` with `new` at `path`; the same where there is nothing at it.

    Each level's value is looked for as bytes. The same bytes may stand elsewhere too, so the place
    is the one at which the change shows under the key.
    """
    key, rest = path[0], path[1:]
    old = _at(data, (key,))
    if old is None:
        return data
    if rest:
        new = _replaced(old, rest, new)
    start = data.find(old)
    while old != new and start >= 0:
        changed = data[:start] + new + data[start + len(old) :]
        if _at(changed, (key,)) == new:
            return changed
        start = data.find(old, start + 1)
    return data
