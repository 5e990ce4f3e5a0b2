"""The containers of a pod: the engine, and on decode pods the sidecar in front of it.

prefill   engine :8000, ready when it answers /health. preStop waits until decode engines have
          read its KV.
decode    sidecar :8000, ready when it and the engine are. The engine's preStop tells the sidecar
          to refuse new requests and waits until it has finished the others.

Pods and containers keep to the restricted pod security standard of Kubernetes.
"""

import inspect
import math
from typing import Any, Final

from tandem_contract import endpoints, metrics, ports
from tandem_contract.durations import format_duration

from ..resources.pools import DecodePool, Pool, PrefillPool
from ..resources.resolve import Defaults
from ..resources.spec import SIDECAR
from . import (
    connectors,
    drain_hook,
    engines,
    external_storage,
    prestop,
    probes,
    sidecar_flags,
)
from .connectors import POD_IP

Container = dict[str, Any]

ENGINE: Final = "engine"
"""Name of the engine's container."""
STORAGE_PACKAGES: Final = "storage-packages"
"""Name of the init container that copies the packages of vLLM's storage connector."""
PLAN_KEYS: Final = "plan-keys"
"""Name of the volume with the keys that verify the EPP's plans."""

_MESSAGE_POLICY: Final = "FallbackToLogsOnError"
"""terminationMessagePolicy: the end of a failed container's log goes into its status, from where
the operator copies it into the pool's conditions."""
_SIDECAR_REQUESTS: Final = {"cpu": "100m", "memory": "96Mi"}
"""An idle sidecar's memory; CPU for some hundred requests per second."""
_CPU_SIDECAR_REQUESTS: Final = {**_SIDECAR_REQUESTS, "cpu": "50m"}
"""A sidecar beside an engine without accelerators, which serves a few requests per second."""
_COPY_REQUESTS: Final = {"cpu": "10m", "memory": "16Mi"}
"""A copy of 15 MB. Quotas on requests refuse a pod with a container that states none."""
_CPU_ENGINE_REQUESTS: Final = {"cpu": "100m", "memory": "512Mi"}
"""The torch engine with a small model: the quickstart's engines, sidecars, router and operator fit
two cores beside kube-system. A real model on CPUs needs `engine.resources`."""
_MEMORY_PER_ACCELERATOR: Final = 4
"""GiB of host memory, beside one CPU: less than vLLM uses while it loads weights, so that the
request never keeps a pod from a node that has the accelerators."""
_PLAN_KEY_DIR: Final = "/var/run/tandem/plan-keys"
TLS_DIRECTORY: Final = "/var/run/tandem/tls"
_USER: Final = 65532
"""A user id that no image assigns, so that the process owns no file of the image."""


def default_requests(container: Container, accelerators: int) -> Container:
    """The container with requests for CPU and memory, for each that it states neither a request nor
    a limit for: a pod without any is evicted first and starves beside others. What the user's
    template makes unreadable stays, and the API server says what is wrong with it."""
    if container.get("name") == SIDECAR:
        defaults = _SIDECAR_REQUESTS if accelerators else _CPU_SIDECAR_REQUESTS
    elif container.get("name") != ENGINE:
        return container
    elif accelerators:
        defaults = {
            "cpu": str(accelerators),
            "memory": f"{_MEMORY_PER_ACCELERATOR * accelerators}Gi",
        }
    else:
        defaults = _CPU_ENGINE_REQUESTS
    resources = container.get("resources") or {}
    if not isinstance(resources, dict):
        return container
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    if not (isinstance(limits, dict) and isinstance(requests, dict)):
        return container
    # A limit is the request where there is none, and a request must not be above its limit.
    missing = {n: each for n, each in defaults.items() if n not in limits and n not in requests}
    if not missing:
        return container
    return {**container, "resources": {**resources, "requests": {**missing, **requests}}}


