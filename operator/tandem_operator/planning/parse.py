"""API objects → the frozen values of `observed`, each object by itself, once per change of it.

Pods and nodes are read leniently: a field that is absent or of another shape counts as not said.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final, cast, get_args

from tandem_contract import labels
from tandem_contract.paths import Role

from ..crd import DECODE_POOL, PREFILL_POOL
from ..observed import (
    KINDS,
    Body,
    NodeState,
    Phase,
    PodName,
    PodState,
    PoolKey,
    PoolResource,
    RevisionState,
    SetKey,
)

_PHASES: Final = frozenset(get_args(Phase))
_WAITING_IS_NORMAL: Final = frozenset({"ContainerCreating", "PodInitializing", ""})
_LONGEST: Final = 1024
_LAST_WORDS: Final = 512
"""Characters kept of a container's last output: its end says why."""


def pool_resource(body: Body) -> PoolResource:
    """Raises KeyError for what is no API object of ours."""
    metadata = body["metadata"]
    kind = body["kind"]
    if kind not in KINDS:
        raise KeyError(kind)
    return PoolResource(
        key=PoolKey(metadata["namespace"], kind, metadata["name"]),
        uid=metadata["uid"],
        generation=int(metadata.get("generation", 0)),
        annotations=_mapping(metadata, "annotations"),
        created=timestamp(metadata.get("creationTimestamp")) or 0.0,
        body=body,
    )


def set_key(body: Body) -> SetKey:
    """The set that a pool's object belongs to; raises KeyError as `pool_resource` does."""
    metadata, kind = body["metadata"], body["kind"]
    namespace, name = metadata["namespace"], metadata["name"]
    if kind != DECODE_POOL:
        return SetKey(namespace, name)
    reference = _mapping(_mapping(body, "spec"), "prefillRef").get("name")
    return SetKey(namespace, str(reference)) if reference else SetKey(namespace, name, "DecodePool")


def pod_state(body: Body) -> PodState:
    """Raises KeyError for an object without name or uid."""
    metadata, spec, status = body["metadata"], _mapping(body, "spec"), _mapping(body, "status")
    found = _mapping(metadata, "labels")
    conditions = {one.get("type"): one for one in _mappings(status, "conditions")}
    ready = conditions.get("Ready", {})
    is_ready = ready.get("status") == "True"
    phase = status.get("phase", "Pending")
    deleting = "deletionTimestamp" in metadata
    return PodState(
        name=PodName(metadata["name"]),
        uid=metadata["uid"],
        pool=found.get(labels.POOL, ""),
        role=found.get(labels.ROLE, ""),
        revision=found.get(labels.REVISION, ""),
        compat=found.get(labels.KV_COMPAT, ""),
        owner=_controller(metadata),
        phase=cast("Phase", phase) if phase in _PHASES else "Unknown",
        ready=is_ready and not deleting,
        scheduled=bool(spec.get("nodeName")),
        node=spec.get("nodeName"),
        deleting=deleting,
        draining=labels.DRAINING in found and not deleting,
        created=timestamp(metadata.get("creationTimestamp")) or 0.0,
        address=status.get("podIP"),
        labels=found,
        trouble=_trouble(status, conditions),
        ready_since=timestamp(ready.get("lastTransitionTime")) if is_ready else None,
        ended=_ended(metadata, status, ready) if phase in ("Succeeded", "Failed") else None,
        leaves_by=timestamp(metadata.get("deletionTimestamp")),
        attempt=_number(_mapping(metadata, "annotations").get(labels.ATTEMPT)),
    )


def revision_state(body: Body) -> RevisionState:
    """Raises KeyError for an object without name or uid. `template` is empty where it pins none."""
    metadata = body["metadata"]
    found = _mapping(metadata, "labels")
    template = _mapping(body, "data")
    return RevisionState(
        name=metadata["name"],
        uid=metadata["uid"],
        pool=found.get(labels.POOL, ""),
        kind=PREFILL_POOL if found.get(labels.ROLE) == Role.PREFILL else DECODE_POOL,
        revision=found.get(labels.REVISION, ""),
        compat=found.get(labels.KV_COMPAT, ""),
        number=_number(body.get("revision")),
        owner=_controller(metadata),
        created=timestamp(metadata.get("creationTimestamp")) or 0.0,
        template=template if isinstance(template.get("spec"), Mapping) else {},
    )


def node_state(body: Body) -> NodeState:
    """Raises KeyError for an object without a name."""
    metadata, spec = body["metadata"], _mapping(body, "spec")
    return NodeState(
        name=metadata["name"],
        allocatable=_mapping(_mapping(body, "status"), "allocatable"),
        labels=_mapping(metadata, "labels"),
        taints=tuple(_mappings(spec, "taints")),
        unschedulable=bool(spec.get("unschedulable")),
    )


def timestamp(text: object) -> float | None:
    """Unix seconds of the API's `2026-01-31T10:00:00Z`; None when it is none."""
    if not isinstance(text, str):
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def rfc3339(seconds: float) -> str:
    """The API's way to write a time."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _controller(metadata: Body) -> str | None:
    owners = _mappings(metadata, "ownerReferences")
    return next((one.get("uid") for one in owners if one.get("controller")), None)


def _trouble(status: Body, conditions: Mapping[Any, Body]) -> str | None:
    """Why a pod does not run, in the cluster's own words."""
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return _words(scheduled)
    if status.get("phase") == "Failed" and (status.get("reason") or status.get("message")):
        return _words(status)
    return next(_container_troubles(status), None)


def _container_troubles(status: Body) -> Iterator[str]:
    """The first container's that waits for anything but its start, or that failed."""
    for kind in ("initContainerStatuses", "containerStatuses"):
        for one in _mappings(status, kind):
            waiting = _mapping(_mapping(one, "state"), "waiting")
            ended = _mapping(_mapping(one, "state"), "terminated")
            if str(waiting.get("reason", "")) not in _WAITING_IS_NORMAL:
                yield f"container {one.get('name')}: {_words(waiting)}"
            elif ended.get("exitCode"):
                said = {**ended, "message": str(ended.get("message") or "")[-_LAST_WORDS:]}
                code = f"exit code {ended['exitCode']}"
                yield f"container {one.get('name')}: {_words(said)} ({code})"


def _words(said: Body) -> str:
    parts = [str(part).strip() for part in (said.get("reason"), said.get("message")) if part]
    return ": ".join(parts)[:_LONGEST]


def _ended(metadata: Body, status: Body, ready: Body) -> float | None:
    """When the last container ended; of a pod that never had one, when it was told not ready."""
    ends = [
        timestamp(_mapping(_mapping(one, "state"), "terminated").get("finishedAt"))
        for one in _mappings(status, "containerStatuses")
    ]
    known = [end for end in ends if end is not None]
    if known:
        return max(known)
    return timestamp(ready.get("lastTransitionTime")) or timestamp(
        metadata.get("creationTimestamp")
    )


def _mapping(body: Body, name: str) -> Mapping[str, Any]:
    found = body.get(name)
    return found if isinstance(found, Mapping) else {}


def _mappings(body: Body, name: str) -> list[Mapping[str, Any]]:
    found = body.get(name)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def _number(text: object) -> int:
    try:
        return int(str(text))
    except ValueError:
        return 0
