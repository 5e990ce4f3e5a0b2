"""Which `x-request-id` of a client is used: the EPP and the sidecar must agree; and the ids of a
request's attempts.

The EPP binds its plan to the id, and the sidecar checks it. If only one of them refused an id, the
plan would not verify and the request would be served without a split.
"""

import re
from typing import Final

MAX_LENGTH: Final = 128
"""Characters. An id stands in every log line and span of its request."""
_ATTEMPT: Final = re.compile("-[0-9a-f]{12}")


def usable_request_id(value: str | None, max_length: int = MAX_LENGTH) -> str | None:
    """`value` if it may be used, else None: then the caller replaces it by a fresh id.

    Usable are 1 to `max_length` printable ASCII characters without a space.
    """
    if not value or len(value) > max_length or " " in value:
        return None
    return value if value.isascii() and value.isprintable() else None


def attempt_id(request_id: str, number: int) -> str:
    """The id under which a sidecar sends a request on, so that an engine, which matches requests by
    their ids, tells its attempts apart: a client's own id may repeat. `number`: below 2⁴⁸."""
    return f"{request_id}-{number:012x}"


def is_attempt_of(found: str, request_id: str) -> bool:
    """Whether `found` is the id of an attempt of the request."""
    end = found.removeprefix(request_id)
    return end != found and _ATTEMPT.fullmatch(end) is not None
