"""Rendered pods for tests, and access to their containers."""

from typing import Any

from tandem_operator.pods.manifests import pods

from .pool_yaml import pair

TORCH = {
    "engine": {"type": "torch", "image": "tandem-engine:1.0.0"},
    "model": {"name": "m", "source": {"path": "/models/m"}},
    "accelerator": {},
}


def rendered(
    prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first prefill pod and the first decode pod."""
    bodies = pods(pair(prefill, decode)[0])
    return bodies[0], bodies[1]


def engine(pod: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = pod["spec"]["containers"][0]
    return container


def sidecar(pod: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = pod["spec"]["initContainers"][0]
    return container


def value_of(flag: str, container: dict[str, Any]) -> str:
    args: list[str] = container["args"]
    return args[args.index(flag) + 1]
