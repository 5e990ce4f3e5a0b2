"""The router's own pods: EPP and Envoy as Pod JSON, so that they run as every other pod does."""

import json
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tandem_contract import labels, ports

from .errors import Refused

EPP: Final = "epp"
ENVOY: Final = "envoy"
PLAN_KEY_ID: Final = "k1"
_POD_IP: Final = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


def find_envoy(environ: Mapping[str, str] = os.environ, prefix: Path | None = None) -> Path:
    """Envoy's binary: $TANDEM_ENVOY, `.venv-envoy` beside the Python environment, or PATH.

    Raises Refused with the way to get it.
    """
    if named := environ.get("TANDEM_ENVOY"):
        if not os.access(named, os.X_OK) or Path(named).is_dir():
            raise Refused(f"TANDEM_ENVOY={named}: is no program: name Envoy's binary")
        return Path(named)
    tools = (prefix or Path(sys.prefix)).parent / ".venv-envoy"
    found = sorted(tools.glob("lib/python*/site-packages/envoy/_bin/envoy"))
    if found:
        return found[0]
    if on_path := shutil.which("envoy", path=environ.get("PATH")):
        return Path(on_path)
    raise Refused(
        f"Envoy is not installed: run make setup, put envoy on PATH, or name it in TANDEM_ENVOY "
        f"(looked in {tools} and on PATH)"
    )


def write_plan_key(directory: Path) -> None:
    """A new random key that only this run's EPP and sidecars know."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    file = directory / PLAN_KEY_ID
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))


def epp_pod(config: Path, plan_keys: Path) -> dict[str, Any]:
    """The endpoint picker, reading its backends from `config`."""
    command = ["tandem-epp", "--config", str(config), "--plan-key-dir", str(plan_keys)]
    for flag, port in (
        ("--listen", ports.EPP_GRPC),
        ("--health", ports.EPP_HEALTH),
        ("--metrics", ports.EPP_METRICS),
    ):
        command += [flag, f"$(POD_IP):{port}"]
    listens = [ports.EPP_GRPC, ports.EPP_HEALTH, ports.EPP_METRICS]
    ready = {"httpGet": {"path": "/readyz", "port": ports.EPP_HEALTH}, "periodSeconds": 5}
    return _pod(EPP, "tandem", command, listens, ready)


def envoy_pod(binary: Path, bootstrap: Path) -> dict[str, Any]:
    """Envoy with a bootstrap whose admin listens at the pod's address."""
    command = [str(binary), "-c", str(bootstrap), "--concurrency", "1", "--disable-hot-restart"]
    ready = {"httpGet": {"path": "/ready", "port": ports.ENVOY_ADMIN}, "periodSeconds": 5}
    return _pod(ENVOY, "envoyproxy/envoy", command, [ports.ENVOY_ADMIN], ready)


def write_json(path: Path, value: object) -> Path:
    """`value` in `path` (JSON, so YAML too), readable by its owner alone."""
    path.touch(mode=0o600)
    path.write_text(json.dumps(value, indent=2))
    return path


def _pod(
    name: str, image: str, command: list[str], listens: list[int], ready: dict[str, Any]
) -> dict[str, Any]:
    container = {
        "name": name,
        "image": image,
        "command": command,
        "env": [_POD_IP],
        "ports": [{"containerPort": port} for port in listens],
        "readinessProbe": ready,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {labels.COMPONENT: name}},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 5},
    }
