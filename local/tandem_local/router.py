"""The router as Pod JSON: EPP and Envoy, which the runner runs like every other pod."""

import json
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tandem_contract import endpoints, labels, ports
from tandem_operator.pods.containers import body_limit_flag

from .errors import SetupError

EPP: Final = "epp"
ENVOY: Final = "envoy"
PLAN_KEY_ID: Final = "k1"
_POD_IP: Final = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


def find_envoy(environ: Mapping[str, str] = os.environ, prefix: Path | None = None) -> Path:
    """Envoy's binary: $TANDEM_ENVOY, `.venv-envoy` beside the Python environment, or PATH.

    Raises SetupError with the ways to install it.
    """
    if file := environ.get("TANDEM_ENVOY"):
        if not os.access(file, os.X_OK) or Path(file).is_dir():
            raise SetupError(
                f"TANDEM_ENVOY={file} is not an executable file: set it to Envoy's binary"
            )
        return Path(file)
    venv = (prefix or Path(sys.prefix)).parent / ".venv-envoy"
    binaries = sorted(venv.glob("lib/python*/site-packages/envoy/_bin/envoy"))
    if binaries:
        return binaries[0]
    if on_path := shutil.which("envoy", path=environ.get("PATH")):
        return Path(on_path)
    raise SetupError(
        f"Envoy is not installed: run make setup, put envoy on PATH, or name it in TANDEM_ENVOY "
        f"(looked in {venv} and on PATH)"
    )


def write_plan_key(directory: Path) -> None:
    """Write a new random key, which only the EPP and the sidecars of this run know."""
    # A key is used for one run only: plans of an earlier run must not verify.
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    file = directory / PLAN_KEY_ID
    # The mode is set before the content is written, so that no other user can ever read the key.
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))


def epp_pod(config: Path, plan_keys: Path, body_limit: int | None) -> dict[str, Any]:
    """The endpoint picker, reading its backends from `config`; `body_limit` in bytes."""
    command = ["tandem-epp", "--config", str(config), "--plan-key-dir", str(plan_keys)]
    command += body_limit_flag(body_limit)
    for flag, port in (
        ("--listen", ports.EPP_GRPC),
        ("--health", ports.EPP_HEALTH),
        ("--metrics", ports.EPP_METRICS),
    ):
        command += [flag, f"$(POD_IP):{port}"]
    listen_ports = [ports.EPP_GRPC, ports.EPP_HEALTH, ports.EPP_METRICS]
    ready = {"httpGet": {"path": endpoints.READY, "port": ports.EPP_HEALTH}, "periodSeconds": 5}
    return _pod(EPP, "tandem", command, listen_ports, ready)


def envoy_pod(binary: Path, bootstrap: Path) -> dict[str, Any]:
    """Envoy with a bootstrap file whose admin interface listens at the pod's address."""
    # Hot restart uses names that a second Envoy on this machine would share. Envoy's default is
    # one worker per core, and the engines need the cores.
    command = [str(binary), "-c", str(bootstrap), "--concurrency", "1", "--disable-hot-restart"]
    ready = {"httpGet": {"path": "/ready", "port": ports.ENVOY_ADMIN}, "periodSeconds": 5}
    return _pod(ENVOY, "envoyproxy/envoy", command, [ports.ENVOY_ADMIN], ready)


def write_json(path: Path, value: object) -> Path:
    """Write `value` to `path` as JSON (which is YAML, too), readable by its owner alone."""
    # Mode first, as in `write_plan_key`.
    path.touch(mode=0o600)
    path.write_text(json.dumps(value, indent=2))
    return path


def _pod(
    name: str, image: str, command: list[str], listen_ports: list[int], ready: dict[str, Any]
) -> dict[str, Any]:
    container = {
        "name": name,
        "image": image,
        "command": command,
        "env": [_POD_IP],
        "ports": [{"containerPort": port} for port in listen_ports],
        "readinessProbe": ready,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {labels.COMPONENT: name}},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 5},
    }
