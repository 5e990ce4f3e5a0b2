"""The pods of one pool: which are created, labelled, adopted and deleted, when failed pods are
replaced, and how many a node drain must leave (PodDisruptionBudget). Pure.

Pods are never restarted in place, so the back-off that a kubelet applies to containers is applied
here to pods: without it, a pod whose command line no engine accepts would be created, scheduled and
loaded over and over. Annotation `tandem.dev/attempt` of the pods holds the count of failures; it is
stored nowhere else, so it survives restarts of the operator.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Final

from tandem_contract import labels
from tandem_contract.custom_resources import DECODE_POOL
from tandem_contract.paths import Role

from ..observed import Body, Observed, PodState, PoolResource, roles_of
from ..pods import manifests
from ..resources.spec import Rollout
from .actions import Adopt, Create, Delete, Label
from .drift import is_up_to_date
from .revisions import owner_reference
from .rollout import MIN_READY_SECONDS, Limits

OVER: Final = "over"
"""Reason of a deletion: the pod's containers have ended, or its node is gone."""
_DRAINING: Final = "true"
_EARLY_END: Final = 600.0
"""Seconds. A pod that ends after a shorter life repeats its predecessor's failure; after a longer
life it failed anew and is replaced at once."""
_FIRST_DELAY: Final = 10.0
_LONGEST_DELAY: Final = 300.0
"""Seconds of back-off, first and most; the kubelet's for containers."""


def own_pods(observed: Observed, resource: PoolResource, rollout: Rollout) -> tuple[PodState, ...]:
    """Pods of a pool, by name: those it owns, and orphans with its labels.

    `rollout` says from when they count as available.
    """
    roles = roles_of(resource.key.kind)
    return tuple(
        sorted(
            (
                replace(pod, available=pod.ready and available_from(pod, rollout) <= observed.now)
                for pod in observed.pods
                if pod.owner == resource.uid
                # The role as well: a PrefillPool and a DecodePool may share a name.
                or (pod.owner is None and pod.pool == resource.key.name and pod.role in roles)
            ),
            key=lambda pod: pod.name,
        )
    )


def available_from(pod: PodState, rollout: Rollout) -> float:
    """Unix seconds from which a ready pod counts as available."""
    seconds = rollout.min_ready_seconds
    # A pod without the time of its readiness counts from its creation.
    since = pod.created if pod.ready_since is None else pod.ready_since
    return since + (MIN_READY_SECONDS if seconds is None else seconds)


def counting(pods: Iterable[PodState], now: float) -> tuple[PodState, ...]:
    """Pods that fill a place among the replicas: active ones, and failed ones in back-off."""
    return tuple(pod for pod in pods if pod.active or is_in_backoff(pod, now))


def replacement_time(pod: PodState) -> float:
    """Unix seconds from which an ended pod is replaced; 0.0 means at once."""
    # A first failure may be chance: its replacement comes at once. Only repetitions wait.
    if pod.attempt == 0 or not _ended_early(pod):
        return 0.0
    # The exponent is bounded so that a large annotation cannot overflow a float.
    delay = _FIRST_DELAY * 2.0 ** min(pod.attempt - 1, 10)
    return (pod.ended or 0.0) + min(delay, _LONGEST_DELAY)


def is_in_backoff(pod: PodState, now: float) -> bool:
    """Whether an ended pod still keeps its place, because its replacement is not due yet."""
    return pod.over and not pod.leaving and now < replacement_time(pod)


def routing_labels(observed: Observed, resource: PoolResource) -> dict[str, str]:
    """The endpoint labels of a pool's pods.

    Read from the custom resources as they are, so that an invalid DecodePool keeps its endpoint.
    """
    if resource.key.kind == DECODE_POOL:
        return {labels.endpoint_label(endpoint_name(resource)): Role.DECODE.value}
    names = sorted({endpoint_name(decode) for decode in observed.decodes if not decode.deleting})
    return {labels.endpoint_label(name): Role.PREFILL.value for name in names}


def endpoint_name(resource: PoolResource) -> str:
    """Name of the endpoint that serves a DecodePool: `routing.endpoint`, else the pool's name."""
    spec = resource.body.get("spec")
    routing = spec.get("routing") if isinstance(spec, Mapping) else None
    name = routing.get("endpoint") if isinstance(routing, Mapping) else None
    return name if isinstance(name, str) and name else resource.key.name


def plan_adoptions(resource: PoolResource, pods: Iterable[PodState]) -> Iterator[Adopt]:
    """Orphans that get the pool as owner."""
    for pod in pods:
        if pod.owner is None and not pod.deleting:
            yield Adopt(resource.key, "Pod", pod.name, pod.uid, owner_reference(resource))


def plan_relabels(
    resource: PoolResource, pods: Iterable[PodState], desired: Mapping[str, str]
) -> Iterator[Label]:
    """Changes of endpoint labels after which active pods have exactly those in `desired`."""
    for pod in pods:
        if not pod.active:
            continue
        present = [key for key in pod.labels if key.startswith(labels.ENDPOINT_PREFIX)]
        changed: dict[str, str | None] = {
            # None removes a label in a merge patch.
            key: desired.get(key)
            for key in sorted({*present, *desired})
            if pod.labels.get(key) != desired.get(key)
        }
        if changed:
            yield Label(resource.key, pod.name, pod.uid, changed)


def plan_flags(resource: PoolResource, pods: Iterable[PodState], flags: str) -> Iterator[Label]:
    """Changes of the annotation after which active pods have these flags of the sidecar."""
    for pod in pods:
        if pod.active and pod.sidecar_flags != flags:
            yield Label(resource.key, pod.name, pod.uid, {}, {labels.SIDECAR_FLAGS: flags})


