"""Reads the token counts of an answer's `usage`, and corrects its count of cached tokens.

A decode engine that does not know its producer's cache counts every token it received as cached;
the true count is in the prefill's answer. Only the `usage` of an answer changes; every other byte
stays as it was.

    read_token_counts(answer)                   the counts in any bytes of an answer
    read_cached_tokens(answer)                  the count in a prefill answer
    read_created_tokens(answer)                 the same, of tokens written to the cache
    correct_usage(answer, cached)               a complete JSON answer
    UsageCorrector(cached, stream=…).take(…)    an answer as its bytes arrive
"""

import re
from typing import Final

import msgspec
from msgspec import Raw

from tandem_contract.api_grammar import GRAMMARS

from .parse import decode_members

_USAGE: Final = b'"usage"'
_USAGE_OBJECT: Final = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
"""A `usage` and its value, in which objects are nested at most once."""
_USAGE_PATHS: Final = tuple(
    dict.fromkeys(path for grammar in GRAMMARS.values() for path in grammar.usage)
)
_DATA: Final = b"data:"
_READ: Final = "cache_read_input_tokens"
_WRITTEN: Final = "cache_creation_input_tokens"
_REST: Final = "input_tokens"
_MAX_HELD: Final = 64 * 1024
"""Largest unfinished event, in bytes, of which complete lines are held back too."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class TokenCounts(msgspec.Struct, frozen=True, gc=False):
    """Token counts of an answer's usage; None: not in it."""

    prompt: int | None = None
    cached: int | None = None
    """Prompt tokens found in the engine's prefix cache."""
    generated: int | None = None

    @property
    def computed(self) -> int | None:
        """Prompt tokens that the engine computed."""
        if self.prompt is None or self.cached is None:
            return None
        return max(0, self.prompt - self.cached)


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_answer: Final = msgspec.json.Decoder(_Answer)
_usage: Final = msgspec.json.Decoder(_Usage)
_NO_COUNTS: Final = TokenCounts()


def read_token_counts(data: bytes) -> TokenCounts:
    """The counts of the last `usage` in `data`, which may be an answer or any part of it.

    Only the usage is decoded, because an answer may list thousands of token ids. Within a text the
    name would stand between escaped quotes, so no text is mistaken for it.
    """
    start = data.rfind(_USAGE)
    found = _USAGE_OBJECT.match(data, start) if start >= 0 else None
    if found is None:
        return _NO_COUNTS
    try:
        usage = _usage.decode(found[1])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _NO_COUNTS
    prompt = usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
    if prompt is not None and usage.cache_read_input_tokens is not None:
        # The messages API does not include these tokens in its input tokens.
        prompt += usage.cache_read_input_tokens + (usage.cache_creation_input_tokens or 0)
    generated = usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens
    return TokenCounts(prompt, _cached_tokens(usage), generated)


def read_cached_tokens(answer: bytes) -> int:
    """Prompt tokens that a prefill answer's usage counts as cached; 0 without such a count."""
    try:
        usage = _answer.decode(answer).usage
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0
    return (_cached_tokens(usage) if usage is not None else None) or 0


def read_created_tokens(answer: bytes) -> int | None:
    """Prompt tokens that a prefill answer's usage counts as written to the cache, which only the
    messages API tells; None: it does not."""
    try:
        usage = _answer.decode(answer).usage
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return usage.cache_creation_input_tokens if usage is not None else None


def _cached_tokens(usage: _Usage) -> int | None:
    """Prompt tokens that `usage` counts as cached, in the field that its API has; None: in none."""
    details = usage.prompt_tokens_details or usage.input_tokens_details
    return usage.cache_read_input_tokens if details is None else details.cached_tokens


def correct_usage(answer: bytes, cached: int | None, created: int | None = None) -> bytes:
    """Set the count of cached tokens in a JSON answer, or in the JSON of one event, to `cached`,
    and that of tokens written to the cache to `created`; None leaves a count.

    Returns the same bytes if its usage has no such count. The messages API does not include these
    tokens in its input tokens, so there the counts change together.
    """
    if _USAGE not in answer:
        return answer
    for path in _USAGE_PATHS:
        usage = _at(answer, path)
        if usage is not None:
            return _replace(answer, path, _correct_counts(usage, cached, created))
    return answer


