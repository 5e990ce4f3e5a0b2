"""What the conformance suite of the Gateway API Inference Extension needs of an endpoint picker.

Its tests name the endpoints that a request may go to, and read from the response which endpoint the
gateway used. The meaning is llm-d's (llm-d-router, plugins/scheduling/test/filter and
plugins/requestcontrol/test), with one difference: without the header every endpoint stays, as with
the picker that the suite itself deploys (pkg/lwepp of the Inference Extension), because some of its
tests send no header. Not for serving: any client could choose its pod.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem_contract import headers as wire

from ...backends.pods import Pod
from ...choice.context import ChoiceContext


@dataclass(frozen=True)
class EndpointSelectionFilter:
    """Keeps the endpoints that the request header `test-epp-endpoint-selection` names, in its
    order: `IP` or `IP:port`, with commas. One endpoint per IP: the first that is named; for an IP
    without port, the last of its endpoints. All without the header."""

    is_steady = False

    def keep(self, pods: Sequence[Pod], context: ChoiceContext) -> Sequence[Pod]:
        named = context.headers.get(wire.TEST_SELECTION)
        if named is None:
            return pods
        by_ip = {_split(pod.address)[0]: pod for pod in pods if pod.address is not None}
        by_address = {_split(pod.address): pod for pod in pods if pod.address is not None}
        kept: dict[str, Pod] = {}
        for ip, port in _named(named):
            pod = by_address.get((ip, port)) if port else by_ip.get(ip)
            if pod is not None:
                kept.setdefault(ip, pod)
        return list(kept.values())


@dataclass(frozen=True)
class ServedHeader:
    """The response header that tells which endpoint the gateway used, by its own account."""

    def response_header(
        self, _decode: Pod, _prefill: Pod | None, served: str | None
    ) -> tuple[str, str]:
        """Name and value; `served` is the endpoint, None if the gateway does not tell."""
        return wire.TEST_SERVED, served or f"fail: missing {wire.SERVED_ENDPOINT} metadata"


def _named(value: str) -> Iterator[tuple[str, str]]:
    """IP and port of each item of the header; the port may be empty."""
    return (_split(item.strip()) for item in value.split(",") if item.strip())


def _split(address: str) -> tuple[str, str]:
    """IP, without brackets, and port of `address`; an empty port if it has none."""
    host, colon, port = address.rpartition(":")
    is_ip = not colon or address.endswith("]") or (":" in host and not host.endswith("]"))
    return (address.strip("[]"), "") if is_ip else (host.strip("[]"), port)
