"""The quickstart's pods fit a node with two cores, as the scheduler counts: by their requests.

Counted from the manifests that the chart and the operator write, beside what kube-system asks for
on a node of kubeadm (kind adds its network plugin, the largest of the common single-node clusters).
"""

from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tandem_contract.documents import load_documents
from tandem_operator.observed import EndpointKey
from tandem_operator.planning.drift import quantity
from tandem_operator.planning.node_fit import pod_requests
from tandem_operator.planning.rollout import pool_limits
from tandem_operator.pods.manifests import pods
from tandem_operator.resources.pool_files import parse_pools
from tandem_operator.routing.endpoint.observed import EndpointPool, ObservedEndpoint
from tandem_operator.routing.endpoint.plan import plan_endpoint
from tandem_operator.routing.endpoint.settings import RouterSettings, load_router_settings

from .programs import objects

pytestmark = [pytest.mark.component, pytest.mark.usefixtures("helm")]

QUICKSTART = Path(__file__).parents[2] / "examples/quickstart.yaml"
KUBE_SYSTEM = {
    "etcd": ("100m", "100Mi"),
    "kube-apiserver": ("250m", "0"),
    "kube-controller-manager": ("200m", "0"),
    "kube-scheduler": ("100m", "0"),
    "coredns": ("200m", "140Mi"),
    "kindnet": ("100m", "50Mi"),
}
"""CPU and memory that kubeadm's pods, two of coredns, and kind's network plugin ask for."""
NODE = {"cpu": Decimal(2), "memory": Decimal(4 * 1024**3)}
"""A small virtual machine."""

Amounts = Mapping[str, Decimal]


def test_the_quickstart_fits_two_cores_beside_kube_system(tmp_path: Path) -> None:
    total = sum_of([*_kube_system(), *_installed(), *_router(tmp_path), *_pools()])
    # Pods that a rollout of both pools adds for a while; without room for them it would not begin.
    extra = sum_of(_surge())
    for resource, size in NODE.items():
        asked = total[resource] + extra[resource]
        assert asked <= size, f"{resource}: {total[resource]} + {extra[resource]} of {size}"
    assert extra["cpu"] > 0, "no pod was counted for the rollout"


def sum_of(pod_amounts: Iterable[Amounts]) -> Amounts:
    listed = [*pod_amounts]
    # A pod without a request is an error here: the sum would say nothing about it.
    return {
        resource: sum((amounts[resource] for amounts in listed), Decimal(0)) for resource in NODE
    }


def _kube_system() -> list[Amounts]:
    return [
        {"cpu": quantity(cpu) or Decimal(0), "memory": quantity(memory) or Decimal(0)}
        for cpu, memory in KUBE_SYSTEM.values()
    ]


def _installed() -> list[Amounts]:
    return [*_deployed(objects())]


def _router(folder: Path) -> list[Amounts]:
    """Envoy and EPP of the quickstart's endpoint, with the settings that the chart writes."""
    (config,) = (each for each in objects() if each["kind"] == "ConfigMap")
    file = folder / "router.yaml"
    file.write_text(config["data"]["router.yaml"])
    (pool_set,) = parse_pools(load_documents(QUICKSTART))
    (decode,) = pool_set.decodes
    key = EndpointKey(decode.namespace, decode.name)
    observed = ObservedEndpoint(
        key=key, now=0.0, pools=(EndpointPool("uid", decode),), secret=bytes(32)
    )
    plan = plan_endpoint(observed, load_router_settings(file, RouterSettings()))
    amounts = [*_deployed(plan.apply)]
    assert len(amounts) == 4, "two Envoys and two EPPs"
    return amounts


def _deployed(manifests: Any) -> Iterator[Amounts]:
    for manifest in manifests:
        if manifest["kind"] == "Deployment":
            spec = manifest["spec"]
            yield from [pod_requests(spec["template"]["spec"])] * spec["replicas"]


def _pools() -> list[Amounts]:
    (pool_set,) = parse_pools(load_documents(QUICKSTART))
    return [pod_requests(pod["spec"]) for pod in pods(pool_set)]


def _surge() -> list[Amounts]:
    """What the pools ask for beyond their replicas while they roll out."""
    (pool_set,) = parse_pools(load_documents(QUICKSTART))
    rendered = {pod["metadata"]["labels"]["tandem.dev/pool"]: pod for pod in pods(pool_set)}
    return [
        pod_requests(rendered[pool.name]["spec"])
        for pool in pool_set.pools
        for _ in range(pool_limits(pool, pool.spec.initial_replicas).surge)
    ]
