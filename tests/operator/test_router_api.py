"""The objects of an endpoint on a real API server: accepted, and found again as they were meant."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem_contract import labels
from tandem_operator.observed import Body, EndpointKey
from tandem_operator.router import (
    EndpointPool,
    ObservedEndpoint,
    RouterSettings,
    covers,
    plan_endpoint,
    ref_of,
)
from tandem_operator.router_observed import HTTP_ROUTE, INFERENCE_POOL, INFERENCE_POOL_ALPHA

from ..cluster.control_plane import ControlPlane
from .endpoints import NOW, SECRET, decode
from .pool_yaml import decode_pool

pytestmark = pytest.mark.control_plane

SETTINGS = RouterSettings(
    image_pull_policy="IfNotPresent",
    image_pull_secrets=("registry",),
    envoy_resources={"requests": {"cpu": "1000m"}, "limits": {"memory": "1024Mi"}},
    node_selector={"disk": "fast"},
    tolerations=({"key": "router", "operator": "Exists"},),
    priority_class="system-cluster-critical",
)
GATEWAY_CRDS = (
    ("sigs.k8s.io/gateway-api@v1.3.0", "standard/gateway.networking.k8s.io_httproutes.yaml"),
    (
        "sigs.k8s.io/gateway-api-inference-extension@v1.0.0",
        "bases/inference.networking.k8s.io_inferencepools.yaml",
    ),
    (
        "sigs.k8s.io/gateway-api-inference-extension@v1.0.0",
        "bases/inference.networking.x-k8s.io_inferencepools.yaml",
    ),
)


def observed_in(cluster: ControlPlane, namespace: str, **spec: Any) -> ObservedEndpoint:
    """Endpoint chat of a DecodePool that is there: garbage collection asks for the owner."""
    body = decode_pool(routing={"endpoint": "chat"})
    body["metadata"]["namespace"] = namespace
    made = json.loads(cluster.kubectl("create", "-f-", "-ojson", input=json.dumps(body)))
    pool = EndpointPool(made["metadata"]["uid"], decode(**spec))
    return ObservedEndpoint(EndpointKey(namespace, "chat"), NOW, (pool,), secret=SECRET)


def applied(cluster: ControlPlane, bodies: tuple[Body, ...]) -> list[Body]:
    """What the API server holds once `bodies` are applied as the operator applies them."""
    manifests = {"apiVersion": "v1", "kind": "List", "items": list(bodies)}
    flags = ("--server-side", "--field-manager=test", "--force-conflicts", "--validate=strict")
    held: dict[str, Any] = json.loads(
        cluster.kubectl("apply", *flags, "-f-", "-ojson", input=json.dumps(manifests))
    )
    found: list[Body] = held["items"] if held["kind"] == "List" else [held]
    return found


def test_what_is_applied_is_found_again_and_nothing_more_is_written(
    crds: ControlPlane, namespace: str
) -> None:
    observed = observed_in(crds, namespace)
    plan = plan_endpoint(observed, SETTINGS)
    live = {ref_of(body): body for body in applied(crds, plan.apply)}
    assert [ref_of(body) for body in plan.apply if not covers(live[ref_of(body)], body)] == []
    again = plan_endpoint(replace(observed, children=live, secret=b""), SETTINGS)
    assert (again.apply, again.delete) == ((), ())


def test_a_change_is_written_and_found_again(crds: ControlPlane, namespace: str) -> None:
    observed = observed_in(crds, namespace)
    live = {
        r: b for b in applied(crds, plan_endpoint(observed, SETTINGS).apply) if (r := ref_of(b))
    }
    later = replace(observed, children=live, now=NOW + 3 * 86400)
    changed = replace(SETTINGS, envoy_replicas=3, node_selector={}, priority_class=None)
    plan = plan_endpoint(later, changed)
    kinds = {(body["kind"], body["metadata"]["name"]) for body in plan.apply}
    assert ("Deployment", "chat-envoy") in kinds
    assert ("Secret", "chat-plan-keys") in kinds
    assert ("Service", "chat") not in kinds
    live |= {ref_of(body): body for body in applied(crds, plan.apply)}
    assert plan_endpoint(replace(later, children=live, secret=b""), changed).apply == ()


def test_pods_pass_the_restricted_profile_and_leave_with_the_last_pool(
    crds: ControlPlane, namespace: str
) -> None:
    enforce = "pod-security.kubernetes.io/enforce=restricted"
    crds.kubectl("label", "namespace", namespace, enforce)
    applied(crds, plan_endpoint(observed_in(crds, namespace), RouterSettings()).apply)
    where = f"--namespace={namespace}"
    for component in ("envoy", "epp"):
        chosen = f"--selector={labels.ENDPOINT}=chat,{labels.COMPONENT}={component}"
        crds.kubectl("wait", "pods", where, chosen, "--for=create", "--timeout=60s")
    crds.kubectl("delete", "decodepools", "d", where)
    ours = f"--selector={labels.ENDPOINT}=chat"
    for kind in ("deployments", "services", "secrets", "configmaps", "rolebindings"):
        crds.kubectl("wait", kind, where, ours, "--for=delete", "--timeout=60s")


@pytest.fixture(scope="module")
def gateway_crds(crds: ControlPlane) -> ControlPlane:
    """With the definitions of Gateway API and its Inference Extension, from Go's module proxy."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("no Go to fetch the CRDs of the Gateway API with")
    for module, file in GATEWAY_CRDS:
        done = subprocess.run(
            [go, "mod", "download", "-json", module], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"{module} cannot be fetched: {done.stdout}{done.stderr}")
        path = Path(json.loads(done.stdout)["Dir"]) / "config/crd" / file
        crds.kubectl("apply", "--server-side", f"--filename={path}")
        crds.kubectl("wait", "--for=condition=Established", f"--filename={path}", "--timeout=60s")
    return crds


@pytest.mark.parametrize("pool_kind", [INFERENCE_POOL, INFERENCE_POOL_ALPHA])
def test_inference_pool_and_route_are_what_their_definitions_ask_for(
    gateway_crds: ControlPlane, namespace: str, pool_kind: tuple[str, str]
) -> None:
    routing = {
        "endpoint": "chat",
        "inferencePool": {"enabled": True},
        "gatewayRef": {"name": "inference", "namespace": "gateways", "sectionName": "http"},
    }
    observed = observed_in(gateway_crds, namespace, routing=routing)
    observed = replace(observed, kinds=frozenset({pool_kind, HTTP_ROUTE}))
    wanted = [
        body
        for body in plan_endpoint(observed, SETTINGS).apply
        if (body["apiVersion"], body["kind"]) in observed.kinds
    ]
    assert [body["kind"] for body in wanted] == ["InferencePool", "HTTPRoute"]
    for body, live in zip(wanted, applied(gateway_crds, tuple(wanted)), strict=True):
        assert covers(live, body)