def pod_security(*, assigned_user: bool) -> dict[str, Any]:
    """`securityContext` of a pod; its volumes are writable for the pod's user (fsGroup).

    `assigned_user`: the platform chooses user and groups, and may refuse a pod that names them.
    """
    ids = {"runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER}
    return {
        "runAsNonRoot": True,
        **({} if assigned_user else ids),
        # By default Kubernetes changes the group of every file of a volume, at each start of a pod.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(*, read_only: bool, locks_memory: bool = False) -> dict[str, Any]:
    """`securityContext` of a container; `read_only`: its root file system cannot be written.

    `locks_memory`: it registers memory with RDMA devices, beyond the limit on locked memory.
    """
    capabilities = {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if locks_memory else {})}
    context = {"allowPrivilegeEscalation": False, "capabilities": capabilities}
    return {**context, "readOnlyRootFilesystem": True} if read_only else context


def prefill_engine(pool: PrefillPool) -> Container:
    """The engine of a prefill pod."""
    container = _engine(pool, ports.ENGINE_PREFILL, handoff=True)
    container["readinessProbe"] = probes.engine_readiness(pool, ports.ENGINE_PREFILL)
    # The torch engine drains by itself after SIGTERM and needs no hook.
    if pool.spec.engine.type == "vllm":
        container["lifecycle"] = {"preStop": {"exec": {"command": _wait_until_idle(pool)}}}
    return container


def decode_engine(pool: DecodePool) -> Container:
    """The engine of a decode pod. It has no readiness probe: the sidecar's covers both."""
    handoff = pool.spec.prefill_ref is not None
    container = _engine(pool, ports.ENGINE_DECODE, handoff=handoff)
    # A hook of the engine's container, so that its SIGTERM waits until the sidecar has drained.
    source = inspect.getsource(drain_hook)
    where = endpoints.DRAIN_SOCKET, str(ports.SIDECAR_ADMIN), endpoints.DRAIN_AND_WAIT
    container["lifecycle"] = {"preStop": {"exec": {"command": ["python3", "-c", source, *where]}}}
    return container


def sidecar(pool: DecodePool, defaults: Defaults) -> Container:
    """A native sidecar: Kubernetes starts it before the engine and stops it after."""
    container: Container = {
        "name": SIDECAR,
        "image": defaults.tandem_image,
        "command": ["tandem-sidecar"],
        "args": _sidecar_arguments(pool, defaults),
        "restartPolicy": "Always",
        "env": engines.downward_api(),
        "ports": [
            {"name": "http", "containerPort": ports.SIDECAR},
            {"name": "admin", "containerPort": ports.SIDECAR_ADMIN},
        ],
        "startupProbe": probes.sidecar_startup(),
        "readinessProbe": probes.sidecar_readiness(pool),
        "livenessProbe": probes.sidecar_liveness(pool),
        "securityContext": container_security(read_only=True),
        "terminationMessagePolicy": _MESSAGE_POLICY,
    }
    if defaults.pull_policy:
        container["imagePullPolicy"] = defaults.pull_policy
    container["volumeMounts"] = [sidecar_flags.MOUNT]
    if pool.spec.routing.epp.enabled:
        mount = {"name": PLAN_KEYS, "mountPath": _PLAN_KEY_DIR, "readOnly": True}
        container["volumeMounts"].append(mount)
    container["volumeMounts"] += tls_mounts(tls_secret(pool))
    return container


def body_limit_flag(limit: int | None) -> list[str]:
    """The flag of the EPP and of the sidecar for `routing.maxRequestBytes`."""
    return ["--max-body", str(limit)] if limit else []


def tls_flags(secret: str | None) -> list[str]:
    """The flag of the EPP and of the sidecar for `routing.tls`; none without a Secret."""
    return ["--mutual-tls", TLS_DIRECTORY] if secret else []


def tls_mounts(secret: str | None) -> list[dict[str, Any]]:
    """Where Envoy, EPP and sidecar find the certificates."""
    return [{"name": "tls", "mountPath": TLS_DIRECTORY, "readOnly": True}] if secret else []


def tls_volumes(secret: str | None) -> list[dict[str, Any]]:
    """The volume of `tls_mounts`."""
    return [{"name": "tls", "secret": {"secretName": secret}}] if secret else []


def tls_secret(pool: DecodePool) -> str | None:
    """Name of the Secret for TLS between Envoy, EPP and sidecar; None: clear text."""
    return pool.spec.routing.tls.secret_name if pool.spec.routing.tls else None


def storage_packages(pool: Pool, defaults: Defaults) -> list[Container]:
    """The init container that brings vLLM's storage connector, if the pool's engine loads it."""
    store = pool.spec.transfer.storage
    if store is None or not external_storage.needs_packages(pool):
        return []
    container: Container = {
        "name": STORAGE_PACKAGES,
        # The image's entrypoint copies the packages.
        "image": store.image or defaults.vllm_storage_image,
        "args": [external_storage.PACKAGES_MOUNT["mountPath"]],
        "resources": {"requests": dict(_COPY_REQUESTS)},
        "securityContext": container_security(read_only=True),
        "terminationMessagePolicy": _MESSAGE_POLICY,
        "volumeMounts": [external_storage.PACKAGES_MOUNT],
    }
    if defaults.pull_policy and not store.image:
        container["imagePullPolicy"] = defaults.pull_policy
    return [container]


def _engine(pool: Pool, port: int, *, handoff: bool) -> Container:
    engine = pool.spec.engine
    command, args = engines.command(pool, port, handoff=handoff)
    container: Container = {
        "name": ENGINE,
        "image": engine.image,
        "command": command,
        "args": args,
        "env": engines.environment(pool, handoff=handoff),
        "ports": _ports(pool, port, handoff=handoff),
        "startupProbe": probes.engine_startup(pool, port),
        "livenessProbe": probes.engine_liveness(pool, port),
        "securityContext": container_security(
            read_only=engine.type == "torch",
            locks_memory=handoff and pool.spec.transfer.rdma is not None,
        ),
        "terminationMessagePolicy": _MESSAGE_POLICY,
        "volumeMounts": engines.engine_needs(pool).mounts,
    }
    if engine.env_from:
        container["envFrom"] = list(engine.env_from)
    if engine.image_pull_policy:
        container["imagePullPolicy"] = engine.image_pull_policy
    if resources := _resources(pool, handoff=handoff):
        container["resources"] = resources
    return container


def _resources(pool: Pool, *, handoff: bool) -> dict[str, Any]:
    """CPU and memory as the user says, and devices, whose limit Kubernetes takes as request."""
    spec = pool.spec
    limits: dict[str, Any] = dict(spec.engine.resources.limits)
    if spec.accelerator.count:
        limits[spec.accelerator.resource] = str(spec.accelerator.count)
    if handoff and spec.transfer.rdma:
        limits[spec.transfer.rdma.resource] = str(spec.transfer.rdma.count)
    requests = dict(spec.engine.resources.requests)
    return {
        **({"requests": requests} if requests else {}),
        **({"limits": limits} if limits else {}),
    }


def _ports(pool: Pool, port: int, *, handoff: bool) -> list[dict[str, Any]]:
    ranks = pool.spec.parallelism.data
    port_by_name = {
        ENGINE: port,
        **connectors.rank_ports("kv-events", ports.KV_EVENTS, ranks),
        **connectors.rank_ports("kv-replay", ports.KV_EVENTS_REPLAY, ranks),
        **(connectors.connector_ports(pool) if handoff else {}),
    }
    return [{"name": name, "containerPort": number} for name, number in port_by_name.items()]


def _wait_until_idle(pool: PrefillPool) -> list[str]:
    """The preStop command of a vLLM prefill engine.

    It is the source of `prestop` and runs in the engine's container, whose image has nothing of
    Tandem. The source is therefore part of every such pod's template.
    """
    seconds = str(math.ceil(pool.spec.drain.timeout))
    gauges = (metrics.ENGINE_RUNNING, metrics.ENGINE_WAITING, metrics.ENGINE_KV_USAGE)
    # A change of that file changes these templates, and every vLLM PrefillPool then reports
    # UpdateAvailable.
    source = inspect.getsource(prestop)
    return ["python3", "-c", source, str(ports.ENGINE_PREFILL), seconds, *gauges]


def _max_model_len(pool: DecodePool) -> list[str]:
    """For an engine with an API key, whose list of models the sidecar cannot read."""
    length = pool.spec.engine.max_model_len
    return [] if length is None else ["--max-model-len", str(length)]


def _sidecar_arguments(pool: DecodePool, defaults: Defaults) -> list[str]:
    # Brackets make IPv6 addresses unambiguous and are accepted around IPv4 addresses as well.
    arguments = [
        *("--listen", f"[{POD_IP}]:{ports.SIDECAR}"),
        *("--admin", f"[{POD_IP}]:{ports.SIDECAR_ADMIN}"),
        *("--engine", f"http://[{POD_IP}]:{ports.ENGINE_DECODE}"),
        *("--connector", pool.spec.transfer.handoff_connector),
        *connectors.peer_port_flag(pool),
        *probes.sidecar_flags(pool),
        *_max_model_len(pool),
        *sidecar_flags.ARGUMENTS,
        *("--drain-timeout", format_duration(pool.spec.drain.timeout)),
        *("--pod-name", "$(POD_NAME)"),
        *(word for path in pool.spec.routing.api_paths for word in ("--api-path", path)),
    ]
    arguments += body_limit_flag(pool.spec.routing.max_request_bytes)
    arguments += tls_flags(tls_secret(pool))
    if pool.spec.routing.epp.enabled:
        return [*arguments, "--plan-key-dir", _PLAN_KEY_DIR]
    # Another picker signs no plans, so the sidecar follows its choices only within these networks.
    allow = (word for net in defaults.pod_networks for word in ("--prefill-allow", net))
    return [*arguments, *allow]
