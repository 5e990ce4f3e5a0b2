"""What can go wrong with a call to the Kubernetes API, by what a caller can do about it.

KubeError
  NotConfigured      no cluster to talk to: the message says what to set
  ApiError           a call failed; `message` is the API server's own, `status` the HTTP status
    Unreachable      no answer, a broken one or a 5xx: try again later; a write may have happened
    TooManyRequests  asked to wait: try again after `retry_after` seconds
    Unauthorized     the credentials are missing or no longer good
    Forbidden        not permitted: RBAC, a quota, an admission rule; the message says which
    NotFound         no such object, or no such kind in this cluster
    Conflict         the object is another by now (version, uid, field owner): read it, decide again
      AlreadyExists  a create met an object of this name
    Expired          a watch or a continued list is too old: list anew
    Invalid          the server understood and refused the object: trying again will not help
"""

from collections.abc import Mapping
from typing import Any, Final


class KubeError(Exception):
    """Root of this package's errors."""


class NotConfigured(KubeError):
    """No cluster is configured, or what is configured cannot be used."""


class ApiError(KubeError):
    """A call that failed; `str` is one line for a person."""

    def __init__(self, status: int, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status; 0 when there was no answer."""
        self.message = message
        self.retry_after = retry_after
        """Seconds the server asked to wait; None when it did not say."""


class Unreachable(ApiError):
    """No usable answer. Whether a write happened is not known."""


class TooManyRequests(ApiError):
    """The server, or a disruption budget, asks to wait."""


class Unauthorized(ApiError):
    """The credentials were not accepted."""


class Forbidden(ApiError):
    """Not permitted, by RBAC, a quota or an admission rule."""


class NotFound(ApiError):
    """No such object or kind."""


class Conflict(ApiError):
    """The object is not the one the caller meant any more."""


class AlreadyExists(Conflict):
    """An object of this name is there."""


class Expired(ApiError):
    """The resource version or continue token is too old."""


class Invalid(ApiError):
    """The object or the request is refused as it stands."""


_BY_STATUS: Final[Mapping[int, type[ApiError]]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Expired,
    429: TooManyRequests,
}


def error_of(status: int, body: Any, *, retry_after: float | None = None) -> ApiError:
    """The error of a `Status` object (`body`) that came with HTTP `status`, or in a watch."""
    said = body if isinstance(body, dict) else {}
    message = str(said.get("message") or body or f"the API server answered {status}")
    if status == 409 and said.get("reason") == "AlreadyExists":
        kind: type[ApiError] = AlreadyExists
    else:
        kind = _BY_STATUS.get(status, Unreachable if status >= 500 else Invalid)
    return kind(status, " ".join(message.split()), retry_after=retry_after)
