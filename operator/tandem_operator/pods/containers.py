"""The containers of a pod: the engine, and on decode pods the sidecar in front of it.

prefill   engine :8000, ready when it answers; before it stops it waits for its readers
decode    sidecar :8000, ready when it and the engine are; before the engine stops, the
          sidecar refuses new requests and lets those it has finish
"""

import inspect
import math
from typing import Any, Final

from tandem_contract import endpoints, metrics, ports
from tandem_contract.durations import format_duration

from ..resources.pools import DecodePool, PrefillPool
from ..resources.resolve import Defaults
from . import connectors, engines, prestop
from .connectors import POD_IP, Pool
from .security import container_security

Container = dict[str, Any]

ENGINE: Final = "engine"
SIDECAR: Final = "sidecar"
"""Names of the containers."""
PLAN_KEYS: Final = "plan-keys"
"""Name of the volume of keys."""

_LAST_WORDS: Final = "FallbackToLogsOnError"
"""Why a container failed stands in its status, and so in the pool's conditions."""
_STARTUP: Final = 1800
"""Seconds an engine may take to load its weights and to compile: 400 GB from a slow disk."""
_PLAN_KEY_DIR: Final = "/var/run/tandem/plan-keys"


def prefill_engine(pool: PrefillPool) -> Container:
    """The engine of a prefill pod."""
    container = _engine(pool, ports.ENGINE_PREFILL, hands_off=True)
    container["readinessProbe"] = _probe(endpoints.HEALTH, ports.ENGINE_PREFILL, failures=3)
    if pool.spec.engine.type == "vllm":
        container["lifecycle"] = {"preStop": {"exec": {"command": _wait_until_idle(pool)}}}
    return container


def decode_engine(pool: DecodePool) -> Container:
    """The engine of a decode pod, readiness being the sidecar's."""
    hands_off = pool.spec.prefill_ref is not None
    container = _engine(pool, ports.ENGINE_DECODE, hands_off=hands_off)
    drain = {"path": endpoints.DRAIN_AND_WAIT, "port": ports.SIDECAR_ADMIN}
    container["lifecycle"] = {"preStop": {"httpGet": drain}}
    return container


def sidecar(pool: DecodePool, defaults: Defaults) -> Container:
    """A native sidecar: up before the engine, down after it."""
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
        # No startup probe: the engine would wait for it, and it for the engine.
        "readinessProbe": _probe(endpoints.READY, ports.SIDECAR_ADMIN, failures=2),
        "livenessProbe": _liveness(endpoints.ALIVE, ports.SIDECAR_ADMIN),
        "securityContext": container_security(read_only=True),
        "terminationMessagePolicy": _LAST_WORDS,
    }
    if defaults.pull_policy:
        container["imagePullPolicy"] = defaults.pull_policy
    if pool.spec.routing.epp.enabled:
        mount = {"name": PLAN_KEYS, "mountPath": _PLAN_KEY_DIR, "readOnly": True}
        container["volumeMounts"] = [mount]
    return container


def _engine(pool: Pool, port: int, *, hands_off: bool) -> Container:
    engine = pool.spec.engine
    command, args = engines.command(pool, port, hands_off=hands_off)
    container: Container = {
        "name": ENGINE,
        "image": engine.image,
        "command": command,
        "args": args,
        "env": engines.environment(pool, hands_off=hands_off),
        "ports": _ports(pool, port, hands_off=hands_off),
        "startupProbe": _probe(endpoints.HEALTH, port, failures=_STARTUP // 2),
        "livenessProbe": _liveness(endpoints.HEALTH, port),
        "securityContext": container_security(read_only=engine.type == "torch"),
        "terminationMessagePolicy": _LAST_WORDS,
        "volumeMounts": engines.needs(pool).mounts,
    }
    if engine.image_pull_policy:
        container["imagePullPolicy"] = engine.image_pull_policy
    if resources := _resources(pool, hands_off=hands_off):
        container["resources"] = resources
    return container


def _resources(pool: Pool, *, hands_off: bool) -> dict[str, Any]:
    """What the user says of CPU and memory, and the devices, whose limit is their request."""
    spec = pool.spec
    limits: dict[str, Any] = dict(spec.engine.resources.limits)
    if spec.accelerator.count:
        limits[spec.accelerator.resource] = str(spec.accelerator.count)
    if hands_off and spec.transfer.rdma:
        limits[spec.transfer.rdma.resource] = str(spec.transfer.rdma.count)
    requests = dict(spec.engine.resources.requests)
    return {
        **({"requests": requests} if requests else {}),
        **({"limits": limits} if limits else {}),
    }


def _ports(pool: Pool, port: int, *, hands_off: bool) -> list[dict[str, Any]]:
    ranks = pool.spec.parallelism.data
    named = {
        ENGINE: port,
        **connectors.per_rank("kv-events", ports.KV_EVENTS, ranks),
        **connectors.per_rank("kv-replay", ports.KV_EVENTS_REPLAY, ranks),
        **(connectors.listening(pool) if hands_off else {}),
    }
    return [{"name": name, "containerPort": number} for name, number in named.items()]


def _wait_until_idle(pool: PrefillPool) -> list[str]:
    """Runs in the engine's container, so that it works when nothing of ours is up."""
    seconds = str(math.ceil(pool.spec.drain.timeout))
    watched = (metrics.ENGINE_RUNNING, metrics.ENGINE_WAITING, metrics.ENGINE_KV_USAGE)
    source = inspect.getsource(prestop)
    return ["python3", "-c", source, str(ports.ENGINE_PREFILL), seconds, *watched]


def _sidecar_arguments(pool: DecodePool, defaults: Defaults) -> list[str]:
    settings = pool.spec.sidecar
    fallback = (
        "--fallback-to-unified" if settings.fallback_to_unified else "--no-fallback-to-unified"
    )
    # In brackets an address is read rightly, whichever its family.
    arguments = [
        *("--listen", f"[{POD_IP}]:{ports.SIDECAR}"),
        *("--admin", f"[{POD_IP}]:{ports.SIDECAR_ADMIN}"),
        *("--engine", f"http://[{POD_IP}]:{ports.ENGINE_DECODE}"),
        *("--connector", pool.spec.transfer.hand_off),
        *connectors.peer_port(pool),
        *("--prefill-timeout", format_duration(settings.prefill_timeout)),
        *("--kv-transfer-timeout", format_duration(settings.kv_transfer_timeout)),
        fallback,
        *("--retries", str(settings.retries)),
        *("--drain-timeout", format_duration(pool.spec.drain.timeout)),
        *("--pod-name", "$(POD_NAME)"),
    ]
    if pool.spec.routing.epp.enabled:
        return [*arguments, "--plan-key-dir", _PLAN_KEY_DIR]
    # Another picker signs nothing: its choices are followed within the cluster's networks.
    return [*arguments, *(w for net in defaults.pod_networks for w in ("--prefill-allow", net))]


def _probe(path: str, port: int, *, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": 2,
        "timeoutSeconds": 2,
        "failureThreshold": failures,
    }


def _liveness(path: str, port: int) -> dict[str, Any]:
    """Patient: what is only slow must not be restarted."""
    return {**_probe(path, port, failures=6), "periodSeconds": 10, "timeoutSeconds": 10}
