"""Which requests wait, and how, as text for `--check-config`. Pure."""

from collections.abc import Iterator
from typing import Final

from tandem_contract.durations import format_duration

from ...flow.ceilings import Ceilings, HoldbackCeilings, SoftCeilings, StaticCeilings
from ...flow.detectors import ConcurrencyDetector, Detector, UtilizationDetector
from ...flow.settings import UNLIMITED, BandSettings, FlowSettings

_FAIRNESS: Final = {
    "none": "tenants are not told apart",
    "requests": "tenants take turns",
    "tokens": "tenants get equally many tokens",
}
_ORDER: Final = {
    "arrival": "first come, first served",
    "deadline": "first whose time to wait ends first",
    "ttft": "first whose target for the first token ends first",
}


def flow_lines(flow: FlowSettings | None) -> Iterator[str]:
    """What `flow` does, line by line; None: it is off."""
    if flow is None:
        return
    yield f"flow control: requests wait while {_saturated(flow.detector)}"
    if flow.detector is not None:
        yield from _ceilings(flow.ceilings)
    if flow.max_requests < UNLIMITED or flow.max_bytes < UNLIMITED:
        yield f"  all priorities: at most {_limits(flow.max_requests, flow.max_bytes)}"
    for priority, band in sorted(flow.bands.items(), reverse=True):
        yield f"  priority {priority}: {_band(band)}"
    yield f"  other priorities: {_band(flow.default)}"
    if flow.negative is not None:
        yield f"  other negative priorities: {_band(flow.negative)}"
    if flow.is_shedding:
        yield "  negative priorities: refused the more, the longer they would wait"
    no_pod = f"up to {format_duration(flow.no_endpoint_ttl)}" if flow.no_endpoint_ttl else "503"
    yield f"  while there is no pod: {no_pod}"


def gateway_line(flow: FlowSettings | None, margin: float) -> str:
    """What `flow` needs of a gateway in front of the EPP, which answers up to `margin` seconds
    after a request's time is over; empty: nothing."""
    if flow is None:
        return ""
    timeout = format_duration(flow.longest_ttl + margin)
    return (
        "gateways that send bodies in mode BUFFERED: need a message_timeout, or a "
        f"max_message_timeout, of at least {timeout} in ext_proc, else a request that waits longer "
        "goes to any pod"
    )


def _saturated(detector: Detector | None) -> str:
    match detector:
        case UtilizationDetector():
            return (
                f"the pods' queues of {detector.queue_depth} or KV caches of "
                f"{detector.kv_cache_util:.0%} are full on average, with what was placed since the "
                "last scrape"
            )
        case ConcurrencyDetector():
            amounts = {
                "requests": f"{detector.max_concurrency} requests",
                "tokens": f"{detector.max_token_concurrency} prompt tokens",
            }
            both = " or ".join(amounts.values())
            return f"each pod has {amounts.get(detector.mode, both)} on average"
    return "the predictions say that no pod has room"


def _ceilings(ceilings: Ceilings | None) -> Iterator[str]:
    match ceilings:
        case StaticCeilings(threshold) if threshold != 1.0:
            yield f"  from {threshold:.0%} of that on"
        case HoldbackCeilings(lowest, highest):
            yield f"  from {highest:.0%} of that on, the lowest priority from {lowest:.0%} on"
        case SoftCeilings():
            yield "  low priorities from less of that on, the more the less often they go"


def _band(band: BandSettings) -> str:
    limits = _limits(band.max_requests, band.max_bytes)
    ttl = format_duration(band.ttl)
    return f"at most {limits}, for {ttl}; {_FAIRNESS[band.fairness]}; {_ORDER[band.order]}"


def _limits(requests: int, size: int) -> str:
    limits = [f"{requests} requests"] if requests < UNLIMITED else []
    return " of ".join([*limits, *([f"{size} bytes"] if size < UNLIMITED else [])])
