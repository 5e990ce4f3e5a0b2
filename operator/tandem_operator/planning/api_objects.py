"""Parse API objects into the frozen values of `observed`, each object once per change of it.

Pods and nodes are parsed leniently: a field of an unexpected shape counts as absent.
"""

import signal
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final, cast, get_args

import msgspec

from tandem_contract import labels
from tandem_contract.custom_resources import DECODE_POOL, PREFILL_POOL
from tandem_contract.paths import Role

from ..observed import (
    KINDS,
    Body,
    NodeState,
    Phase,
    PodName,
    PodState,
    PoolKey,
    PoolResource,
    PullJob,
    PullPod,
    PullReport,
    RevisionState,
    SetKey,
)

FIELD_MANAGER: Final = "tandem-operator"
"""Server-side apply's owner of the fields that this operator sets, and the value of the label
`labels.MANAGED_BY` on its objects."""
_PHASES: Final = frozenset(get_args(Phase))
_WAITING_IS_NORMAL: Final = frozenset({"ContainerCreating", "PodInitializing", ""})
_KILLED: Final = {128 + number: number.name for number in signal.Signals}
"""Exit codes of processes that a signal ended."""
_MAX_TROUBLE: Final = 1024
"""Characters kept of what keeps a pod from running."""
_MAX_OUTPUT: Final = 512
"""Characters kept of a failed container's output: its last ones, which name the error."""


def pool_resource(body: Body) -> PoolResource:
    """A pool's custom resource. Raises KeyError for an object of another kind."""
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
        owns_replicas=_owns_replicas(metadata),
    )


def set_key(body: Body) -> SetKey:
    """The set that a custom resource belongs to; raises KeyError as `pool_resource` does."""
    metadata, kind = body["metadata"], body["kind"]
    namespace, name = metadata["namespace"], metadata["name"]
    if kind != DECODE_POOL:
        return SetKey(namespace, name)
    reference = _mapping(_mapping(body, "spec"), "prefillRef").get("name")
    # The PrefillPool need not exist: its DecodePools form a set without it.
    return SetKey(namespace, str(reference)) if reference else SetKey(namespace, name, "DecodePool")


def pod_state(body: Body) -> PodState:
    """A Pod. Raises KeyError for an object without name or uid."""
    metadata, spec, status = body["metadata"], _mapping(body, "spec"), _mapping(body, "status")
    own_labels = _mapping(metadata, "labels")
    conditions = {entry.get("type"): entry for entry in _mappings(status, "conditions")}
    ready = conditions.get("Ready", {})
    # A terminating pod may still be Ready; it must not count, because it stops serving soon.
    is_ready = ready.get("status") == "True"
    phase = status.get("phase", "Pending")
    deleting = "deletionTimestamp" in metadata
    return PodState(
        name=PodName(metadata["name"]),
        uid=metadata["uid"],
        pool=own_labels.get(labels.POOL, ""),
        role=own_labels.get(labels.ROLE, ""),
        revision=own_labels.get(labels.REVISION, ""),
        compat=own_labels.get(labels.KV_COMPAT, ""),
        owner=_controller_uid(metadata),
        phase=cast("Phase", phase) if phase in _PHASES else "Unknown",
        ready=is_ready and not deleting,
        scheduled=bool(spec.get("nodeName")),
        node=spec.get("nodeName"),
        deleting=deleting,
        # Never both: once a pod is being deleted, the label says nothing more.
        draining=labels.DRAINING in own_labels and not deleting,
        created=timestamp(metadata.get("creationTimestamp")) or 0.0,
        address=status.get("podIP"),
        labels=own_labels,
        trouble=_trouble(status, conditions),
        ready_since=timestamp(ready.get("lastTransitionTime")) if is_ready else None,
        ended=_ended(metadata, status, ready) if phase in ("Succeeded", "Failed") else None,
        leaves_by=timestamp(metadata.get("deletionTimestamp")),
        attempt=_number(_mapping(metadata, "annotations").get(labels.ATTEMPT)),
        sidecar_flags=_mapping(metadata, "annotations").get(labels.SIDECAR_FLAGS),
        storage_bounds=_mapping(metadata, "annotations").get(labels.STORAGE_BOUNDS),
    )


def revision_state(body: Body) -> RevisionState:
    """A ControllerRevision. Raises KeyError for an object without name or uid.

    `template` is empty when the object holds no pod template.
    """
    metadata = body["metadata"]
    own_labels = _mapping(metadata, "labels")
    template = _mapping(body, "data")
    return RevisionState(
        name=metadata["name"],
        uid=metadata["uid"],
        pool=own_labels.get(labels.POOL, ""),
        kind=PREFILL_POOL if own_labels.get(labels.ROLE) == Role.PREFILL else DECODE_POOL,
        revision=own_labels.get(labels.REVISION, ""),
        compat=own_labels.get(labels.KV_COMPAT, ""),
        number=_number(body.get("revision")),
        owner=_controller_uid(metadata),
        created=timestamp(metadata.get("creationTimestamp")) or 0.0,
        template=template if isinstance(template.get("spec"), Mapping) else {},
    )


