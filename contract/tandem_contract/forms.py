"""The parts of a form (multipart/form-data, RFC 7578), as every form parser reads them. Pure.

Form parsers disagree about what is rare: names in pieces or in a charset (RFC 2231), escapes,
folded and repeated headers, text before the first boundary or behind the last one. A server that
lets such a form pass may take a part for another one than the engine does. So a form has to be
plain, as browsers and HTTP libraries write it; anything else is refused:

    content type   multipart/form-data; boundary=B, and perhaps charset=utf-8
    body           begins with --B and ends with --B--, perhaps with a line end; a delimiter is a
                   line of its own, without spaces behind it
    head of a part one Content-Disposition: form-data; name="…", perhaps filename="…"

Delimiters are searched for in C, and of the parts only the heads are read: a file's bytes are
skipped where they are, and never copied.

Errors: `BadForm`, with the part and its place in the body.
"""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

FORM_TYPE: Final = "multipart/form-data"
MAX_TYPE: Final = 1024
"""Most characters of content-type."""
_MAX_DELIMITERS: Final = 256
"""Parts, and places in them that look like delimiters. The API has about twenty fields."""
_MAX_HEADS: Final = 8 * 1024
"""Bytes of the heads of all parts together: names and types. Read in 15 ms at worst."""
_MAX_SHOWN: Final = 256
"""Characters of a boundary in an error."""

