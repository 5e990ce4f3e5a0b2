"""A Kubernetes pod as a backend: what its labels, annotations and status say. Pure.

The operator's pods carry all of it; on others only what differs from the defaults is needed:

    role      label tandem.dev/role, else llm-d.ai/role; without either: unified
    port      annotation tandem.dev/target-port; without it: the default
    models    annotation tandem.dev/served-models, else label tandem.dev/model; without: any
    compat    label tandem.dev/kv-compat; KV crosses between equal ones only, absent ones included
    serving   condition Ready, and neither being deleted nor labelled tandem.dev/draining
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from tandem_contract import labels
from tandem_contract.commandline import HostPort
from tandem_contract.config import Backend
from tandem_contract.paths import Role

from .pods import Member

_ROLES: Final[Mapping[str, Role]] = {
    **{role.value: role for role in Role},
    # llm-d's words.
    "both": Role.UNIFIED,
    "prefill-decode": Role.UNIFIED,
    "encode-prefill": Role.PREFILL,
    "encode-prefill-decode": Role.UNIFIED,
}
_names: Final = msgspec.json.Decoder(tuple[str, ...])


@dataclass(frozen=True)
class PodSelection:
    """Which pods of a cluster to serve with."""

    namespace: str
    selector: str
    """Kubernetes' label selector syntax."""
    target_port: int
    """Serving port of a pod that does not say its own."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """A pod that is meant and cannot be used."""

    reason: str
    """What is wrong, and where on the pod."""


def member(body: Mapping[str, Any], default_port: int) -> Member | Unusable | None:
    """The pod `body` as a backend; None while it has no address, and once its containers ended."""
    metadata, status = body["metadata"], body.get("status") or {}
    address = status.get("podIP")
    if not address or status.get("phase") in ("Succeeded", "Failed"):
        return None
    found, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
    try:
        backend = Backend(
            name=metadata["name"],
            url=f"http://{HostPort(address, _port(notes, default_port))}",
            role=_role(found),
            models=_models(found, notes),
            compat=found.get(labels.KV_COMPAT),
        )
    except ValueError as err:
        return Unusable(str(err))
    leaving = "deletionTimestamp" in metadata or labels.DRAINING in found
    return Member(backend, metadata["uid"], serving=_ready(status) and not leaving)


def _role(found: Mapping[str, str]) -> Role:
    for key in (labels.ROLE, labels.LLMD_ROLE):
        if (value := found.get(key)) is not None:
            if value not in _ROLES:
                raise ValueError(f"label {key}: {value!r} is none of {', '.join(_ROLES)}")
            return _ROLES[value]
    return Role.UNIFIED


def _port(notes: Mapping[str, str], default: int) -> int:
    written = notes.get(labels.TARGET_PORT)
    if written is None:
        return default
    if not (written.isascii() and written.isdigit() and 1 <= int(written) <= 65535):
        raise ValueError(f"annotation {labels.TARGET_PORT}: {written!r} is no port")
    return int(written)


def _models(found: Mapping[str, str], notes: Mapping[str, str]) -> tuple[str, ...]:
    written = notes.get(labels.SERVED_MODELS)
    if written is None:
        one = found.get(labels.MODEL)
        return (one,) if one else ()
    try:
        return _names.decode(written)
    except msgspec.MsgspecError as err:
        message = f"annotation {labels.SERVED_MODELS}: {written!r} is no JSON list of names"
        raise ValueError(message) from err


def _ready(status: Mapping[str, Any]) -> bool:
    conditions = status.get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
