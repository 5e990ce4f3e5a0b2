"""The Inference Extension's conformance suite: Istio on the node, our EPP as the pools' picker.

The suite runs once; each of its tests is a test here.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from tests.cluster import gateway_crds, gobuild, kubectl, network, node_images, tools
from tests.cluster.node import Node

from .conformance import BACKEND, ECHO_IMAGE, INFRA, Results, run
from .istio import istiod

pytestmark = [
    pytest.mark.node,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("istiod_program", "conformance_program"),
    pytest.mark.asyncio(loop_scope="module"),
]

DEFINITIONS = (gateway_crds.GATEWAY_API, gateway_crds.INFERENCE, gateway_crds.ISTIO)
PASSES = (
    "EppUnAvailableFailOpen",
    "GatewayDestinationEndpointServed",
    "GatewayFollowingEPPRouting",
    "GatewayFollowingEPPRoutingWithDataParallelism",
    "HTTPRouteInvalidInferencePoolRef",
    "HTTPRouteMultipleGatewaysDifferentPools",
    "HTTPRouteMultipleRulesDifferentPools",
    "InferencePoolAccepted",
    "InferencePoolAppProtocol",
    "InferencePoolHTTPRoutePortValidation",
    "InferencePoolInvalidEPPService",
    "InferencePoolMissingEPPRef",
    "InferencePoolResolvedRefsCondition",
)
FAILS = {
    "GatewayWeightedAcrossTwoInferencePools": "of several pools in a rule, Istio asks the picker "
    "of the last one only",
}
"""The suite's test, and the reason."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def results(node: Node, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Results]:
    folder = tmp_path_factory.mktemp("conformance")
    with prepared(node, folder):
        async with istiod(node.kubeconfig, folder, network.HOST_IP) as control:
            yield run(node, control, folder)


@contextmanager
def prepared(node: Node, folder: Path) -> Iterator[None]:
    """The node with the gateways' definitions and the image of the suite's pods."""
    program = tools.path(gobuild.ECHO)
    node.load_image(node_images.write_image(folder, ECHO_IMAGE, program, "/echo-basic"))
    definitions = [f"--filename={each.folder(tools.cache())}" for each in DEFINITIONS]
    with ExitStack() as stack:
        stack.callback(node.kubectl, "delete", "--ignore-not-found", *definitions)
        node.kubectl("apply", "--server-side", *definitions)
        kubectl.wait_until_established(node.kubeconfig, *definitions)
        namespaces = ("istio-system", INFRA, BACKEND)
        stack.callback(node.delete_namespaces, *namespaces)
        node.kubectl("create", "namespace", "istio-system")
        yield


@pytest.mark.parametrize("name", PASSES)
async def test_it_passes(results: Results, name: str) -> None:
    assert results.of(name) == "PASS", results.output_of(name)


@pytest.mark.parametrize("name", FAILS)
async def test_it_fails_for_a_known_reason(results: Results, name: str) -> None:
    assert results.of(name) == "FAIL", f"{name} no longer fails, although {FAILS[name]}"


async def test_the_suite_has_no_other_tests(results: Results) -> None:
    assert results.names == {*PASSES, *FAILS}, results.output[-4000:]
