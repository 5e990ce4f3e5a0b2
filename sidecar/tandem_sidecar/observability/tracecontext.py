"""W3C trace context: which span a request belongs below, and what engines are told instead.

context = parse("00-4bf9…4736-00f0…02b7-01")
context.child()     # the same trace, a span of ours as parent
"""

import re
from dataclasses import dataclass
from random import getrandbits
from typing import Final

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1
_TRACE_BITS: Final = 128
_SPAN_BITS: Final = 64


@dataclass(frozen=True, slots=True)
class Parent:
    """What the caller said."""

    trace_id: str
    span_id: str
    sampled: bool


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The span of one request that is traced; ids in hex."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    """The caller's span; empty: ours is the first."""

    def child(self) -> str:
        """A traceparent with a new span of ours, for one leg."""
        return f"00-{self.trace_id}-{new_span_id()}-01"


def parse(value: str) -> Parent | None:
    """The parent a `traceparent` names; None when it is malformed, so that a trace begins anew.

    Of a version to come the known fields count, of version 00 there are no others.
    """
    match = _TRACEPARENT.fullmatch(value)
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    if not int(match[2], 16) or not int(match[3], 16):
        return None
    return Parent(match[2], match[3], bool(int(match[4], 16) & _SAMPLED))


def span_of(traceparent: str) -> str:
    """The span id in a traceparent of ours."""
    return traceparent.split("-")[2]


def new_trace_id() -> str:
    return _drawn(_TRACE_BITS)


def new_span_id() -> str:
    return _drawn(_SPAN_BITS)


def _drawn(bits: int) -> str:
    """Ids are to be told apart, not to be kept secret: no call of the kernel for each."""
    # All zeroes would mean that there is none.
    return f"{getrandbits(bits) or 1:0{bits // 4}x}"
