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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from tandem_contract import endpoints, labels, ports
from tandem_contract.durations import format_duration
from tandem_contract.paths import Role

from . import engines
from .engines import POD_IP
from .labelling import label_value
from .merge import merge
from .pools import DecodePool, PoolSet, PrefillPool
from .resolve import DEFAULTS, Defaults
from .router_wants import disaggregated_serving

Pod = dict[str, Any]
PodTemplate = dict[str, Any]
"""`{"metadata": {"labels", "annotations"}, "spec"}`."""

ENGINE: Final = "engine"
SIDECAR: Final = "sidecar"
"""Names of the containers."""

_USER: Final = 65532
_GRACE: Final = 15
"""Seconds between the end of a drain and the kill, for the processes to leave."""
_STARTUP: Final = 1800
"""Seconds an engine may take to load its weights."""
_PLAN_KEYS: Final = "plan-keys"
_PLAN_KEY_DIR: Final = "/var/run/tandem/plan-keys"


def pods(pool_set: PoolSet, defaults: Defaults = DEFAULTS) -> list[Pod]:
    """Every Pod of the set where nothing scales: prefill first, then decode pools in order."""
    return [made for pool in pool_set.pools for made in _replicas(pool, pool_set, defaults)]


def template(pool: PrefillPool | DecodePool, defaults: Defaults = DEFAULTS) -> PodTemplate:
    """What a revision pins: `{"metadata": {"labels", "annotations"}, "spec"}` of the pool's pods.

    The endpoint's labels are not in it: they follow the routing of live pods.
    """
    parts = _prefill_parts(pool) if isinstance(pool, PrefillPool) else _decode_parts(pool, defaults)
    own = {
        "labels": _labels(pool),
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


def router_config(sets: Sequence[PoolSet], addresses: Mapping[str, str]) -> dict[str, Any]:
    """The router's YAML (seed 000) for pods that run at `addresses`: pod name → IP.

    Raises KeyError when a pod has no address.
    """
    backends = [
        {
            "name": name,
            "url": f"http://{addresses[name]}:{_serving_port(pool)}",
            "role": pool.role.value,
            "models": list(pool.spec.model.names),
        }
        for pool_set in sets
        for pool in pool_set.pools
        for name in pod_names(pool)
    ]
    decodes = (pool for pool_set in sets for pool in pool_set.decodes)
    return {"disaggregated_serving": disaggregated_serving(decodes), "backends": backends}


def _serving_port(pool: PrefillPool | DecodePool) -> int:
    return ports.ENGINE_PREFILL if isinstance(pool, PrefillPool) else ports.SIDECAR


def _replicas(
    pool: PrefillPool | DecodePool, pool_set: PoolSet, defaults: Defaults
) -> Iterator[Pod]:
    made, found_by = template(pool, defaults), endpoint_labels(pool, pool_set)
    for name in pod_names(pool):
        yield pod(made, name=name, namespace=pool.namespace, labels=found_by)


def _prefill_parts(pool: PrefillPool) -> dict[str, Any]:
    engine = _engine(pool, ports.ENGINE_PREFILL, hands_off=True)
    engine["readinessProbe"] = _probe(endpoints.HEALTH, ports.ENGINE_PREFILL, failures=3)
    return {"containers": [engine], "volumes": engines.needs(pool).volumes}


def _decode_parts(pool: DecodePool, defaults: Defaults) -> dict[str, Any]:
    """Their readiness is the sidecar's."""
    hands_off = pool.spec.prefill_ref is not None
    engine = _engine(pool, ports.ENGINE_DECODE, hands_off=hands_off)
    drain = {"path": endpoints.DRAIN_AND_WAIT, "port": ports.SIDECAR_ADMIN}
    engine["lifecycle"] = {"preStop": {"httpGet": drain}}
    volumes = engines.needs(pool).volumes
    if pool.spec.routing.epp.enabled:
        secret = {"secretName": plan_key_secret(pool.spec.routing.endpoint)}
        volumes = [*volumes, {"name": _PLAN_KEYS, "secret": secret}]
    sidecar = _sidecar(pool, defaults.tandem_image)
    return {"initContainers": [sidecar], "containers": [engine], "volumes": volumes}


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
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if accelerator.node_selector:
        spec["nodeSelector"] = dict(accelerator.node_selector)
    if accelerator.tolerations:
        spec["tolerations"] = list(accelerator.tolerations)
    if placement:
        spec["affinity"] = _near_its_set(pool, placement.topology_key)
    return spec


def _near_its_set(pool: PrefillPool | DecodePool, topology_key: str) -> dict[str, Any]:
    """Preferred, not required: a far pod serves, an unschedulable one does not."""
    term = {
        "topologyKey": topology_key,
        "labelSelector": {"matchLabels": {labels.KV_COMPAT: pool.compat}},
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _engine(pool: PrefillPool | DecodePool, port: int, *, hands_off: bool) -> dict[str, Any]:
    command, args = engines.command(pool, port, hands_off=hands_off)
    container = {
        "name": ENGINE,
        "image": pool.spec.engine.image,
        "command": command,
        "args": args,
        "env": engines.environment(pool),
        "ports": _ports(pool, port, hands_off=hands_off),
        "startupProbe": _probe(endpoints.HEALTH, port, failures=_STARTUP // 2),
        "securityContext": _unprivileged(),
    }
    if mounts := engines.needs(pool).mounts:
        container["volumeMounts"] = mounts
    accelerator = pool.spec.accelerator
    if accelerator.count:
        container["resources"] = {"limits": {accelerator.resource: str(accelerator.count)}}
    return container


def _ports(pool: PrefillPool | DecodePool, port: int, *, hands_off: bool) -> list[dict[str, Any]]:
    named = {ENGINE: port, "kv-events": ports.KV_EVENTS, "kv-replay": ports.KV_EVENTS_REPLAY}
    if hands_off:
        named["side-channel"] = pool.spec.transfer.side_channel_port
    return [{"name": name, "containerPort": number} for name, number in named.items()]


def _sidecar(pool: DecodePool, image: str) -> dict[str, Any]:
    container = {
        "name": SIDECAR,
        "image": image,
        "command": ["tandem-sidecar"],
        "args": _sidecar_arguments(pool),
        "restartPolicy": "Always",
        "env": engines.downward_api(),
        "ports": [
            {"name": "http", "containerPort": ports.SIDECAR},
            {"name": "admin", "containerPort": ports.SIDECAR_ADMIN},
        ],
        # No startup probe: the engine would wait for it, and it for the engine.
        "readinessProbe": _probe(endpoints.READY, ports.SIDECAR_ADMIN, failures=2),
        "securityContext": {**_unprivileged(), "readOnlyRootFilesystem": True},
    }
    if pool.spec.routing.epp.enabled:
        mount = {"name": _PLAN_KEYS, "mountPath": _PLAN_KEY_DIR, "readOnly": True}
        container["volumeMounts"] = [mount]
    return container


def _sidecar_arguments(pool: DecodePool) -> list[str]:
    sidecar = pool.spec.sidecar
    fallback = (
        "--fallback-to-unified" if sidecar.fallback_to_unified else "--no-fallback-to-unified"
    )
    arguments = [
        *("--listen", f"{POD_IP}:{ports.SIDECAR}"),
        *("--admin", f"{POD_IP}:{ports.SIDECAR_ADMIN}"),
        *("--engine", f"http://{POD_IP}:{ports.ENGINE_DECODE}"),
        *("--connector", pool.spec.transfer.connector),
        *("--prefill-timeout", format_duration(sidecar.prefill_timeout)),
        *("--kv-transfer-timeout", format_duration(sidecar.kv_transfer_timeout)),
        fallback,
        *("--retries", str(sidecar.retries)),
        *("--drain-timeout", format_duration(pool.spec.drain.timeout)),
        *("--pod-name", "$(POD_NAME)"),
    ]
    if pool.spec.routing.epp.enabled:
        arguments += ["--plan-key-dir", _PLAN_KEY_DIR]
    return arguments


def _probe(path: str, port: int, *, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": 2,
        "timeoutSeconds": 2,
        "failureThreshold": failures,
    }


def _unprivileged() -> dict[str, Any]:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
