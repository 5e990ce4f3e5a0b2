"""The model that a form names (multipart/form-data, RFC 7578), wherever the field stands, and
the form with another one. Pure.

Delimiters are searched for in C, and of the parts only the heads are read: a file's bytes are
skipped where they are, and never copied.

Errors: `BadBody`, with the part and its place in the body.
"""

from email.message import Message
from email.parser import BytesHeaderParser
from email.utils import collapse_rfc2231_value
from typing import Final, NamedTuple

from .body_fields import BadBody

FORM_TYPE: Final = "multipart/form-data"
_FIELD: Final = "model"
_DISPOSITION: Final = "content-disposition"
_MAX_DELIMITERS: Final = 256
"""Parts, and places in them that look like delimiters. The API has about twenty fields."""
_MAX_HEADS: Final = 8 * 1024
"""Bytes of the heads of all parts together: names and types. Read in 15 ms at worst."""
MAX_TYPE: Final = 1024
"""Characters of content-type that are read."""
_MAX_PADDING: Final = 256
"""Spaces behind a delimiter."""
_MAX_VALUE: Final = 64 * 1024
"""Bytes that are read of the model's name; names are much shorter."""
_MODEL_HEAD: Final = b'Content-Disposition: form-data; name="model"\r\n\r\n'
_heads: Final = BytesHeaderParser()


class _Delimiter(NamedTuple):
    start: int
    """Where its line begins."""
    end: int
    """Where the part behind it begins."""
    is_last: bool


class _Part(NamedTuple):
    number: int
    """From 1."""
    start: int
    """Where its head begins."""


class FormModel(NamedTuple):
    """The model that a form names, and its place."""

    value: str | None
    """None: the form has no such field."""
    start: int
    """Where the value begins; without one, where a part with it may be inserted."""
    end: int


def form_model(content_type: str, body: bytes) -> str | None:
    """The value of the field `model`; None: there is none. Of several the last one counts, as in
    the engine. Raises BadBody."""
    return find_form_model(content_type, body).value


def with_form_model(content_type: str, body: bytes, model: str) -> bytes:
    """The form `body` with another value of the field `model`, or with the field. Raises
    BadBody."""
    return replace_form_model(content_type, body, find_form_model(content_type, body), model)


def replace_form_model(content_type: str, body: bytes, found: FormModel, model: str) -> bytes:
    """The same, of a form in which the model was `found`: without a search, which takes long in a
    large one. Raises BadBody."""
    # A view: slices of bytes would copy the file twice.
    value, view = model.encode(), memoryview(body)
    if found.value is None:
        part = b"--%b\r\n%b%b\r\n" % (_boundary(content_type), _MODEL_HEAD, value)
        return b"".join((view[: found.start], part, view[found.start :]))
    return b"".join((view[: found.start], value, view[found.end :]))


def find_form_model(content_type: str, body: bytes) -> FormModel:
    """The last field `model`. Raises BadBody."""
    boundary = _boundary(content_type)
    delimiters = _Delimiters(body, b"--" + boundary)
    if (delimiter := delimiters.first()) is None:
        shown = boundary[:_MAX_PADDING].decode("latin-1")
        raise BadBody(f"the form has no part: the boundary of content-type, {shown}, is not in it")
    found, number, heads = FormModel(None, delimiter.start, delimiter.start), 0, 0
    while not delimiter.is_last:
        number += 1
        part = _Part(number, delimiter.end)
        content = _head_end(body, part) + 4
        heads += content - part.start
        if heads > _MAX_HEADS:
            raise _wrong(part, f"the heads of the parts have more than {_MAX_HEADS} bytes")
        if (following := delimiters.next(content)) is None:
            raise _wrong(part, f"the form ends in it, at byte {len(body)}, without a last boundary")
        if _name_in(body[part.start : content], part) == _FIELD:
            # Content ends before the line break of the delimiter.
            end = following.start - 2
            found = FormModel(_value(body, content, end), content, end)
        delimiter = following
    return found


def _boundary(content_type: str) -> bytes:
    header = Message()
    header["content-type"] = content_type[:MAX_TYPE]
    try:
        boundary = header.get_boundary()
    except ValueError:
        # A parameter in parts (RFC 2231) that are numbered absurdly.
        boundary = None
    if not boundary:
        raise BadBody(f"content-type names no boundary: send {FORM_TYPE}; boundary=…")
    return boundary.encode("latin-1", "replace")


class _Delimiters:
    """Finds the places of `text` that are a line of their own."""

    def __init__(self, body: bytes, text: bytes) -> None:
        self._body, self._text = body, text
        self._tries = 0

    def first(self) -> _Delimiter | None:
        """The first one; None: there is none. Raises BadBody."""
        return self._read(0) if self._body.startswith(self._text) else self.next(0)

    def next(self, at: int) -> _Delimiter | None:
        """The first one with its line break from `at` on. Raises BadBody."""
        while (found := self._body.find(b"\r\n" + self._text, at)) >= 0:
            if (delimiter := self._read(found + 2)) is not None:
                return delimiter
            at = found + 1
        return None

    def _read(self, start: int) -> _Delimiter | None:
        """The delimiter at `start`; None: the line goes on. Raises BadBody."""
        self._tries += 1
        if self._tries > _MAX_DELIMITERS:
            times = f"more than {_MAX_DELIMITERS} times"
            raise BadBody(f"the form has its boundary {times} (byte {start})")
        body, end = self._body, start + len(self._text)
        if body.startswith(b"--", end):
            return _Delimiter(start, end + 2, is_last=True)
        line_end = body.find(b"\r\n", end, end + _MAX_PADDING)
        if line_end < 0 or body[end:line_end].strip(b" \t"):
            return None
        return _Delimiter(start, line_end + 2, is_last=False)


def _head_end(body: bytes, part: _Part) -> int:
    """Where the empty line behind the head begins."""
    end = body.find(b"\r\n\r\n", part.start, part.start + _MAX_HEADS + 4)
    if end < 0 or body.startswith(b"\r\n", part.start):
        raise _wrong(part, f"it has no head of at most {_MAX_HEADS} bytes")
    return end


def _name_in(head: bytes, part: _Part) -> str:
    """The name of the field. Raises BadBody also for a model that is a file."""
    fields = _heads.parsebytes(head)
    try:
        parameters = dict(fields.get_params([], header=_DISPOSITION))
    except ValueError:
        # As in `_boundary`.
        parameters = {}
    if "form-data" not in parameters or "name" not in parameters:
        raise _wrong(part, "it has no Content-Disposition: form-data with a name")
    name = collapse_rfc2231_value(parameters["name"])
    if name == _FIELD and "filename" in parameters:
        place = f"part {part.number}, byte {part.start}"
        raise BadBody(f"{_FIELD}: a file ({place}) instead of a text: send a text")
    return name


def _value(body: bytes, start: int, end: int) -> str:
    try:
        return body[start : min(end, start + _MAX_VALUE)].decode()
    except UnicodeDecodeError as err:
        raise BadBody(f"{_FIELD}: not UTF-8 (byte {start + err.start}): send UTF-8") from err


def _wrong(part: _Part, what: str) -> BadBody:
    return BadBody(f"part {part.number} of the form (byte {part.start}): {what}")
