"""The model that a form names, wherever the field stands, and the form with another one. Pure.

Errors: `BadBody`, with the part and its place in the body.
"""

from typing import Final, NamedTuple

from tandem_contract.forms import BadForm, Part, form_boundary, read_parts

from .body_fields import BadBody

_FIELD: Final = "model"
_MAX_VALUE: Final = 64 * 1024
"""Bytes that are read of the model's name; names are much shorter."""
_MODEL_HEAD: Final = b'Content-Disposition: form-data; name="model"\r\n\r\n'


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
        try:
            part = b"--%b\r\n%b%b\r\n" % (form_boundary(content_type), _MODEL_HEAD, value)
        except BadForm as err:
            raise BadBody(str(err)) from err
        return b"".join((part, view))
    return b"".join((view[: found.start], value, view[found.end :]))


def find_form_model(content_type: str, body: bytes) -> FormModel:
    """The last field `model`. Raises BadBody."""
    found = FormModel(None, 0, 0)
    try:
        for part in read_parts(content_type, body):
            if part.name == _FIELD:
                found = FormModel(_value(body, part), part.start, part.end)
    except BadForm as err:
        raise BadBody(str(err)) from err
    return found


def _value(body: bytes, part: Part) -> str:
    if part.is_file:
        place = f"part {part.number}, byte {part.head}"
        raise BadBody(f"{_FIELD}: a file ({place}) instead of a text: send a text")
    try:
        return body[part.start : min(part.end, part.start + _MAX_VALUE)].decode()
    except UnicodeDecodeError as err:
        raise BadBody(f"{_FIELD}: not UTF-8 (byte {part.start + err.start}): send UTF-8") from err
