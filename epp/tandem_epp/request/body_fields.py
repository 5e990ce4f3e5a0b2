"""Decoding of a request's body: its members, single ones, and what is wrong where that fails.

Errors: `BadBody`, for the client: what is wrong and where.
"""

import re
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Raw

Members = Mapping[str, Raw]
"""The undecoded members of a JSON object."""
decode_members: Final = msgspec.json.Decoder(dict[str, Raw]).decode
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions that decoding JSON raises."""

_ESCAPES: Final = re.compile(
    rb"(?:\\\\)+"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
"""Escaped backslashes, surrogate pairs, and halves of pairs."""
_SEARCHED_BYTES: Final = 64 * 1024
"""Of a body that is nested too deeply, the beginning in which the place is searched. The search
decodes it about 17 times, 6 ms in all; a whole body of 16 MiB would block the event loop for more
than a second."""


class BadBody(ValueError):
    """The body is not a request of its kind; answered with 400."""

    @property
    def param(self) -> str | None:
        """The field that is wrong: what the message begins with; None: the body as a whole."""
        # From the message: it alone comes back from the process that reads large bodies.
        field = str(self).partition(":")[0].partition("[")[0].partition(".")[0]
        return field if field.isidentifier() else None


def unreadable_body(body: bytes, err: Exception) -> BadBody:
    """The message for one of `UNREADABLE`: what is wrong, and where if that is known."""
    if isinstance(err, RecursionError):
        return BadBody(f"the body is nested too deeply{_too_deep_at(body)}")
    if isinstance(err, UnicodeDecodeError):
        return BadBody(f"the body is not UTF-8 (byte {err.start} of a string)")
    if isinstance(err, msgspec.ValidationError):
        if body.lstrip()[:1] == b"{":
            return BadBody(f"a field has a wrong value: {err}")
        return BadBody(f"the body is not a JSON object: {err}")
    if (lone := _lone_surrogate(body)) is not None:
        written = lone[0].decode()
        return BadBody(
            f"the body has half of a surrogate pair ({written}, byte {lone.start()}): a character"
            " beyond U+FFFF is written as a pair, or as itself"
        )
    cause = str(err).removeprefix("JSON is malformed: ")
    place = "" if "(byte " in cause else f" (byte {len(body)})"
    return BadBody(f"the body is not JSON: {cause}{place}")


def _lone_surrogate(body: bytes) -> re.Match[bytes] | None:
    """The first escape of half a surrogate pair; the decoder's own message for it misleads."""
    return next((match for match in _ESCAPES.finditer(body) if match["lone"]), None)


def _too_deep_at(body: bytes) -> str:
    """Where nesting exceeds what the parser takes: ` (byte N)`, in the searched beginning only."""
    low, high = 0, min(len(body), _SEARCHED_BYTES)
    if not _is_too_deep(memoryview(body)[:high]):
        return f" (after byte {high})" if high < len(body) else ""
    # A longer part of the body is never less deeply nested: search for the first part too deep.
    while low < high:
        middle = (low + high) // 2
        if _is_too_deep(memoryview(body)[:middle]):
            high = middle
        else:
            low = middle + 1
    return f" (byte {low - 1})"


def _is_too_deep(part: bytes | memoryview) -> bool:
    try:
        decode_members(part)
    except RecursionError:
        return True
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return False


def with_last_member(body: bytes, name: str, value: bytes) -> bytes:
    """The object with a member behind the others: of a repeated name the last one counts. Whatever
    the body is, the result is an object with the member, or no JSON. Raises BadBody."""
    end = body.rfind(b"}")
    if end < 0:
        raise BadBody("the body is not a JSON object")
    comma = b"" if body[:end].rstrip().endswith(b"{") else b","
    return b'%b%b"%b":%b}' % (body[:end], comma, name.encode(), value)
