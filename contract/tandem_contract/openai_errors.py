"""The error body of Tandem's servers in OpenAI's form, as vLLM writes it. `api_grammar` knows which
API has another form."""

from typing import Final

import msgspec

TYPES: Final = {
    400: "BadRequestError",
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
