"""Kubernetes' probes of engine and sidecar, and the sidecar's own check of its engine, as
`healthChecks` of the pool says. Pure.

A field that is left out keeps the value below: these are rendered into the templates of all pools,
so a changed value reports UpdateAvailable for each of them.
"""

import inspect
import math
from typing import Any, Final

from tandem_contract import endpoints, ports
from tandem_contract.durations import format_duration

from ..resources.pools import Pool
from ..resources.spec_parts import HealthChecks
from . import startup

Probe = dict[str, Any]

_STARTUP: Final = 1800
"""Seconds an engine may take to load its weights and to compile: 400 GB from a slow disk."""
_SIDECAR_STARTUP: Final = 300
"""Seconds in which sidecar or EPP begin to listen, on the busiest node."""
_STARTUP_ATTEMPTS: Final = 3
"""Startup probes, which share that time and write an event when they fail. More than one: the
kubelet counts a command that it could not run as a failure, too."""
_COMMAND_SECONDS: Final = 10
"""Seconds that a startup probe's command may take beyond what it waits, to start and to end."""
_READY_SECONDS: Final = 2
"""Interval of readiness probes, and timeout of startup probes' requests: a pod serves soon after it
can."""
_READY_TIMEOUT: Final = 15
"""Timeout of readiness probes. The event loop of a busy engine answers late, and a shorter time
empties a pool just when it is needed. Routers notice by themselves, and sooner, that a pod accepts
no connection or fails requests; the sidecar notices that an engine sends nothing."""
_LIVE_SECONDS: Final = 10
"""Interval and timeout of liveness probes."""
_LIVE_FAILURES: Final = 6
"""With the interval a minute: a slow container must not be restarted."""
_ENGINE_READY_FAILURES: Final = 10
_SIDECAR_READY_FAILURES: Final = 2
"""It answers from memory what it has learned of its engine: it, too, forgives slow answers."""


def engine_startup(pool: Pool, port: int) -> Probe:
    """Until it passes, the engine's other probes wait."""
    checks = pool.spec.health_checks
    return _startup(
        _engine_path(pool),
        port,
        seconds=checks.startup_timeout or _STARTUP,
        timeout=int(checks.readiness.timeout or _READY_SECONDS),
    )


def engine_readiness(pool: Pool, port: int) -> Probe:
    """Of an engine without a sidecar in front of it."""
    checks = pool.spec.health_checks
    return _readiness(checks, _engine_path(pool), port, _ENGINE_READY_FAILURES)


def engine_liveness(pool: Pool, port: int) -> Probe:
    """Whether the engine is restarted."""
    return _liveness(pool.spec.health_checks, _engine_path(pool), port)


def sidecar_startup() -> Probe:
    """Kubernetes starts the engine once it passes, so that it must not wait for the engine."""
    return server_startup(endpoints.ALIVE, ports.SIDECAR_ADMIN)


def server_startup(path: str, port: int) -> Probe:
    """Of a sidecar or an EPP."""
    return _startup(path, port, seconds=_SIDECAR_STARTUP, timeout=_READY_SECONDS)


def sidecar_readiness(pool: Pool) -> Probe:
    """Whether the sidecar takes requests and its engine is healthy, once it has been: until then
    the engine's own startup probe keeps the pod from being ready, and this one need not fail."""
    checks = pool.spec.health_checks
    return _readiness(
        checks, endpoints.READY_OR_STARTING, ports.SIDECAR_ADMIN, _SIDECAR_READY_FAILURES
    )


def sidecar_liveness(pool: Pool) -> Probe:
    """Whether the sidecar is restarted."""
    return _liveness(pool.spec.health_checks, endpoints.ALIVE, ports.SIDECAR_ADMIN)


def sidecar_flags(pool: Pool) -> list[str]:
    """Flags for the sidecar's check of its engine; none for what the pool leaves out. They are no
    live flags: a path belongs to the engine of the same pod."""
    checks = pool.spec.health_checks
    durations = {
        "--health-interval": checks.readiness.interval,
        "--health-timeout": checks.readiness.timeout,
    }
    path = ["--health-path", checks.path] if checks.path else []
    stated = ((flag, format_duration(s)) for flag, s in durations.items() if s is not None)
    return [*path, *(word for pair in stated for word in pair)]


def _engine_path(pool: Pool) -> str:
    return pool.spec.health_checks.path or endpoints.HEALTH


def _startup(path: str, port: int, *, seconds: float, timeout: int) -> Probe:
    """A probe that waits, for `seconds` in all its attempts; see `startup`."""
    wait = math.ceil(seconds / _STARTUP_ATTEMPTS)
    source = inspect.getsource(startup)
    return {
        "exec": {"command": ["python3", "-c", source, str(port), path, str(wait), str(timeout)]},
        "periodSeconds": 1,
        "timeoutSeconds": wait + _COMMAND_SECONDS,
        "failureThreshold": _STARTUP_ATTEMPTS,
    }


def _readiness(checks: HealthChecks, path: str, port: int, failures: int) -> Probe:
    stated = checks.readiness
    probe = {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": int(stated.interval or _READY_SECONDS),
        "timeoutSeconds": int(stated.timeout or _READY_TIMEOUT),
        "failureThreshold": stated.unhealthy_threshold or failures,
    }
    if stated.healthy_threshold is not None:
        probe["successThreshold"] = stated.healthy_threshold
    return probe


def _liveness(checks: HealthChecks, path: str, port: int) -> Probe:
    stated = checks.liveness
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": int(stated.interval or _LIVE_SECONDS),
        "timeoutSeconds": int(stated.timeout or _LIVE_SECONDS),
        "failureThreshold": stated.unhealthy_threshold or _LIVE_FAILURES,
    }
