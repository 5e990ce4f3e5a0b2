"""The pods of a namespace to check, through the API server or, inside the cluster, directly."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from tandem_contract import labels, ports
from tandem_contract.commandline import HostPort
from tandem_contract.paths import Role
from tandem_kube.resources import PODS, Object

from .engine_command import parse_command
from .facts import EngineCommand
from .gather import TargetPod, Targets
from .pod_http import TIMEOUT, Get, direct, proxied

MakeGet = Callable[[str, HostPort], Get]
"""(pod, address) → how its endpoints are read."""

_ROLES: Final = frozenset(Role)
_PLAN_KEYS: Final = "plan-key-dir"
_ENVOY: Final = "envoy"

if TYPE_CHECKING:
    from tandem_kube.client import Api


@asynccontextmanager
async def targets_of(api: "Api", namespace: str, *, inside: bool) -> AsyncIterator[Targets]:
    """The running pods with an engine or an EPP. `inside`: their addresses can be reached from
    here."""
    listing = await api.list(PODS, namespace, fields="status.phase=Running")
    async with aiohttp.ClientSession(timeout=TIMEOUT) as http:

        def make_get(pod: str, address: HostPort) -> Get:
            if inside:
                return direct(http, f"http://{address}")
            return proxied(api, namespace, pod, address.port)

        pods = listing.items
        yield Targets(
            [target_pod(pod, make_get, inside=inside) for pod in pods if has_engine(pod)],
            [target_epp(pod, make_get) for pod in pods if is_epp(pod)],
            epps_behind_envoy(pods),
        )


def has_engine(pod: Object) -> bool:
    """Whether the pod has a role that Tandem knows."""
    return pod["metadata"].get("labels", {}).get(labels.ROLE) in _ROLES


def is_epp(pod: Object) -> bool:
    """Whether the pod declares the ports of an EPP, whether the operator or a user made it, or of a
    router of the operator, which knows the same at the same port."""
    declared = {
        port["containerPort"] for c in pod["spec"]["containers"] for port in c.get("ports", ())
    }
    of_router = {ports.ROUTER, ports.ROUTER_ADMIN, ports.EPP_PEERS}
    return {ports.EPP_GRPC, ports.EPP_METRICS} <= declared or of_router <= declared


def epps_behind_envoy(pods: Iterable[Object]) -> frozenset[str]:
    """Names of the EPPs of endpoints that have an Envoy of the operator."""

    def of(pod: Object, label: str) -> str:
        return str(pod["metadata"].get("labels", {}).get(label, ""))

    pods = list(pods)
    endpoints = {of(pod, labels.ENDPOINT) for pod in pods if of(pod, labels.COMPONENT) == _ENVOY}
    endpoints.discard("")
    return frozenset(
        pod["metadata"]["name"]
        for pod in pods
        if is_epp(pod) and of(pod, labels.ENDPOINT) in endpoints
    )


def target_epp(pod: Object, make_get: MakeGet) -> tuple[str, Get]:
    """Name of an EPP's pod, and how its metrics port is read."""
    name, ip = pod["metadata"]["name"], pod.get("status", {}).get("podIP", "")
    return name, make_get(name, HostPort(ip, ports.EPP_METRICS))


def target_pod(pod: Object, make_get: MakeGet, *, inside: bool) -> TargetPod:
    """Parse a pod with an engine, whether the operator or a user made it."""
    metadata = pod["metadata"]
    name, pod_labels = metadata["name"], metadata["labels"]
    # The declared ports identify the containers: users may name theirs as they like.
    containers = {
        port["containerPort"]: container
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])
        for port in container.get("ports", ())
    }
    ip = pod.get("status", {}).get("podIP", "")
    has_sidecar = ports.SIDECAR_ADMIN in containers
    # A sidecar takes the serving port, so its engine listens on another one.
    port = ports.ENGINE_DECODE if has_sidecar else _serving_port(metadata)
    address, admin = HostPort(ip, port), HostPort(ip, ports.SIDECAR_ADMIN)
    container = containers.get(port)
    return TargetPod(
        pod=name,
        role=Role(pod_labels[labels.ROLE]),
        group=pod_labels.get(labels.MODEL, ""),
        address=address,
        get_engine=make_get(name, address),
        get_sidecar=make_get(name, admin) if has_sidecar else None,
        command=_engine_command(pod, container) if container else None,
        compat=pod_labels.get(labels.KV_COMPAT, ""),
        has_plan_keys=_has_plan_keys(containers.get(ports.SIDECAR_ADMIN)),
        has_gpu=container is not None and _asks_for_gpus(container),
        # The API server forwards HTTP to pods, but no connections to side channels.
        is_reachable=inside,
    )


def _asks_for_gpus(container: Mapping[str, Any]) -> bool:
    """Whether it has a device plugin's resource such as nvidia.com/gpu or amd.com/gpu."""
    limits = container.get("resources", {}).get("limits", {})
    return any(name.endswith("/gpu") for name in limits)


def _has_plan_keys(sidecar: Mapping[str, Any] | None) -> bool | None:
    """Whether the container's flags name plan keys; None if it states no flags."""
    words = [*sidecar.get("command", ()), *sidecar.get("args", ())] if sidecar else []
    return _PLAN_KEYS in parse_command(words, {}).flags if words else None


def _serving_port(metadata: Mapping[str, Any]) -> int:
    annotation = metadata.get("annotations", {}).get(labels.TARGET_PORT, "")
    return int(annotation) if annotation.isdecimal() else ports.ENGINE_PREFILL


def _engine_command(pod: Object, container: Mapping[str, Any]) -> EngineCommand | None:
    """Command, args and env of the container, with the pod's address, name and uid filled in.

    None if the pod names no command: the image's own is not visible from here.
    """
    words = [*container.get("command", ()), *container.get("args", ())]
    if not words:
        return None
    fields = {
        "status.podIP": pod.get("status", {}).get("podIP", ""),
        "metadata.name": pod["metadata"]["name"],
        "metadata.uid": pod["metadata"].get("uid", ""),
    }
    env: dict[str, str] = {}
    for variable in container.get("env", ()):
        source = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        value = variable.get("value", fields.get(source, ""))
        # As in Kubernetes, $(NAME) refers to variables that stand earlier in the list.
        for earlier, earlier_value in env.items():
            value = value.replace(f"$({earlier})", earlier_value)
        env[variable["name"]] = value
    return parse_command(words, env)