class UsageCorrector:
    """Corrects the payload of an answer as it arrives, its chunked coding removed.

    Complete events of a stream are returned at once; a JSON answer is held until it is complete.
    The length may change, so the caller has to frame the result again.
    """

    def __init__(self, cached: int | None, created: int | None = None, *, stream: bool) -> None:
        """`cached`, `created`: the right counts; None: only hold back a stream's unfinished
        events."""
        self._cached, self._created = cached, created
        self._corrects = cached is not None or created is not None
        self._stream = stream
        self._incomplete = b""
        self.between_events = stream
        """Whether the returned bytes of a stream end between two events."""

    def take(self, payload: bytes, *, last: bool) -> bytes:
        """Return the corrected bytes that may be sent now."""
        data = self._incomplete + payload
        # A JSON answer waits for its end, because it is decoded; so does the JSON of an event.
        complete = len(data) if last else self._complete(data) if self._stream else 0
        self._incomplete, data = data[complete:], data[:complete]
        # Most events have no usage, and this search is all they cost.
        if not self._corrects or _USAGE not in data:
            return data
        if not self._stream:
            return correct_usage(data, self._cached, self._created)
        return b"".join(map(self._correct_line, data.splitlines(keepends=True)))

    def _complete(self, data: bytes) -> int:
        """Return how many bytes of a stream's `data` can be sent: its complete events.

        Of an event too long to hold, the complete lines are sent; it is then open until its end.
        """
        if data.endswith(b"\n\n"):
            end = len(data)
        else:
            lf, crlf = data.rfind(b"\n\n"), data.rfind(b"\n\r\n")
            end = max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0)
        if len(data) - end > _MAX_HELD:
            lines = data.rfind(b"\n") + 1
            self.between_events = lines == end and (end > 0 or self.between_events)
            return lines
        self.between_events = self.between_events or end > 0
        return end

    def _correct_line(self, line: bytes) -> bytes:
        if not line.startswith(_DATA) or _USAGE not in line:
            return line
        return _DATA + correct_usage(line[len(_DATA) :], self._cached, self._created)


def _correct_counts(usage: bytes, cached: int | None, created: int | None) -> bytes:
    for path in (
        ("prompt_tokens_details", "cached_tokens"),
        ("input_tokens_details", "cached_tokens"),
    ):
        if _at(usage, path) is not None:
            return usage if cached is None else _replace(usage, path, str(cached).encode())
    read, written, rest = (_count(usage, name) for name in (_READ, _WRITTEN, _REST))
    if read is None or rest is None:
        return usage
    total = rest + read + (written or 0)
    counts = {_READ: read if cached is None else cached}
    if written is not None:
        counts[_WRITTEN] = written if created is None else created
    counts[_REST] = max(0, total - sum(counts.values()))
    for name, count in counts.items():
        usage = _replace(usage, (name,), str(count).encode())
    return usage


def _count(usage: bytes, name: str) -> int | None:
    value = _at(usage, (name,))
    return int(value) if value is not None and value.isdigit() else None


def _at(data: bytes, path: tuple[str, ...]) -> bytes | None:
    """Return the encoded value at `path`; None if it is absent or a parent is not an object."""
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


def _replace(data: bytes, path: tuple[str, ...], new: bytes) -> bytes:
    """Replace the value at `path` by `new`; return `data` unchanged if the value is absent.

    Decoding and encoding again could change other bytes, so each level's value is searched as
    bytes. The same bytes may occur elsewhere in the object, so the right occurrence is the one
    whose replacement changes the value under the key.
    """
    key, rest = path[0], path[1:]
    old = _at(data, (key,))
    if old is None:
        return data
    if rest:
        new = _replace(old, rest, new)
    start = data.find(old)
    while old != new and start >= 0:
        changed = data[:start] + new + data[start + len(old) :]
        if _at(changed, (key,)) == new:
            return changed
        start = data.find(old, start + 1)
    return data
