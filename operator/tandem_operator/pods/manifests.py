"""From sets of pools to Pod JSON. Pure.

    for pool_set in parse_pools(documents):
        pods(pool_set)                       -> [{"apiVersion": "v1", "kind": "Pod", …}, …]

    prefill pod   engine :8000
    decode pod    sidecar :8000 and :8001 (native: starts first, stops last), engine :8200

Containers of a pod reach each other at the pod's address. Pods have restartPolicy Never: an engine
restarted in place would keep its engine id although the KV blocks that the id named are gone. The
operator replaces the pod instead.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from tandem_contract import labels
from tandem_contract.paths import Role

from ..resources.pools import DecodePool, Pool, PoolSet, PrefillPool
from ..resources.resolve import DEFAULTS, Defaults
from . import containers, engines, external_storage, sidecar_flags
from .connectors import handoff_ports, transfer_key_secret_of
from .merge import merge

Pod = dict[str, Any]
PodTemplate = dict[str, Any]
"""`{"metadata": {"labels", "annotations"}, "spec"}`."""

_GRACE: Final = 15
"""Seconds between the end of a drain and SIGKILL, for the processes to exit."""
_MAX_LABEL_VALUE: Final = 63
"""Characters of a label's value, at most."""


def pods(pool_set: PoolSet, defaults: Defaults = DEFAULTS) -> list[Pod]:
    """Every Pod of the set before autoscaling: prefill first, then decode pools in order."""
    return [pod for pool in pool_set.pools for pod in _replicas(pool, pool_set, defaults)]


def template(pool: Pool, defaults: Defaults = DEFAULTS) -> PodTemplate:
    """The pod template of the pool, which its ControllerRevision pins.

    Labels of the endpoint are not in it: a change of `routing` relabels live pods instead.
    """
    if isinstance(pool, PrefillPool):
        parts = _prefill_parts(pool, defaults)
    else:
        parts = _decode_parts(pool, defaults)
    own = {
        "labels": {**pool.kueue_labels, **_labels(pool)},
        "annotations": _annotations(pool),
    }
    user = pool.spec.template
    # The user's value of this one wins: a pod may have more in its volumes than Tandem knows.
    evictable = {"annotations": {labels.SAFE_TO_EVICT: "true"}}
    # Own labels are merged again over the user's: selectors and the EPP rely on them.
    metadata = merge(merge(evictable, user.metadata), own)
    spec = merge({**_pod_spec(pool, defaults), **parts}, user.spec)
    # After the merge, because the user's part may state limits below the defaults.
    for kind in ("initContainers", "containers"):
        if isinstance(spec.get(kind), list):
            spec[kind] = [
                containers.default_requests(container, pool.spec.accelerator.count)
                if isinstance(container, dict)
                else container
                for container in spec[kind]
            ]
    return {"metadata": metadata, "spec": spec}


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


def label_value(text: str) -> str:
    """`text` with the characters that a label's value cannot hold replaced by dashes; may be empty.

    >>> label_value("meta-llama/Llama-3.1-8B")
    'meta-llama-Llama-3.1-8B'
    """
    replaced = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:_MAX_LABEL_VALUE]
    return replaced.strip("-_.")


def endpoint_labels(pool: Pool, pool_set: PoolSet) -> dict[str, str]:
    """Labels by which EPPs and Services find the pods of `pool`, a pool of the set."""
    if isinstance(pool, DecodePool):
        return {labels.endpoint_label(pool.spec.routing.endpoint): Role.DECODE.value}
    endpoints = {decode.spec.routing.endpoint for decode in pool_set.decodes}
    return {labels.endpoint_label(name): Role.PREFILL.value for name in sorted(endpoints)}


def pod_names(pool: Pool) -> list[str]:
    """`pool-revision-index` for each replica."""
    return [f"{pool.name}-{pool.revision}-{i}" for i in range(pool.spec.initial_replicas)]


def plan_key_secret(endpoint: str) -> str:
    """Name of the Secret whose keys sign the plans of an endpoint's EPP."""
    return f"{endpoint}-plan-keys"


def plan_key_secrets(sets: Iterable[PoolSet]) -> frozenset[str]:
    """Names of all Secrets that the pods of `sets` mount plan keys from."""
    routings = (pool.spec.routing for pool_set in sets for pool in pool_set.decodes)
    return frozenset(plan_key_secret(r.endpoint) for r in routings if r.epp.enabled)


