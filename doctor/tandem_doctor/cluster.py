"""The pods of a namespace as places to look at, through the API server or, in a pod, directly."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tandem_contract import labels, ports
from tandem_contract.commandline import HostPort
from tandem_contract.paths import Role
from tandem_kube.errors import ApiError
from tandem_kube.resources import PODS, Object

from .declared import read_command
from .facts import Declared
from .gather import Ask, NoAnswer, Place

Asking = Callable[[str, int], Ask]
"""(pod, port) → how it is asked."""

if TYPE_CHECKING:
    from tandem_kube.client import Api


async def places(api: "Api", namespace: str, *, inside: bool) -> Sequence[Place]:
    """The running pods with an engine. `inside`: pod addresses can be reached from here."""
    listed = await api.list(PODS, namespace, fields="status.phase=Running")
    return [
        place_of(pod, lambda name, port: _proxied(api, namespace, name, port), inside=inside)
        for pod in listed.items
        if labels.ROLE in pod["metadata"].get("labels", {})
    ]


def place_of(pod: Object, asking: Asking, *, inside: bool) -> Place:
    """A pod that carries our labels."""
    metadata, role = pod["metadata"], Role(pod["metadata"]["labels"][labels.ROLE])
    listens = {
        port["containerPort"]: container
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])
        for port in container.get("ports", ())
    }
    has_sidecar = ports.SIDECAR_ADMIN in listens
    port = ports.ENGINE_DECODE if has_sidecar else ports.ENGINE_PREFILL
    ip = pod.get("status", {}).get("podIP", "")
    return Place(
        pod=metadata["name"],
        role=role,
        group=metadata["labels"].get(labels.MODEL, ""),
        address=HostPort(ip, port),
        ask_engine=asking(metadata["name"], port),
        ask_sidecar=asking(metadata["name"], ports.SIDECAR_ADMIN) if has_sidecar else None,
        declared=_declared(pod, listens.get(port, {})),
        reaches=inside,
    )


def _declared(pod: Object, container: Mapping[str, Any]) -> Declared:
    """Of what the pod names, with its own address, name and uid filled in."""
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
    words = [*container.get("command", ()), *container.get("args", ())]
    return read_command(words, told)


def _proxied(api: "Api", namespace: str, pod: str, port: int) -> Ask:
    async def ask(path: str) -> bytes:
        try:
            return await api.proxied(pod, namespace, port, path)
        except ApiError as err:
            raise NoAnswer(f"{path}: {err.message}") from err

    return ask