def plan_bounds(resource: PoolResource, pods: Iterable[PodState], bounds: str) -> Iterator[Label]:
    """Changes of the annotation after which active pods have these bounds of the external store."""
    for pod in pods:
        if pod.active and pod.storage_bounds != bounds:
            yield Label(resource.key, pod.name, pod.uid, {}, {labels.STORAGE_BOUNDS: bounds})


def newest_flags(pods: Iterable[PodState]) -> str | None:
    """The flags of the sidecar that the youngest pod runs with; None: no pod reads them."""
    reading = [pod for pod in pods if pod.sidecar_flags]
    return max(reading, key=lambda pod: (pod.created, pod.name)).sidecar_flags if reading else None


def newest_bounds(pods: Iterable[PodState]) -> str | None:
    """The bounds that the youngest pod has; None: no pod reads them."""
    reading = [pod for pod in pods if pod.storage_bounds]
    return max(reading, key=lambda pod: (pod.created, pod.name)).storage_bounds if reading else None


def plan_deletions(
    resource: PoolResource, remove: Iterable[PodState], pods: Iterable[PodState], now: float
) -> tuple[list[Label], list[Delete]]:
    """Draining labels and deletions for pods that go.

    Pods go because `remove` names them, because they have ended, or because an earlier pass has
    labelled them already. A scheduled pod is labelled before it is deleted, so that the EPP and
    the PodDisruptionBudget leave it out before it starts to drain.
    """
    # Later reasons replace earlier ones. Only a pod with reason OVER passes its attempt count on.
    reasons = {pod.name: "not needed" for pod in remove}
    reasons |= {pod.name: OVER for pod in pods if pod.over and not is_in_backoff(pod, now)}
    reasons |= {pod.name: "draining" for pod in pods if pod.draining}
    going = [pod for pod in pods if pod.name in reasons and not pod.deleting]
    draining = [
        Label(resource.key, pod.name, pod.uid, {labels.DRAINING: _DRAINING})
        for pod in going
        # An unscheduled or ended pod serves nothing: it is deleted without the label.
        if pod.scheduled and not pod.over and not pod.draining
    ]
    return draining, [Delete(resource.key, p.name, p.uid, reasons[p.name]) for p in going]


def plan_creations(
    resource: PoolResource,
    template: Body,
    number: int,
    existing_names: Collection[str],
    *,
    routing: Mapping[str, str],
    replaced: Sequence[PodState] = (),
) -> Iterator[Create]:
    """`number` pods of a template, with the lowest free indexes in their names.

    `existing_names`: names in use. `routing`: the endpoint labels. `replaced`: ended pods that are
    deleted in the same pass; the new pods carry their failure counts on.
    """
    revision = template["metadata"]["labels"][labels.REVISION]
    stem = f"{resource.key.name}-{revision}"
    free_names = (name for name in (f"{stem}-{i}" for i in count()) if name not in existing_names)
    # A failure of one revision says nothing about another: a new revision starts at attempt 0.
    attempts = _next_attempts(pod for pod in replaced if pod.revision == revision)
    for position in range(number):
        body: Body = manifests.pod(
            dict(template),
            name=next(free_names),
            namespace=resource.key.namespace,
            owner=owner_reference(resource),
            labels=routing,
        )
        if position < len(attempts):
            body = _with_annotations(body, {labels.ATTEMPT: str(attempts[position])})
        yield Create(resource.key, body)


def budget_name(resource: PoolResource) -> str:
    """The budget's name, with the pool's kind in it: two pools of a set may share a name."""
    return f"{resource.key.name}-{roles_of(resource.key.kind)[0]}"


def budget(resource: PoolResource, limits: Limits) -> Body | None:
    """The pool's budget; None when the pool has at most one pod more than may be missing.

    One pod may always be evicted, also the only one of a pool: its own drain loses no request, and
    a budget that forbids the eviction would block the maintenance of its node for good.
    """
    # At least one pod may be missing, also where maxUnavailable is 0.
    fewest = limits.desired - max(1, limits.unavailable)
    if fewest < 1:
        return None
    key = resource.key
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": budget_name(resource),
            "namespace": key.namespace,
            "labels": {
                labels.POOL: key.name,
                labels.ROLE: roles_of(key.kind)[0],
                labels.MANAGED_BY: "tandem-operator",
            },
            "ownerReferences": [owner_reference(resource)],
        },
        "spec": {
            "minAvailable": fewest,
            # Otherwise pods that never become ready could block the drain of their node.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {
                "matchLabels": {labels.POOL: key.name},
                "matchExpressions": [
                    {"key": labels.ROLE, "operator": "In", "values": list(roles_of(key.kind))},
                    # A draining pod takes no new request, so it must not count as available.
                    {"key": labels.DRAINING, "operator": "DoesNotExist"},
                ],
            },
        },
    }


def has_budget(desired: Body, live: Iterable[Body]) -> bool:
    """Whether the API server has this budget already."""
    return any(
        body["metadata"]["name"] == desired["metadata"]["name"] and is_up_to_date(body, desired)
        for body in live
    )


def _next_attempts(replaced: Iterable[PodState]) -> list[int]:
    """Attempt numbers of the pods that replace these, highest first."""
    # Highest first: when fewer pods are created than ended, the longest back-off is kept.
    return sorted((pod.attempt + 1 for pod in replaced if _ended_early(pod)), reverse=True)


def _ended_early(pod: PodState) -> bool:
    return pod.ended is not None and pod.ended - pod.created < _EARLY_END


def _with_annotations(body: Body, more: Mapping[str, str]) -> Body:
    metadata = body["metadata"]
    annotations = {**(metadata.get("annotations") or {}), **more}
    return {**body, "metadata": {**metadata, "annotations": annotations}}
