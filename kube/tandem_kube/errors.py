"""Errors of Kubernetes API calls, by what the caller can do about them.

KubeError
  NotConfigured      no cluster is configured: the message says what to set
  ApiError           a call failed; `message` is the API server's own, `status` the HTTP status
    Unreachable      no response, a broken one or a 5xx: retry later; a write may have happened
    Fenced           a write that this process may not make any more, so it was not sent: stop
    TooManyRequests  retry after `retry_after` seconds
    Unauthorized     the credentials are missing or not accepted
    Forbidden        not permitted by RBAC, a quota or an admission rule; the message says which
    NotFound         no such object, or no such kind in this cluster
    Conflict         the object has changed (version, uid, field manager): read it and decide again
      AlreadyExists  an object of this name exists
    Expired          the watch or the continued list is too old: list again
    Invalid          the server understood and rejected the object: retrying does not help
"""

from collections.abc import Mapping
from typing import Any, Final


class KubeError(Exception):
    """Root of this package's errors."""


class NotConfigured(KubeError):
    """No cluster is configured, or the configuration cannot be used."""


class ApiError(KubeError):
    """A failed call; `str` is one line for people to read."""

    def __init__(self, status: int, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status; 0 when there was no response."""
        self.message = message
        self.retry_after = retry_after
        """Seconds that the server asked to wait; None when it did not."""


class Unreachable(ApiError):
    """No usable response. A write may or may not have happened."""


class Fenced(ApiError):
    """The write was not sent, because this process may not write any more."""


class TooManyRequests(ApiError):
    """The server limits the rate, or a PodDisruptionBudget blocks an eviction: retry later."""


class Unauthorized(ApiError):
    """The credentials were not accepted."""


class Forbidden(ApiError):
    """Not permitted by RBAC, a quota or an admission rule."""


class NotFound(ApiError):
    """No such object or kind."""


class Conflict(ApiError):
    """The object has changed, or its name belongs to another object now."""


class AlreadyExists(Conflict):
    """An object of this name exists."""


class Expired(ApiError):
    """The resource version or continue token is too old."""


class Invalid(ApiError):
    """The server rejects the object or the request as it stands."""


_BY_STATUS: Final[Mapping[int, type[ApiError]]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Expired,
    429: TooManyRequests,
}


def error_of(status: int, body: Any, *, retry_after: float | None = None) -> ApiError:
    """The error for HTTP `status` and a response `body`: a `Status` object, or some text."""
    fields = body if isinstance(body, dict) else {}
    message = str(fields.get("message") or body or f"the API server answered {status}")
    # The API server answers 409 for both, and only the reason in the Status tells them apart.
    if status == 409 and fields.get("reason") == "AlreadyExists":
        kind: type[ApiError] = AlreadyExists
    else:
        # Other 4xx, such as 400 and 422, are faults of the request itself: retrying does not help.
        kind = _BY_STATUS.get(status, Unreachable if status >= 500 else Invalid)
    return kind(status, " ".join(message.split()), retry_after=retry_after)
