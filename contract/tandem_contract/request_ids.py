"""Which `x-request-id` of a client is used: the EPP and the sidecar must agree.

The EPP binds its plan to the id, and the sidecar checks it. If only one of them refused an id, the
plan would not verify and the request would be served without a split.
"""

from typing import Final

MAX_LENGTH: Final = 128
"""Characters. An id stands in every log line and span of its request."""


def usable_request_id(value: str | None, max_length: int = MAX_LENGTH) -> str | None:
    """`value` if it may be used, else None: then the caller replaces it by a fresh id.

    Usable are 1 to `max_length` printable ASCII characters without a space.
    """
    if not value or len(value) > max_length or " " in value:
        return None
    return value if value.isascii() and value.isprintable() else None
