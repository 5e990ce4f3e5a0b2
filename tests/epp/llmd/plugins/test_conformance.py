"""The plugins for conformance tests of gateways."""

import pytest

from tandem_contract.config import Backend
from tandem_epp.backends.pods import Pod
from tandem_epp.choice.context import ChoiceContext
from tandem_epp.llmd.plugins.conformance import EndpointSelectionFilter, ServedHeader

# Two data-parallel ranks on 10.0.0.1, each with its own port.
PODS = [
    Pod(Backend(name=name, url=f"http://{address}"))
    for name, address in {
        "a-0": "10.0.0.1:8000",
        "a-1": "10.0.0.1:8001",
        "b": "10.0.0.2:8000",
        "six": "[fd00::1]:8000",
    }.items()
]


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("10.0.0.2", ["b"]),
        (" 10.0.0.2 , 10.0.0.1:8000,", ["b", "a-0"]),
        ("10.0.0.1", ["a-1"]),
        ("10.0.0.1:8000,10.0.0.1:8001", ["a-0"]),
        ("10.0.0.1:8002", []),
        ("10.0.0.3,10.0.0.2", ["b"]),
        ("fd00::1", ["six"]),
        ("[fd00::1]", ["six"]),
        ("[fd00::1]:8000", ["six"]),
        ("10.0.0.2:", ["b"]),
        (" , ", []),
    ],
)
def test_the_named_endpoints_stay(value: str, names: list[str]) -> None:
    context = ChoiceContext(None, headers={"test-epp-endpoint-selection": value})
    assert [pod.name for pod in EndpointSelectionFilter().keep(PODS, context)] == names


def test_every_endpoint_stays_without_the_header() -> None:
    assert EndpointSelectionFilter().keep(PODS, ChoiceContext(None)) == PODS


def test_the_served_endpoint_or_what_is_missing() -> None:
    name = "x-conformance-test-served-endpoint"
    assert ServedHeader().response_header(PODS[0], None, "10.0.0.1:8000") == (name, "10.0.0.1:8000")
    missing = "fail: missing x-gateway-destination-endpoint-served metadata"
    assert ServedHeader().response_header(PODS[0], None, None) == (name, missing)