def transfer_key_secrets(sets: Iterable[PoolSet]) -> frozenset[str]:
    """Names of all Secrets that the pods of `sets` mount transfer keys from."""
    names = (transfer_key_secret_of(pool) for pool_set in sets for pool in pool_set.pools)
    return frozenset(name for name in names if name is not None)


def _replicas(pool: Pool, pool_set: PoolSet, defaults: Defaults) -> Iterator[Pod]:
    pod_template, routing_labels = template(pool, defaults), endpoint_labels(pool, pool_set)
    for name in pod_names(pool):
        yield pod(pod_template, name=name, namespace=pool.namespace, labels=routing_labels)


def _prefill_parts(pool: PrefillPool, defaults: Defaults) -> dict[str, Any]:
    init = containers.storage_packages(pool, defaults)
    return {
        **({"initContainers": init} if init else {}),
        "containers": [containers.prefill_engine(pool)],
        "volumes": engines.engine_needs(pool).volumes,
    }


def _decode_parts(pool: DecodePool, defaults: Defaults) -> dict[str, Any]:
    volumes = [*engines.engine_needs(pool).volumes, sidecar_flags.VOLUME]
    if pool.spec.routing.epp.enabled:
        secret = {"secretName": plan_key_secret(pool.spec.routing.endpoint)}
        volumes = [*volumes, {"name": containers.PLAN_KEYS, "secret": secret}]
    volumes += containers.tls_volumes(containers.tls_secret(pool))
    return {
        "initContainers": [
            containers.sidecar(pool, defaults),
            *containers.storage_packages(pool, defaults),
        ],
        "containers": [containers.decode_engine(pool)],
        "volumes": volumes,
    }


def _labels(pool: Pool) -> dict[str, str]:
    return {
        labels.POOL: pool.name,
        labels.ROLE: pool.role.value,
        labels.MODEL: label_value(pool.spec.model.name),
        labels.REVISION: pool.revision,
        labels.KV_COMPAT: pool.compat,
        **({labels.HANDOFF_PORTS: ports.label} if (ports := handoff_ports(pool)) else {}),
        # llm-d calls a unified pod "both".
        labels.LLMD_ROLE: "both" if pool.role is Role.UNIFIED else pool.role.value,
        labels.NAME: "tandem",
        labels.INSTANCE: pool.name,
        labels.COMPONENT: pool.role.value,
        labels.MANAGED_BY: "tandem-operator",
    }


def _annotations(pool: Pool) -> dict[str, str]:
    served = {labels.SERVED_MODELS: json.dumps(pool.spec.model.names)}
    if (bounds := external_storage.bounds_text(pool.spec.transfer.storage)) is not None:
        served[labels.STORAGE_BOUNDS] = bounds
    if isinstance(pool, PrefillPool):
        return served
    return {**served, labels.SIDECAR_FLAGS: sidecar_flags.flags_text(pool.spec.sidecar)}


def _pod_spec(pool: Pool, defaults: Defaults) -> dict[str, Any]:
    accelerator, placement = pool.spec.accelerator, pool.spec.placement
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(pool.spec.drain.timeout) + _GRACE,
        # Neither engine nor sidecar calls the Kubernetes API.
        "automountServiceAccountToken": False,
        # Kubernetes would set variables such as TANDEM_SIDECAR_PORT for a Service of that name,
        # and the sidecar reads its flags from variables with the same prefix.
        "enableServiceLinks": False,
        "securityContext": containers.pod_security(assigned_user=defaults.assigned_users),
    }
    secrets = dict.fromkeys(
        (*defaults.image_pull_secrets, *(secret.name for secret in pool.spec.image_pull_secrets))
    )
    if secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in secrets]
    if accelerator.node_selector:
        spec["nodeSelector"] = dict(accelerator.node_selector)
    if accelerator.tolerations:
        spec["tolerations"] = list(accelerator.tolerations)
    spec["topologySpreadConstraints"] = [_spread_over_nodes(pool)]
    if placement:
        spec["affinity"] = _affinity_to_set(pool, placement.topology_key)
    return spec


def _spread_over_nodes(pool: Pool) -> dict[str, Any]:
    """Spread a pool's replicas over nodes where possible, so that a lost node takes few of them."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {labels.POOL: pool.name}},
    }


def _affinity_to_set(pool: Pool, topology_key: str) -> dict[str, Any]:
    """Prefer the topology domain of the set's other pods.

    Preferred, not required: a distant pod still serves, an unschedulable one does not.
    """
    term = {
        "topologyKey": topology_key,
        "labelSelector": {"matchLabels": {labels.KV_COMPAT: pool.compat}},
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
