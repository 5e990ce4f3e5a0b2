"""Which `x-request-id` of a client is used: the EPP and the sidecar must agree.

The EPP binds its plan to the id, and the sidecar checks it. If only one of them refused an id, the
plan would not verify and the request would be served without a split.
"""

import re
from typing import Final

MAX_LENGTH: Final = 128
"""Characters. An id stands in every log line and span of its request."""

_USABLE: Final = re.compile(rf"[\x21-\x7e]{{1,{MAX_LENGTH}}}")


def usable_request_id(value: str | None) -> str | None:
    """`value` if it may be used: 1 to 128 printable ASCII characters without a space; else None.

    The caller replaces an unusable id by a fresh one.
    """
    return value if value is not None and _USABLE.fullmatch(value) else None
