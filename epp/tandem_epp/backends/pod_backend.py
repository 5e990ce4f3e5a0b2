"""A Kubernetes pod as backends, from its labels, annotations and status. Pure.

The operator's pods carry all of these; other pods need only what differs from the defaults:

    role      label tandem.dev/role, else label llm-d.ai/role; default: unified
    port      annotation tandem.dev/target-port; default: that of the selection. Where it has
              several, each is a backend of its own, which annotation llm-d.ai/active-ports can
              narrow down
    models    annotation tandem.dev/served-models, else label tandem.dev/model; default: any
    compat    label tandem.dev/kv-compat: KV is handed off only between pods with the same value,
              or between pods that both have none
    node      spec.nodeName
    domain    label tandem.dev/fabric-domain, else the label that the configuration names; a label
              of nodes that the pod selects (spec.nodeSelector) counts as its own
    serving   condition Ready is true, the pod is not being deleted and not labelled
              tandem.dev/draining
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from tandem_contract import labels, ports
from tandem_contract.commandline import HostPort
from tandem_contract.config import Backend
from tandem_contract.paths import Role

from .pods import DiscoveredBackend

_ROLES: Final[Mapping[str, Role]] = {
    **{role.value: role for role in Role},
    # llm-d's values.
    "both": Role.UNIFIED,
    "prefill-decode": Role.UNIFIED,
    "encode-prefill": Role.PREFILL,
    "encode-prefill-decode": Role.UNIFIED,
}
_model_names: Final = msgspec.json.Decoder(tuple[str, ...])


@dataclass(frozen=True)
class PodSelection:
    """Which pods of a cluster are backends."""

    namespace: str
    selector: str
    """A Kubernetes label selector."""
    target_ports: tuple[int, ...] = (ports.SIDECAR,)
    """Serving ports of a pod without the annotation tandem.dev/target-port; each has an engine."""
    http2: bool = False
    """Whether these ports speak HTTP/2 without TLS, and no HTTP/1.1."""


@dataclass(frozen=True, slots=True)
class InvalidPod:
    """A selected pod whose labels or annotations cannot be read."""

    reason: str
    """The label or annotation that is invalid, and why."""


def pod_backends(
    pod: Mapping[str, Any], target_ports: Sequence[int], *, http2: bool = False
) -> tuple[DiscoveredBackend, ...] | InvalidPod | None:
    """The backends in a pod object; None while it has no address, and once its containers ended.
    `target_ports` and `http2` are as in PodSelection.

    The backend of a pod with one port has the pod's name. One of several is named after the index
    of its port, as llm-d's endpoints are.
    """
    metadata, status = pod["metadata"], pod.get("status") or {}
    spec = pod.get("spec") or {}
    address = status.get("podIP")
    # A pod that ended keeps its IP in the status, while the address may belong to another pod.
    if not address or status.get("phase") in ("Succeeded", "Failed"):
        return None
    pod_labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    try:
        backends = [
            Backend(
                name=name,
                url=f"http://{HostPort(address, port)}",
                role=_role(pod_labels),
                models=_models(pod_labels, annotations),
                compat=pod_labels.get(labels.KV_COMPAT),
                node=spec.get("nodeName"),
                http2=http2,
                labels=_all_labels(spec, pod_labels),
            )
            for name, port in _ports(metadata["name"], annotations, target_ports)
        ]
    except ValueError as err:
        return InvalidPod(str(err))
    # The operator labels a pod that it drains before it deletes it.
    leaving = "deletionTimestamp" in metadata or labels.DRAINING in pod_labels
    serving, uid = _is_ready(status) and not leaving, metadata["uid"]
    return tuple(DiscoveredBackend(b, uid, serving=serving, leaving=leaving) for b in backends)


def with_domain(discovered: DiscoveredBackend, label: str) -> DiscoveredBackend:
    """`discovered` with its fabric domain: that of Tandem's own label, else that of `label`."""
    all_labels = discovered.backend.labels
    domain = all_labels.get(labels.FABRIC_DOMAIN) or all_labels.get(label) or None
    if domain == discovered.backend.domain:
        return discovered
    return replace(discovered, backend=msgspec.structs.replace(discovered.backend, domain=domain))


def _all_labels(spec: Mapping[str, Any], pod_labels: Mapping[str, str]) -> dict[str, str]:
    """The labels of a pod, and those that its node has for certain."""
    node = {labels.HOSTNAME: spec["nodeName"]} if spec.get("nodeName") else {}
    return {**node, **(spec.get("nodeSelector") or {}), **pod_labels}


def _role(pod_labels: Mapping[str, str]) -> Role:
    for key in (labels.ROLE, labels.LLMD_ROLE):
        if (value := pod_labels.get(key)) is not None:
            if value not in _ROLES:
                raise ValueError(f"label {key}: unknown role {value!r}, use {', '.join(_ROLES)}")
            return _ROLES[value]
    return Role.UNIFIED


def _ports(
    pod: str, annotations: Mapping[str, str], target_ports: Sequence[int]
) -> list[tuple[str, int]]:
    """Name and port of each backend of `pod`."""
    text = annotations.get(labels.TARGET_PORT)
    if text is not None:
        return [(pod, _port(labels.TARGET_PORT, text))]
    active = set(target_ports)
    for key in (labels.LLMD_ACTIVE_PORTS, labels.GAIE_ACTIVE_PORTS):
        if (listed := annotations.get(key)) is not None:
            active = {_port(key, port.strip()) for port in listed.split(",")}
            break
    # The index counts all ports: a backend keeps its name when another port becomes inactive.
    names = (
        [pod] if len(target_ports) == 1 else [f"{pod}-rank-{i}" for i in range(len(target_ports))]
    )
    return [(n, port) for n, port in zip(names, target_ports, strict=True) if port in active]


def _port(annotation: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise ValueError(f"annotation {annotation}: {text!r} is not a port, 1 to 65535")
    return int(text)


def _models(pod_labels: Mapping[str, str], annotations: Mapping[str, str]) -> tuple[str, ...]:
    text = annotations.get(labels.SERVED_MODELS)
    if text is None:
        model = pod_labels.get(labels.MODEL)
        return (model,) if model else ()
    try:
        return _model_names.decode(text)
    except msgspec.MsgspecError as err:
        message = f"annotation {labels.SERVED_MODELS}: {text!r} is not a JSON list of model names"
        raise ValueError(message) from err


def _is_ready(status: Mapping[str, Any]) -> bool:
    conditions = status.get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
