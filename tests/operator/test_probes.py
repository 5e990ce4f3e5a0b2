"""Probes of engine and sidecar: what `healthChecks` of a pool sets, and what it leaves."""

import inspect
from typing import Any

from tandem_operator.pods import startup
from tandem_sidecar.main import main, settings_from
from tandem_sidecar.settings import HealthChecks

from .rendered_pods import engine, rendered, sidecar

CHECKS: dict[str, Any] = {
    "path": "/ready",
    "startupTimeout": "1h",
    "readiness": {
        "interval": "5s",
        "timeout": "3s",
        "unhealthyThreshold": 4,
        "healthyThreshold": 2,
    },
    "liveness": {"interval": "1m", "timeout": "20s", "unhealthyThreshold": 9},
}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def probes(container: dict[str, Any]) -> dict[str, Any]:
    return {name: container[name] for name in PROBES if name in container}


def probe(path: str, port: int, period: int, timeout: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


def waiting(path: str, port: int, seconds: int, *, timeout: int) -> dict[str, Any]:
    """A startup probe: three commands, each of which waits a third of `seconds`."""
    wait = seconds // 3
    source = inspect.getsource(startup)
    return {
        "exec": {"command": ["python3", "-c", source, str(port), path, str(wait), str(timeout)]},
        "periodSeconds": 1,
        "timeoutSeconds": wait + 10,
        "failureThreshold": 3,
    }


def test_a_pool_sets_the_probes_of_its_engine() -> None:
    prefill, decode = rendered({"healthChecks": CHECKS}, {"healthChecks": CHECKS})
    startup = waiting("/ready", 8000, 3600, timeout=3)
    # Kubernetes takes a number of passes for readiness only.
    readiness = {**probe("/ready", 8000, 5, 3, 4), "successThreshold": 2}
    liveness = probe("/ready", 8000, 60, 20, 9)
    assert probes(engine(prefill)) == dict(zip(PROBES, (startup, readiness, liveness), strict=True))
    assert probes(engine(decode)) == {
        "startupProbe": waiting("/ready", 8200, 3600, timeout=3),
        "livenessProbe": probe("/ready", 8200, 60, 20, 9),
    }


def test_a_pool_sets_the_probes_of_its_sidecar_and_its_check_of_the_engine() -> None:
    _, decode = rendered({}, {"healthChecks": CHECKS})
    container = sidecar(decode)
    assert probes(container) == {
        "startupProbe": waiting("/livez", 8001, 300, timeout=2),
        "readinessProbe": {**probe("/readyz?starting=true", 8001, 5, 3, 4), "successThreshold": 2},
        "livenessProbe": probe("/livez", 8001, 60, 20, 9),
    }
    arguments = [w for w in container["args"] if "$(" not in w]
    at = arguments.index("--health-path")
    flags = main.make_context("tandem-sidecar", arguments[at : at + 6])
    assert settings_from(flags.params).health == HealthChecks("/ready", 5.0, 3.0)


def test_what_a_pool_leaves_out_stays() -> None:
    part = {"readiness": {"healthyThreshold": 3}, "liveness": {"timeout": "30s"}}
    prefill, decode = rendered({"healthChecks": part}, {"healthChecks": part})
    plain_prefill, plain_decode = rendered()
    expected = probes(engine(plain_prefill))
    expected["readinessProbe"]["successThreshold"] = 3
    expected["livenessProbe"]["timeoutSeconds"] = 30
    assert probes(engine(prefill)) == expected
    assert sidecar(decode)["args"] == sidecar(plain_decode)["args"]


def test_other_settings_are_another_revision() -> None:
    names = {
        rendered({"healthChecks": checks})[0]["metadata"]["name"]
        for checks in (None, {}, {"liveness": {}}, {"path": "/ready"})
    }
    assert len(names) == 2, "empty sections state nothing"