def pull_job(body: Body) -> PullJob:
    """A Job that downloads a model. Raises KeyError for an object without name or uid."""
    conditions = _mappings(_mapping(body, "status"), "conditions")
    ended = {e.get("type"): e for e in conditions if e.get("status") == "True"}
    return PullJob(
        name=body["metadata"]["name"],
        uid=body["metadata"]["uid"],
        is_complete="Complete" in ended,
        failure=_reason_and_message(ended["Failed"]) if "Failed" in ended else None,
    )


def pull_pod(body: Body) -> PullPod:
    """A pod of such a Job; raises as `pull_job` does."""
    metadata, status = body["metadata"], _mapping(body, "status")
    conditions = {entry.get("type"): entry for entry in _mappings(status, "conditions")}
    return PullPod(
        name=metadata["name"],
        owner=_controller_uid(metadata),
        created=timestamp(metadata.get("creationTimestamp")) or 0.0,
        is_done=status.get("phase") == "Succeeded",
        reports=dict(_reports(status)),
        trouble=_trouble(status, conditions),
    )


def node_state(body: Body) -> NodeState:
    """A Node. Raises KeyError for an object without a name."""
    metadata, spec = body["metadata"], _mapping(body, "spec")
    return NodeState(
        name=metadata["name"],
        allocatable=_mapping(_mapping(body, "status"), "allocatable"),
        labels=_mapping(metadata, "labels"),
        taints=tuple(_mappings(spec, "taints")),
    )


def timestamp(text: object) -> float | None:
    """Unix seconds of a time like `2026-01-31T10:00:00Z`; None for anything else."""
    if not isinstance(text, str):
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def rfc3339(seconds: float) -> str:
    """A time in the API's format, whole seconds in UTC."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _owns_replicas(metadata: Body) -> bool:
    """Whether `spec.replicas` is a field that this operator applied and no one changed since."""
    return any(
        entry.get("manager") == FIELD_MANAGER
        and entry.get("operation") == "Apply"
        and "f:replicas" in _mapping(_mapping(entry, "fieldsV1"), "f:spec")
        for entry in _mappings(metadata, "managedFields")
    )


def _controller_uid(metadata: Body) -> str | None:
    # At most one owner is the controller; others only take part in garbage collection.
    owners = _mappings(metadata, "ownerReferences")
    return next((owner.get("uid") for owner in owners if owner.get("controller")), None)


def _trouble(status: Body, conditions: Mapping[Any, Body]) -> str | None:
    """Why a pod does not run, as scheduler, kubelet or container report it."""
    # In the order of a pod's life: scheduling, the pod as a whole (evicted), its containers.
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return _reason_and_message(scheduled)
    if status.get("phase") == "Failed" and (status.get("reason") or status.get("message")):
        return _reason_and_message(status)
    return next(_container_troubles(status), None)


def _container_troubles(status: Body) -> Iterator[str]:
    """Containers that have failed, or that wait for anything but their normal start."""
    # Init containers first: while one fails, the others have not started.
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in _mappings(status, kind):
            waiting = _mapping(_mapping(container, "state"), "waiting")
            ended = _mapping(_mapping(container, "state"), "terminated")
            if str(waiting.get("reason", "")) not in _WAITING_IS_NORMAL:
                yield f"container {container.get('name')}: {_reason_and_message(waiting)}"
            elif ended.get("exitCode"):
                yield f"container {container.get('name')}: {_end(ended)}"


def _end(ended: Body) -> str:
    """How a container failed. Its message is the end of its log, which a killed process did not
    write as its last words."""
    code = ended["exitCode"]
    if code in _KILLED:
        reason = "" if ended.get("reason") in (None, "Error") else f"{ended['reason']}: "
        return f"{reason}killed by {_KILLED[code]} (exit code {code})"
    output = str(ended.get("message") or "")[-_MAX_OUTPUT:]
    return f"{_reason_and_message({**ended, 'message': output})} (exit code {code})"


def _reports(status: Body) -> Iterator[tuple[str, PullReport]]:
    """What containers that have succeeded say in their termination messages."""
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in _mappings(status, kind):
            ended = _mapping(_mapping(container, "state"), "terminated")
            try:
                report = msgspec.json.decode(str(ended.get("message")), type=PullReport)
            except msgspec.DecodeError:
                continue
            if ended.get("exitCode") == 0:
                yield str(container.get("name")), report


def _reason_and_message(state: Body) -> str:
    parts = [str(part).strip() for part in (state.get("reason"), state.get("message")) if part]
    return ": ".join(parts)[:_MAX_TROUBLE]


def _ended(metadata: Body, status: Body, ready: Body) -> float | None:
    """Unix seconds at which the last container ended.

    A pod that no container ran in (evicted, node lost) ended when it became unready.
    """
    ends = [
        timestamp(_mapping(_mapping(container, "state"), "terminated").get("finishedAt"))
        for container in _mappings(status, "containerStatuses")
    ]
    times = [end for end in ends if end is not None]
    if times:
        return max(times)
    return timestamp(ready.get("lastTransitionTime")) or timestamp(
        metadata.get("creationTimestamp")
    )


def _mapping(body: Body, name: str) -> Mapping[str, Any]:
    value = body.get(name)
    return value if isinstance(value, Mapping) else {}


def _mappings(body: Body, name: str) -> list[Mapping[str, Any]]:
    value = body.get(name)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _number(text: object) -> int:
    try:
        return int(str(text))
    except ValueError:
        return 0
