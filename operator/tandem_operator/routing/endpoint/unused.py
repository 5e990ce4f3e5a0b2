"""What stays of an endpoint whose last pool is gone, and until when. Pure.

    last pool gone ──► note on a Service ──GRACE──► keys and Services deleted
                            └── a pool again ──► note removed, the same Services and keys

The note is an annotation, so that any operator goes on from it.
"""

from typing import Final

from tandem_contract import labels

from ...planning.api_objects import FIELD_MANAGER, rfc3339, timestamp
from ..objects.common import is_taken_over, kept_objects
from .observed import EndpointPlan, ObjectRef, ObservedEndpoint

GRACE: Final = 600.0
"""Seconds for which addresses and keys stay. A GitOps tool that replaces a pool takes minutes at
most; clients that keep an address for longer are rare."""
_CLOCK_DIFFERENCE: Final = 300.0
"""Seconds by which the clock of the operator that wrote a note may have been ahead."""


def plan_unused(observed: ObservedEndpoint) -> EndpointPlan:
    """The writes for an endpoint that no pool names."""
    ours = own_children(observed)
    kept = [ref for ref in kept_objects(observed.key.name) if ref in ours]
    rest = tuple(ref for ref in ours if ref not in kept)
    services = [ref for ref in kept if ref.kind == "Service"]
    since = max(_times(observed), default=None)
    if services and since is None:
        # On the last that is deleted: an operator that is stopped in between goes on from there.
        note = {services[-1].name: rfc3339(observed.now)}
        return EndpointPlan(notes=note, delete=rest, requeue_after=GRACE)
    if services and since is not None and observed.now < since + GRACE:
        return EndpointPlan(delete=rest, requeue_after=since + GRACE - observed.now)
    return EndpointPlan(delete=(*rest, *kept))


def outdated_notes(observed: ObservedEndpoint) -> dict[str, None]:
    """`EndpointPlan.notes` for an endpoint that a pool names."""
    return dict.fromkeys(_notes(observed))


def own_children(observed: ObservedEndpoint) -> list[ObjectRef]:
    """The children that are the operator's to delete: someone else may set the endpoint's label on
    an object, or make a Service that stays their own."""
    return [
        ref
        for ref, body in observed.children.items()
        if (body["metadata"].get("labels") or {}).get(labels.MANAGED_BY) == FIELD_MANAGER
        and not is_taken_over(observed.key.name, body)
    ]


def _times(observed: ObservedEndpoint) -> list[float]:
    """The notes that can be true, in Unix seconds. A later one is of a clock that was wrong."""
    times = filter(None, map(timestamp, _notes(observed).values()))
    return [time for time in times if time <= observed.now + _CLOCK_DIFFERENCE]


def _notes(observed: ObservedEndpoint) -> dict[str, str]:
    """By name of the Service."""
    kept = set(kept_objects(observed.key.name)) & set(own_children(observed))
    return {
        ref.name: note
        for ref, body in observed.children.items()
        if ref in kept
        and ref.kind == "Service"
        and (note := (body["metadata"].get("annotations") or {}).get(labels.UNUSED_SINCE))
    }
