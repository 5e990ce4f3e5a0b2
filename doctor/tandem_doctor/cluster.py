"""The pods of a namespace as places to look at, through the API server or, in a pod, directly."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from tandem_contract import labels, ports
from tandem_contract.commandline import HostPort
from tandem_contract.paths import Role
from tandem_kube.errors import ApiError
from tandem_kube.resources import PODS, Object

from .declared import read_command
from .direct import TIMEOUT, asking
from .facts import Declared
from .gather import Ask, NoAnswer, Place

Asking = Callable[[str, HostPort], Ask]
"""(pod, address) → how it is asked."""

_ROLES: Final = frozenset(Role)

if TYPE_CHECKING:
    from tandem_kube.client import Api


@asynccontextmanager
async def places(api: "Api", namespace: str, *, inside: bool) -> AsyncIterator[Sequence[Place]]:
    """The running pods with an engine. `inside`: pod addresses can be reached from here."""
    listed = await api.list(PODS, namespace, fields="status.phase=Running")
    async with aiohttp.ClientSession(timeout=TIMEOUT) as http:

        def ask(pod: str, address: HostPort) -> Ask:
            if inside:
                return asking(http, f"http://{address}")
            return _proxied(api, namespace, pod, address.port)

        yield [place_of(pod, ask, inside=inside) for pod in listed.items if has_engine(pod)]


def has_engine(pod: Object) -> bool:
    """Whether its role is one of ours."""
    return pod["metadata"].get("labels", {}).get(labels.ROLE) in _ROLES


def place_of(pod: Object, asking: Asking, *, inside: bool) -> Place:
    """A pod with a role of ours, the operator's or a user's own."""
    metadata = pod["metadata"]
    name, found = metadata["name"], metadata["labels"]
    listens = {
        port["containerPort"]: container
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])
        for port in container.get("ports", ())
    }
    ip = pod.get("status", {}).get("podIP", "")
    has_sidecar = ports.SIDECAR_ADMIN in listens
    port = ports.ENGINE_DECODE if has_sidecar else _serving_port(metadata)
    address, admin = HostPort(ip, port), HostPort(ip, ports.SIDECAR_ADMIN)
    container = listens.get(port)
    return Place(
        pod=name,
        role=Role(found[labels.ROLE]),
        group=found.get(labels.MODEL, ""),
        address=address,
        ask_engine=asking(name, address),
        ask_sidecar=asking(name, admin) if has_sidecar else None,
        declared=_declared(pod, container) if container else None,
        compat=found.get(labels.KV_COMPAT, ""),
        reaches=inside,
    )


def _serving_port(metadata: Mapping[str, Any]) -> int:
    said = metadata.get("annotations", {}).get(labels.TARGET_PORT, "")
    return int(said) if said.isdecimal() else ports.ENGINE_PREFILL


def _declared(pod: Object, container: Mapping[str, Any]) -> Declared | None:
    """Of what the pod names, with its own address, name and uid filled in.

    None where it names no command: the image's own is not seen from here.
    """
    words = [*container.get("command", ()), *container.get("args", ())]
    if not words:
        return None
    fields = {
        "status.podIP": pod.get("status", {}).get("podIP", ""),
        "metadata.name": pod["metadata"]["name"],
        "metadata.uid": pod["metadata"].get("uid", ""),
    }
    told: dict[str, str] = {}
    for variable in container.get("env", ()):
        source = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        value = variable.get("value", fields.get(source, ""))
        for name, known in told.items():
            value = value.replace(f"$({name})", known)
        told[variable["name"]] = value
    return read_command(words, told)


def _proxied(api: "Api", namespace: str, pod: str, port: int) -> Ask:
    async def ask(path: str) -> bytes:
        try:
            return await api.proxied(pod, namespace, port, path)
        except ApiError as err:
            raise NoAnswer(f"{path}: {err.message}") from err

    return ask
