"""Tells engines how important a request is, for their own queues. Pure.

vLLM takes the lower `priority` first, where priorities of this EPP are the higher, the more
important: the engine's is the negative of it. An engine without `--scheduling-policy priority`
refuses every other one than 0, so this is off unless the configuration turns it on.

What a client itself sends as `priority` does not reach an engine then.

Errors: `BadBody`.
"""

from typing import Final

import msgspec

from ..exchange import HttpRequest
from .bodies import is_coded, kind_of
from .body_fields import UNREADABLE, decode_members, unreadable_body, with_last_member
from .large_bodies import LARGE

FIELD: Final = "priority"
_NAME: Final = FIELD.encode()


def takes_priority(request: HttpRequest) -> bool:
    """Whether engines read a priority in the body of `request`."""
    return kind_of(request) is not None and not is_coded(request)


def with_priority(body: bytes, priority: int) -> bytes:
    """The JSON object `body` of a request that has `priority` here. Raises BadBody."""
    # A name may be written with escapes.
    may_have_one = _NAME in body or b"\\u" in body
    if len(body) >= LARGE or not may_have_one:
        # Decoding a large body would block other streams. Of a repeated name the last one counts.
        is_default = priority == 0 and not may_have_one
        return body if is_default else with_last_member(body, FIELD, b"%d" % -priority)
    try:
        return msgspec.json.encode({**decode_members(body), FIELD: -priority})
    except UNREADABLE as err:
        raise unreadable_body(body, err) from err
