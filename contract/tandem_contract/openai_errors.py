"""The error body of Tandem's servers in OpenAI's form, as vLLM writes it. `api_grammar` knows which
API has another form."""

import re
from typing import Any, Final

import msgspec

TYPES: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    413: "RequestEntityTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "TooManyRequestsError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


def error_body(status: int, message: str, *, param: str | None = None) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}` for an HTTP `status`."""
    return msgspec.json.encode(
        {"error": {"message": message, "type": type_of(status), "param": param, "code": status}}
    )


def type_of(status: int) -> str:
    """The error's type for an HTTP `status`."""
    return TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")


def error_event(status: int, message: str) -> bytes:
    """The same body as a server-sent event, for a stream whose status 200 has been sent."""
    return b"data: " + error_body(status, message) + b"\n\n"


class _Error(msgspec.Struct, gc=False):
    """An error event: its members at the top, or those of an object in it."""

    message: Any = None
    code: Any = None
    error: Any = None
    response: Any = None


_error: Final = msgspec.json.Decoder(_Error)
_STATUS: Final = re.compile("[45][0-9]{2}")


def read_error(data: bytes) -> tuple[int, str]:
    """HTTP status and message of an error event of any API; without a status of an error, 500."""
    try:
        error = _error.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        error = _Error()
    # The error of `response.failed` is within the response.
    for inner in (error.response, error.error):
        while isinstance(inner, dict) and inner.get("error"):
            inner = inner["error"]
        if isinstance(inner, dict):
            error = _Error(inner.get("message"), inner.get("code"))
        elif isinstance(inner, str):
            error = _Error(inner)
    code, message = error.code, error.message
    if isinstance(code, str) and _STATUS.fullmatch(code):
        code = int(code)
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return status, message if isinstance(message, str) else "the engine failed the request"
