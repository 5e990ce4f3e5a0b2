"""Forms, as the EPP and the sidecar read them, compared with Python's parser of MIME messages.

Up to the first line feed: the parameters of the content type. The rest: the body.
"""

from contextlib import suppress
from email.message import Message
from email.parser import BytesParser
from email.utils import collapse_rfc2231_value

from tandem_epp.request.body_fields import BadBody as RefusedByEpp
from tandem_epp.request.form import form_model, with_form_model
from tandem_sidecar.bodies.parse import BadBody, clean_passthrough

_FORBIDDEN = "vllm_xargs"


def check(data: bytes) -> None:
    parameters, _, body = data.partition(b"\n")
    content_type = b"multipart/form-data;" + parameters.replace(b"\r", b"")
    with suppress(RefusedByEpp):
        model = form_model(content_type.decode("latin-1"), body)
        _check_model(content_type.decode("latin-1"), body, model)
    with suppress(BadBody):
        assert clean_passthrough(body, content_type) == body
        # Python's parser, unlike those of forms, takes a CR or LF alone for the end of a line.
        if not set(b"\r\n") & set(body.replace(b"\r\n", b"")):
            assert _FORBIDDEN not in _names(content_type, body)


def _check_model(content_type: str, body: bytes, model: str | None) -> None:
    changed = with_form_model(content_type, body, "größer")
    # A form with one part more may have too many.
    with suppress(RefusedByEpp):
        assert form_model(content_type, changed) == "größer"
        if model is not None:
            assert with_form_model(content_type, changed, model) == body


def _names(content_type: bytes, body: bytes) -> set[str]:
    """The names of the fields as Python's parser reads them."""
    head = b"Content-Type: " + content_type + b"\r\n\r\n"
    message = BytesParser().parsebytes(head + body)
    parts = message.get_payload() if message.is_multipart() else []
    return {name for part in parts if isinstance(part, Message) and (name := _name(part))}


def _name(part: Message) -> str | None:
    try:
        name = part.get_param("name", header="content-disposition")
    except ValueError:
        return None
    return collapse_rfc2231_value(name) if name is not None else None
