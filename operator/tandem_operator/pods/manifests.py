"""From sets of pools to Pod JSON and to the router's static configuration; pure.

    for pool_set in parse_pools(documents):
        pods(pool_set)                       -> [{"apiVersion": "v1", "kind": "Pod", …}, …]

    prefill pod   engine :8000
    decode pod    sidecar :8000 and :8001 (a native sidecar: up first, down last), engine :8200

Containers of a pod find each other at the pod's address. A pod's engine is not restarted in
place: its engine id would outlive the KV blocks it named, so the pod is replaced instead.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from tandem_contract import labels
from tandem_contract.paths import Role

from ..resources.pools import DecodePool, PoolSet, PrefillPool
from ..resources.resolve import DEFAULTS, Defaults
from . import containers, engines
from .labelling import label_value
from .merge import merge
from .security import pod_security

Pod = dict[str, Any]
PodTemplate = dict[str, Any]
"""`{"metadata": {"labels", "annotations"}, "spec"}`."""

_GRACE: Final = 15
"""Seconds between the end of a drain and the kill, for the processes to leave."""


def pods(pool_set: PoolSet, defaults: Defaults = DEFAULTS) -> list[Pod]:
    """Every Pod of the set where nothing scales: prefill first, then decode pools in order."""
    return [made for pool in pool_set.pools for made in _replicas(pool, pool_set, defaults)]


def template(pool: PrefillPool | DecodePool, defaults: Defaults = DEFAULTS) -> PodTemplate:
    """What a revision pins: `{"metadata": {"labels", "annotations"}, "spec"}` of the pool's pods.

    The endpoint's labels are not in it: they follow the routing of live pods.
    """
    parts = _prefill_parts(pool) if isinstance(pool, PrefillPool) else _decode_parts(pool, defaults)
    own = {
        "labels": {**pool.queueing, **_labels(pool)},
        "annotations": {labels.SERVED_MODELS: json.dumps(pool.spec.model.names)},
    }
    users = pool.spec.template
    metadata = merge(merge(own, users.metadata), own)
    return {"metadata": metadata, "spec": merge({**_pod_spec(pool), **parts}, users.spec)}


def pod(
    template: PodTemplate,
    *,
    name: str,
    namespace: str,
    owner: Mapping[str, Any] | None = None,
    labels: Mapping[str, str] = MappingProxyType({}),
) -> Pod:
    """A Pod of `template`, with `labels` beside the template's; `owner` is an ownerReference."""
    metadata = template["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **metadata,
            "name": name,
            "namespace": namespace,
            "labels": {**metadata["labels"], **labels},
            **({"ownerReferences": [dict(owner)]} if owner else {}),
        },
        "spec": template["spec"],
    }


def endpoint_labels(pool: PrefillPool | DecodePool, pool_set: PoolSet) -> dict[str, str]:
    """Labels by which EPPs and Services find the pods of `pool`, a pool of the set."""
    if isinstance(pool, DecodePool):
        return {labels.endpoint_label(pool.spec.routing.endpoint): Role.DECODE.value}
    endpoints = {decode.spec.routing.endpoint for decode in pool_set.decodes}
    return {labels.endpoint_label(one): Role.PREFILL.value for one in sorted(endpoints)}


def pod_names(pool: PrefillPool | DecodePool) -> list[str]:
    """`pool-revision-index` for each replica."""
    return [f"{pool.name}-{pool.revision}-{i}" for i in range(pool.spec.initial_replicas)]


def plan_key_secret(endpoint: str) -> str:
    """Name of the Secret whose keys sign the plans of an endpoint's EPP."""
    return f"{endpoint}-plan-keys"


def plan_key_secrets(sets: Iterable[PoolSet]) -> frozenset[str]:
    """Names of all Secrets that the pods of `sets` mount plan keys from."""
    routings = (pool.spec.routing for pool_set in sets for pool in pool_set.decodes)
    return frozenset(plan_key_secret(r.endpoint) for r in routings if r.epp.enabled)


def _replicas(
    pool: PrefillPool | DecodePool, pool_set: PoolSet, defaults: Defaults
) -> Iterator[Pod]:
    made, found_by = template(pool, defaults), endpoint_labels(pool, pool_set)
    for name in pod_names(pool):
        yield pod(made, name=name, namespace=pool.namespace, labels=found_by)


def _prefill_parts(pool: PrefillPool) -> dict[str, Any]:
    engine = containers.prefill_engine(pool)
    return {"containers": [engine], "volumes": engines.needs(pool).volumes}


def _decode_parts(pool: DecodePool, defaults: Defaults) -> dict[str, Any]:
    volumes = engines.needs(pool).volumes
    if pool.spec.routing.epp.enabled:
        secret = {"secretName": plan_key_secret(pool.spec.routing.endpoint)}
        volumes = [*volumes, {"name": containers.PLAN_KEYS, "secret": secret}]
    return {
        "initContainers": [containers.sidecar(pool, defaults)],
        "containers": [containers.decode_engine(pool)],
        "volumes": volumes,
    }


def _labels(pool: PrefillPool | DecodePool) -> dict[str, str]:
    return {
        labels.POOL: pool.name,
        labels.ROLE: pool.role.value,
        labels.MODEL: label_value(pool.spec.model.name),
        labels.REVISION: pool.revision,
        labels.KV_COMPAT: pool.compat,
        # llm-d's word for a pod that does both.
        labels.LLMD_ROLE: "both" if pool.role is Role.UNIFIED else pool.role.value,
        labels.NAME: "tandem",
        labels.INSTANCE: pool.name,
        labels.COMPONENT: pool.role.value,
        labels.MANAGED_BY: "tandem-operator",
    }


def _pod_spec(pool: PrefillPool | DecodePool) -> dict[str, Any]:
    accelerator, placement = pool.spec.accelerator, pool.spec.placement
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(pool.spec.drain.timeout) + _GRACE,
        "automountServiceAccountToken": False,
        # A Service called tandem-sidecar would otherwise set the sidecar's flags.
        "enableServiceLinks": False,
        "securityContext": pod_security(),
    }
    if accelerator.node_selector:
        spec["nodeSelector"] = dict(accelerator.node_selector)
    if accelerator.tolerations:
        spec["tolerations"] = list(accelerator.tolerations)
    spec["topologySpreadConstraints"] = [_over_nodes(pool)]
    if placement:
        spec["affinity"] = _near_its_set(pool, placement.topology_key)
    return spec


def _over_nodes(pool: PrefillPool | DecodePool) -> dict[str, Any]:
    """Replicas of a pool on several nodes where that is possible: one node takes few with it."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {labels.POOL: pool.name}},
    }


def _near_its_set(pool: PrefillPool | DecodePool, topology_key: str) -> dict[str, Any]:
    """Preferred, not required: a far pod serves, an unschedulable one does not."""
    term = {
        "topologyKey": topology_key,
        "labelSelector": {"matchLabels": {labels.KV_COMPAT: pool.compat}},
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
