"""The pods of one pool: from how many come and go to which, with names, bodies and labels. Pure."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Final

from tandem_contract import labels
from tandem_contract.paths import Role

from ..crd import DECODE_POOL
from ..observed import Body, Observed, PodState, PoolResource, roles_of
from ..pods import manifests
from .actions import Adopt, Create, Delete, Label
from .replacement import next_attempts, rests
from .revisions import owner

OVER: Final = "over"
"""Reason to delete: its containers ended, or its node is gone."""
_DRAINING: Final = "true"


def own_pods(observed: Observed, resource: PoolResource) -> tuple[PodState, ...]:
    """Pods of a pool, by name: those it owns, and orphans that carry its labels."""
    roles = roles_of(resource.key.kind)
    return tuple(
        sorted(
            (
                pod
                for pod in observed.pods
                if pod.owner == resource.uid
                or (pod.owner is None and pod.pool == resource.key.name and pod.role in roles)
            ),
            key=lambda pod: pod.name,
        )
    )


def counting(pods: Iterable[PodState], now: float) -> tuple[PodState, ...]:
    """Pods that fill a place: active ones, and failed ones whose replacement is not due."""
    return tuple(pod for pod in pods if pod.active or rests(pod, now))


def endpoints_of(observed: Observed, resource: PoolResource) -> dict[str, str]:
    """The endpoint labels of a pool's pods.

    Read from the objects as they are: a DecodePool that cannot be read keeps its endpoint.
    """
    if resource.key.kind == DECODE_POOL:
        return {labels.endpoint_label(endpoint_name(resource)): Role.DECODE.value}
    names = sorted({endpoint_name(one) for one in observed.decodes if not one.deleting})
    return {labels.endpoint_label(name): Role.PREFILL.value for name in names}


def endpoint_name(resource: PoolResource) -> str:
    """Of the endpoint that a DecodePool serves behind: its own name unless it gives one."""
    spec = resource.body.get("spec")
    routing = spec.get("routing") if isinstance(spec, Mapping) else None
    name = routing.get("endpoint") if isinstance(routing, Mapping) else None
    return name if isinstance(name, str) and name else resource.key.name


def adoptions(resource: PoolResource, pods: Iterable[PodState]) -> Iterator[Adopt]:
    for pod in pods:
        if pod.owner is None and not pod.deleting:
            yield Adopt(resource.key, "Pod", pod.name, pod.uid, owner(resource))


def relabels(
    resource: PoolResource, pods: Iterable[PodState], wanted: Mapping[str, str]
) -> Iterator[Label]:
    """Endpoint labels that pods have and should not, or should and have not."""
    for pod in pods:
        if not pod.active:
            continue
        changed: dict[str, str | None] = {
            key: wanted.get(key)
            for key in sorted({*_endpoint_keys(pod.labels), *wanted})
            if pod.labels.get(key) != wanted.get(key)
        }
        if changed:
            yield Label(resource.key, pod.name, pod.uid, changed)


def departures(
    resource: PoolResource, leave: Iterable[PodState], pods: Iterable[PodState], now: float
) -> tuple[list[Label], list[Delete]]:
    """Pods that go: those chosen, those that are over, and those that an earlier pass chose."""
    reasons = {pod.name: "not needed" for pod in leave}
    reasons |= {pod.name: OVER for pod in pods if pod.over and not rests(pod, now)}
    reasons |= {pod.name: "draining" for pod in pods if pod.draining}
    going = [pod for pod in pods if pod.name in reasons and not pod.deleting]
    marked = [
        Label(resource.key, pod.name, pod.uid, {labels.DRAINING: _DRAINING})
        for pod in going
        if pod.scheduled and not pod.over and not pod.draining
    ]
    return marked, [Delete(resource.key, p.name, p.uid, reasons[p.name]) for p in going]


def arrivals(
    resource: PoolResource,
    template: Body,
    number: int,
    taken: Collection[str],
    *,
    wanted: Mapping[str, str],
    replaced: Sequence[PodState] = (),
) -> Iterator[Create]:
    """`number` pods of a template, under the lowest free indexes.

    `replaced` are pods that are over and deleted now: what comes instead remembers how often.
    """
    revision = template["metadata"]["labels"][labels.REVISION]
    stem = f"{resource.key.name}-{revision}"
    free = (name for name in (f"{stem}-{i}" for i in count()) if name not in taken)
    attempts = next_attempts(pod for pod in replaced if pod.revision == revision)
    for place in range(number):
        body: Body = manifests.pod(
            dict(template),
            name=next(free),
            namespace=resource.key.namespace,
            owner=owner(resource),
            labels=wanted,
        )
        if place < len(attempts):
            body = _annotated(body, {labels.ATTEMPT: str(attempts[place])})
        yield Create(resource.key, body)


def _annotated(body: Body, more: Mapping[str, str]) -> Body:
    metadata = body["metadata"]
    annotations = {**(metadata.get("annotations") or {}), **more}
    return {**body, "metadata": {**metadata, "annotations": annotations}}


def _endpoint_keys(found: Mapping[str, str]) -> list[str]:
    return [key for key in found if key.startswith(labels.ENDPOINT_PREFIX)]
