"""The manifests of examples/gateways: valid for the gateways' own definitions, and consistent."""

from itertools import chain
from typing import Any

import pytest
import yaml

from tests.cluster import kubectl
from tests.cluster.control_plane import ControlPlane

from .site import MANIFESTS, manifest

GATEWAYS = sorted(file.stem for file in MANIFESTS.glob("*.yaml") if file.stem != "epp")
WITH_POOLS = [name for name in GATEWAYS if name != "envoy-gateway"]


def validate(cluster: ControlPlane, namespace: str, objects: list[Any]) -> None:
    """Have the API server check the objects, with their unknown fields and CEL rules, and write
    nothing. Raises kubectl.Failed."""
    cluster.kubectl(
        *("create", "--dry-run=server", "--validate=strict", f"--namespace={namespace}"),
        "--filename=-",
        input=yaml.safe_dump_all(objects),
    )


def only(objects: list[Any], kind: str) -> Any:
    """The spec of the only object of `kind`, with its name."""
    (found,) = (each for each in objects if each["kind"] == kind)
    return found["spec"] | {"name": found["metadata"]["name"]}


@pytest.mark.control_plane
@pytest.mark.parametrize("name", ["epp", *GATEWAYS])
def test_the_api_server_accepts_them(
    gateway_definitions: ControlPlane, namespace: str, name: str
) -> None:
    validate(gateway_definitions, namespace, manifest(name))


@pytest.mark.control_plane
@pytest.mark.parametrize("name", GATEWAYS)
def test_the_api_server_rejects_what_its_definitions_do_not_know(
    gateway_definitions: ControlPlane, namespace: str, name: str
) -> None:
    objects = manifest(name)
    objects[-1]["spec"]["noSuchField"] = 1
    with pytest.raises(kubectl.Failed, match="noSuchField"):
        validate(gateway_definitions, namespace, objects)


def test_the_pool_names_the_picker_and_its_port() -> None:
    objects = manifest("epp")
    pool, service = only(objects, "InferencePool"), only(objects, "Service")
    pods = only(objects, "Deployment")["template"]
    reference = pool["endpointPickerRef"]
    assert reference["name"] == service["name"]
    assert reference["port"]["number"] in [port["port"] for port in service["ports"]]
    assert service["selector"].items() <= pods["metadata"]["labels"].items()
    (container,) = pods["spec"]["containers"]
    assert f"--pool-name={pool['name']}" in container["args"]


@pytest.mark.parametrize("name", WITH_POOLS)
def test_the_route_leads_from_the_gateway_to_the_pool(name: str) -> None:
    objects = manifest(name)
    route, pool = only(objects, "HTTPRoute"), only(manifest("epp"), "InferencePool")
    assert route["parentRefs"] == [{"name": only(objects, "Gateway")["name"]}]
    backends = chain.from_iterable(rule["backendRefs"] for rule in route["rules"])
    assert [(each["kind"], each["name"]) for each in backends] == [("InferencePool", pool["name"])]


def test_istio_connects_to_the_picker_over_tls() -> None:
    rule = only(manifest("istio"), "DestinationRule")
    assert rule["host"] == only(manifest("epp"), "Service")["name"]
    assert rule["trafficPolicy"]["tls"]["mode"] == "SIMPLE"
