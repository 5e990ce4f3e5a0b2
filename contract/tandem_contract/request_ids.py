"""Which `x-request-id` of a client is used: the EPP and the sidecar must agree.

The EPP binds its plan to the id, and the sidecar checks it. If only one of them refused an id, the
plan would not verify and the request would be served without a split.
"""

import re
from typing import Final

MAX_LENGTH: Final = 128
"""Characters. An id stands in every log line and span of its request."""

_USABLE: Final = re.compile(r"[\x21-\x7e]+")


def usable_request_id(value: str | None, max_length: int = MAX_LENGTH) -> str | None:
    """`value` if it may be used, else None: then the caller replaces it by a fresh id.

    Usable are 1 to `max_length` printable ASCII characters without a space.
    """
    usable = value and len(value) <= max_length and _USABLE.fullmatch(value)
    return value if usable else None
