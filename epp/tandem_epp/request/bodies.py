"""Which body of a request is read, and how: JSON of a known kind, other JSON, or a form.

    kind_of(request)            what the body holds, by the path
    parse_body(kind, body)      all that a pick reads of it
    named_model(request, body)  the model alone, of a body of no known kind

Errors: `BadBody`.
"""

from typing import Final

from tandem_contract import body_coding
from tandem_contract.api_paths import FORMS
from tandem_contract.forms import FORM_TYPE
from tandem_contract.request_kinds import (
    BodyKind,
    PooledKind,
    kind_of_path,
    pooled_kind_of_path,
)

from ..exchange import HttpRequest
from .form import form_model
from .inference import InferenceRequest, parse_request, read_model
from .pooled import parse_pooled

CONTENT_TYPE: Final = "content-type"
_JSON: Final = "application/json"


def kind_of(request: HttpRequest) -> BodyKind | None:
    """The kind of request in the body; None for one of which at most the model is read."""
    if request.method != "POST":
        return None
    # Whatever the content type says: some engines, and the sidecar, read these bodies as JSON in
    # any case. vLLM refuses other types itself.
    return kind_of_path(request.path) or pooled_kind_of_path(request.path)


def is_json(request: HttpRequest) -> bool:
    """Whether the body is read as JSON: for a path of a known kind, and of any other POST if its
    content type says so or is left out."""
    if request.method != "POST":
        return False
    if request.headers.get(CONTENT_TYPE, _JSON) == _JSON or kind_of(request) is not None:
        return True
    return _media_type(request, "").endswith(("/json", "+json"))


def is_form(request: HttpRequest) -> bool:
    """Whether `request` is a form for a path that takes one."""
    if request.method != "POST" or request.path.partition("?")[0] not in FORMS:
        return False
    return _media_type(request, "") == FORM_TYPE


def is_coded(request: HttpRequest) -> bool:
    """Whether the body has a Content-Encoding, and so is refused."""
    coding = request.headers.get(body_coding.CONTENT_ENCODING)
    return coding is not None and body_coding.is_coded(coding)


def parse_body(kind: BodyKind, body: bytes) -> InferenceRequest:
    """The request in `body`. Raises BadBody."""
    return parse_pooled(kind, body) if isinstance(kind, PooledKind) else parse_request(kind, body)


def named_model(request: HttpRequest, body: bytes) -> str | None:
    """The model that a body of no known kind names; None: it names none. Raises BadBody."""
    if is_form(request):
        return form_model(request.headers[CONTENT_TYPE], body)
    return read_model(body)


def _media_type(request: HttpRequest, default: str) -> str:
    return request.headers.get(CONTENT_TYPE, default).partition(";")[0].strip().lower()