_PARAMETER: Final = re.compile(r';[ \t]*([a-z]+)=(?:"([^"\\]*)"|([^\s;"\\*\'%]+))[ \t]*')
"""A parameter whose name is lower-case letters: without `*`, by which RFC 2231 marks names in
pieces and encoded ones, and without escapes in its value."""
_HEAD_LINE: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_BOUNDARY: Final = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,199}[0-9A-Za-z'()+_,./:=?-]")
_NAME: Final = re.compile(r"[^%]+")
"""A field's name. `%` is how some parsers encode a name and others do not decode it."""
_PADDING: Final = re.compile(rb"[ \t]+\r\n")
_UNCHANGED: Final = frozenset({b"7bit", b"8bit", b"binary"})
"""Values of Content-Transfer-Encoding for bytes as they are."""


class BadForm(ValueError):
    """A form that is no plain one; the message is for the client."""


class Part(NamedTuple):
    """One part of a form."""

    number: int
    """From 1."""
    name: str
    is_file: bool
    head: int
    """Where its head begins."""
    start: int
    """Where its content begins."""
    end: int


def read_parts(content_type: str, body: bytes) -> Iterator[Part]:
    """The parts of the form `body`, in order. Raises BadForm, perhaps after some of them."""
    boundary = form_boundary(content_type)
    delimiters = _Delimiters(body, b"--" + boundary)
    number, heads, at = 0, 0, delimiters.first()
    while at is not None:
        number += 1
        content = _head_end(body, number, at)
        heads += content - at
        if heads > _MAX_HEADS:
            raise _wrong(number, at, f"the heads of the parts have more than {_MAX_HEADS} bytes")
        name, is_file = _read_head(body[at : content - 4], number, at)
        if (found := delimiters.next(content)) is None:
            raise _wrong(
                number, at, f"the form ends in it, at byte {len(body)}, without a last boundary"
            )
        end, following = found
        yield Part(number, name, is_file, at, content, end)
        at = following


def form_boundary(content_type: str) -> bytes:
    """The boundary that a form's content type names. Raises BadForm."""
    if len(content_type) > MAX_TYPE:
        raise BadForm(f"content-type has more than {MAX_TYPE} characters")
    media_type, _, rest = content_type.partition(";")
    if media_type.strip(" \t").lower() != FORM_TYPE:
        raise BadForm(f"a multipart body has to be a form: send {FORM_TYPE}")
    parameters = _parameters(";" + rest) if rest else {}
    if (
        parameters is None
        or not parameters.keys() <= {"boundary", "charset"}
        or parameters.get("charset", "utf-8").lower() != "utf-8"
    ):
        raise BadForm(f"content-type: send {FORM_TYPE}; boundary=…, in UTF-8 without a charset")
    boundary = parameters.get("boundary", "")
    if not _BOUNDARY.fullmatch(boundary):
        raise BadForm(f"content-type names no boundary: send {FORM_TYPE}; boundary=…")
    return boundary.encode()


class _Delimiters:
    """Finds the places of `text` that are a line of their own."""

    def __init__(self, body: bytes, text: bytes) -> None:
        self._body, self._text = body, text
        self._tries = 0

    def first(self) -> int | None:
        """Where the first part's head begins; None: the form has no part. Raises BadForm."""
        if not self._body.startswith(self._text) or (found := self._read(0)) is None:
            shown = self._text[2 : _MAX_SHOWN + 2].decode()
            raise BadForm(f"the form does not begin with the boundary of content-type, {shown}")
        return found[0]

    def next(self, at: int) -> tuple[int, int | None] | None:
        """Where the content from `at` ends and the next head begins, which is None for the last
        part; None: nothing ends the content. Raises BadForm."""
        line = b"\r\n" + self._text
        while (end := self._body.find(line, at)) >= 0:
            if (found := self._read(end + 2)) is not None:
                return end, found[0]
            at = end + 1
        return None

    def _read(self, start: int) -> tuple[int | None] | None:
        """Where the head behind the delimiter at `start` begins, None for the last delimiter; no
        tuple: the line goes on, and is none. Raises BadForm."""
        self._tries += 1
        if self._tries > _MAX_DELIMITERS:
            raise BadForm(f"the form has its boundary more than {_MAX_DELIMITERS} times")
        end = start + len(self._text)
        behind = self._body[end : end + 2]
        if behind == b"--":
            # Some parsers take what follows for a line of content or for another part.
            if self._body[end + 2 : end + 5] not in (b"", b"\r\n"):
                raise BadForm(f"the form goes on behind its last boundary (byte {end + 2})")
            return (None,)
        if behind == b"\r\n":
            return (end + 2,)
        # RFC 2046 allows spaces here; python-multipart then takes the line for content.
        if _PADDING.match(self._body, end):
            raise BadForm(f"the form has spaces behind its boundary (byte {end})")
        return None


def _head_end(body: bytes, number: int, start: int) -> int:
    """Where the content behind the head begins."""
    end = body.find(b"\r\n\r\n", start, start + _MAX_HEADS + 4)
    if end < 0 or body.startswith(b"\r\n", start):
        raise _wrong(number, start, f"it has no head of at most {_MAX_HEADS} bytes")
    return end + 4


def _read_head(head: bytes, number: int, start: int) -> tuple[str, bool]:
    """The name of the field, and whether it is a file. Raises BadForm."""
    dispositions = []
    for line in head.split(b"\r\n"):
        matched = _HEAD_LINE.fullmatch(line)
        if matched is None:
            raise _wrong(number, start, "a line of its head is no header: send one line for each")
        field, value = matched[1].lower(), matched[2].strip(b" \t")
        if field == b"content-disposition":
            dispositions.append(value)
        elif field == b"content-transfer-encoding" and value.lower() not in _UNCHANGED:
            raise _wrong(number, start, "it has a Content-Transfer-Encoding: send it as it is")
    if len(dispositions) != 1:
        raise _wrong(
            number, start, f"it has {len(dispositions)} Content-Disposition headers: send one"
        )
    return _read_disposition(dispositions[0], number, start)


def _read_disposition(value: bytes, number: int, start: int) -> tuple[str, bool]:
    try:
        kind, _, rest = value.decode().partition(";")
    except UnicodeDecodeError as err:
        raise _wrong(number, start, "its Content-Disposition is not UTF-8") from err
    parameters = _parameters(";" + rest)
    name = (parameters or {}).get("name", "")
    if (
        kind.strip(" \t").lower() != "form-data"
        or parameters is None
        or not parameters.keys() <= {"name", "filename"}
        or not _NAME.fullmatch(name)
    ):
        raise _wrong(
            number,
            start,
            'its Content-Disposition is not plain: send form-data; name="…" and for a file'
            ' filename="…", without escapes',
        )
    return name, "filename" in parameters


def _parameters(text: str) -> dict[str, str] | None:
    """The parameters in `text`; None: they are not plain, or one is repeated."""
    parameters: dict[str, str] = {}
    at = 0
    while at < len(text):
        matched = _PARAMETER.match(text, at)
        if matched is None or matched[1] in parameters:
            return None
        quoted, token = matched[2], matched[3]
        parameters[matched[1]] = token if quoted is None else quoted
        at = matched.end()
    return parameters


def _wrong(number: int, start: int, what: str) -> BadForm:
    return BadForm(f"part {number} of the form (byte {start}): {what}")
