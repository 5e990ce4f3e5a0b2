"""Checks what an EPP tells of the gateways that ask it. Pure."""

from collections.abc import Iterator
from typing import Final

from tandem_contract.durations import format_duration

from .facts import EppReport
from .findings import Finding, Severity

_MARGIN: Final = 5.0
"""Seconds for the answer of a request whose time is over."""


def check_gateway(report: EppReport) -> Iterator[Finding]:
    """Requests that a gateway sends on to any pod while they wait in flow control."""
    if not report.asked_seconds or report.is_behind_envoy:
        return
    needed = format_duration(report.asked_seconds + _MARGIN)
    yield Finding(
        Severity.WARNING,
        "gateway",
        report.epp,
        "a gateway sends bodies in mode BUFFERED, and requests wait here for up to "
        f"{format_duration(report.asked_seconds)}: after its message_timeout it sends a request to "
        "any pod",
        f"set its ext_proc's message_timeout, or max_message_timeout, to at least {needed}, or its "
        "request_body_mode to FULL_DUPLEX_STREAMED",
    )
