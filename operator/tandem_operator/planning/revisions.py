"""Revisions of a pool: ControllerRevisions, each with the pod template as it was rendered when the
operator first saw a user's spec. Pure.

A revision is named after the hash of the user's spec alone. A newer operator, which may render the
same spec differently, therefore finds the revision and keeps its template: an upgrade of the
operator restarts no pod. A revision named by an earlier recipe of the hash is found as well.

Where different operators pinned the two sides of a set and their compat hashes differ, no hand-off
is possible between the pinned templates. All pools of the set then get a revision as this operator
renders it, whose name has the compat hash in it, and move there together.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from tandem_contract import labels
from tandem_contract.paths import Role

from ..observed import Body, Observed, PodState, PoolResource, RevisionState, roles_of
from ..pods import connectors, external_storage, manifests, sidecar_flags
from ..pods.containers import ENGINE
from ..pods.manifests import PodTemplate
from ..pods.models import PulledModel, at_commit, with_pulled_model
from ..resources.pools import Pool, short_hash, with_revision
from ..resources.resolve import Defaults

HISTORY: Final = 5
"""Unused revisions that are kept: rolling a spec back to one of them restores its exact pods."""


@dataclass(frozen=True)
class Target:
    """The revision to which a pool rolls."""

    revision: str
    compat: str
    pinned: RevisionState | None
    """The ControllerRevision; None: it is still to be created."""
    template: PodTemplate = field(repr=False)


def owned_revisions(observed: Observed, resource: PoolResource) -> list[RevisionState]:
    """Revisions of a pool, oldest first, orphans included; those without a template are ignored."""
    return sorted(
        (
            state
            for state in observed.revisions
            if state.template
            and (state.pool, state.kind) == (resource.key.name, resource.key.kind)
            # Not those of a deleted pool of the same name, which garbage collection removes.
            and state.owner in (None, resource.uid)
        ),
        key=lambda state: (state.number, state.name),
    )


def choose_targets(
    pools: Mapping[str, Pool], pinned: Mapping[str, Sequence[RevisionState]], defaults: Defaults
) -> dict[str, Target]:
    """The target of each pool of a set, by the keys of `pools`: all of one compat hash.

    That is the newest hash with which every pool has its present spec pinned already; without one,
    each pool as this operator renders it.
    """
    # A hash is a candidate only if every pool of the set has it pinned for its present spec.
    by_hash = {key: _pinned_by_hash(pool, pinned[key], defaults) for key, pool in pools.items()}
    shared = set.intersection(*map(set, by_hash.values())) if by_hash else set()
    if shared:
        # Ties are broken by the hash itself, so that equal input gives an equal plan.
        compat = max(
            shared, key=lambda c: (max(states[c].number for states in by_hash.values()), c)
        )
        return {key: _target(states[compat]) for key, states in by_hash.items()}
    return {
        key: _rendered_target(pool, by_hash[key], pinned[key], defaults)
        for key, pool in pools.items()
    }


def render_template(
    pool: Pool, revision: str, defaults: Defaults, pulled: PulledModel | None = None
) -> PodTemplate:
    """The pod template that this operator renders for the pool, as JSON stores it.

    `pulled`: the commit of the model that was downloaded for it. Cached and shared: do not change
    it.
    """
    return _render(_PoolIdentity(pool), revision, defaults, pulled)


def is_pinned(pool: Pool, pinned: Sequence[RevisionState], defaults: Defaults) -> bool:
    """Whether one of the revisions pins the pool's present spec."""
    return bool(_pinned_by_hash(pool, pinned, defaults))


def differs(template: PodTemplate, pinned: Body) -> bool:
    """Whether pods of two templates differ in more than what changes while they run."""
    return _fixed(template) != _fixed(pinned)


def current_revision(
    resource: PoolResource, pinned: Sequence[RevisionState], pods: Sequence[PodState]
) -> RevisionState | None:
    """The revision that served last: the status names it, else the newest with a ready pod.

    None before any revision has served.
    """
    # The status may name a revision whose ControllerRevision a user has deleted.
    name = resource.status.get("currentRevision")
    for state in pinned:
        if state.revision == name:
            return state
    ready = {pod.revision for pod in pods if pod.active and pod.ready}
    return next((state for state in reversed(pinned) if state.revision in ready), None)


def expired_revisions(pinned: Sequence[RevisionState], used: Iterable[str]) -> list[RevisionState]:
    """Revisions to delete: all unused ones but the newest `HISTORY`."""
    # Oldest first, as `pinned` is sorted: the newest `HISTORY` remain.
    in_use = set(used)
    unused = [state for state in pinned if state.revision not in in_use]
    return unused[: max(0, len(unused) - HISTORY)]


def controller_revision(resource: PoolResource, target: Target, number: int) -> Body:
    """The ControllerRevision object of a target."""
    key = resource.key
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {
            "name": f"{key.name}-{target.revision}",
            "namespace": key.namespace,
            "labels": {
                labels.POOL: key.name,
                labels.ROLE: roles_of(key.kind)[0],
                labels.REVISION: target.revision,
                labels.KV_COMPAT: target.compat,
                labels.MANAGED_BY: "tandem-operator",
            },
            "ownerReferences": [owner_reference(resource)],
        },
        "revision": number,
        "data": target.template,
    }


def sample_pod(revision: Body) -> dict[str, Any]:
    """A pod of the ControllerRevision `revision`, for a dry-run create before it is pinned."""
    metadata = revision["metadata"]
    return manifests.pod(
        dict(revision["data"]),
        # No pod has this name yet, because the revision is new.
        name=f"{metadata['name']}-0",
        namespace=metadata["namespace"],
        owner=metadata["ownerReferences"][0],
        labels={},
    )


def owner_reference(resource: PoolResource) -> dict[str, Any]:
    """The ownerReference of objects that the pool controls."""
    return {
        "apiVersion": labels.API_VERSION,
        "kind": resource.key.kind,
        "name": resource.key.name,
        "uid": resource.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _fixed(template: Body) -> Body:
    """A template without what changes while its pods run."""
    return external_storage.with_bounds(sidecar_flags.with_flags(template, ""), "")


class _PoolIdentity:
    """A pool as a cache key, compared by identity.

    `validate_set` returns the same object again while the custom resource is unchanged; hashing the
    whole spec in every pass would cost more than rendering it.
    """

    def __init__(self, pool: Pool) -> None:
        # The reference keeps the pool alive: its id cannot belong to another object while the key
        # is in the cache.
        self.pool = pool

    def __hash__(self) -> int:
        return id(self.pool)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _PoolIdentity) and other.pool is self.pool


@lru_cache(maxsize=1024)
def _render(
    identity: _PoolIdentity, revision: str, defaults: Defaults, pulled: PulledModel | None
) -> PodTemplate:
    pool = with_revision(identity.pool, revision)
    template = manifests.template(at_commit(pool, pulled.commit) if pulled else pool, defaults)
    if pulled:
        template = with_pulled_model(template, pulled)
    # Through JSON, so that it compares equal to the template that the API server returns.
    stored: PodTemplate = json.loads(json.dumps(template))
    return stored


def _pinned_by_hash(
    pool: Pool, pinned: Sequence[RevisionState], defaults: Defaults
) -> dict[str, RevisionState]:
    """Compat hash → the newest revision that pins the pool's present spec with it."""
    # `pinned` is sorted oldest first, so the newest of two with one hash remains.
    return {state.compat: state for state in pinned if _is_pinned_by(pool, state, defaults)}


def _is_pinned_by(pool: Pool, state: RevisionState, defaults: Defaults) -> bool:
    """Whether a revision pins the pool's present spec."""
    recipes = (pool.revision, *pool.former_revisions)
    if all(state.revision not in _names(revision, state.compat) for revision in recipes):
        return False
    rendered = render_template(pool, state.revision, defaults)
    # An earlier recipe gave a unified pool one name with and without a prefillRef.
    if pool.role is Role.UNIFIED and _hands_off(state.template) != _hands_off(rendered):
        return False
    return sidecar_flags.has_flags_of(state.template, pool, rendered) and (
        external_storage.has_bounds_of(state.template, pool, rendered)
    )


def _hands_off(template: Body) -> bool:
    """Whether the engine of a pod template is connected to engines of other pods."""
    containers = {entry.get("name"): entry for entry in template["spec"].get("containers", ())}
    # Not by the transfer flag: an engine that only offloads has one, and its pool may be pinned by
    # an earlier operator without it.
    ports = containers.get(ENGINE, {}).get("ports") or ()
    return any(port.get("name") == connectors.SIDE_CHANNEL for port in ports)


def _rendered_target(
    pool: Pool,
    by_hash: Mapping[str, RevisionState],
    pinned: Sequence[RevisionState],
    defaults: Defaults,
) -> Target:
    if (state := by_hash.get(pool.compat)) is not None:
        return _target(state)
    # A name is taken by a template that does not pin the present spec: of another compat hash, or
    # of an earlier operator.
    taken = {state.revision for state in pinned}
    names = _names(pool.revision, pool.compat)
    revision = next((name for name in names if name not in taken), names[-1])
    return Target(revision, pool.compat, None, render_template(pool, revision, defaults))


def _names(revision: str, compat: str) -> tuple[str, str, str]:
    """The names that a revision may have, the preferred first."""
    # The second is of pools whose plain name a template of another compat hash has; the third of
    # those where both belong to templates of an earlier operator with other flags of the sidecar.
    second = _qualified_name(revision, compat)
    return revision, second, _qualified_name(second, compat)


def _qualified_name(revision: str, compat: str) -> str:
    return short_hash({"revision": revision, "compat": compat})


def _target(state: RevisionState) -> Target:
    return Target(state.revision, state.compat, state, dict(state.template))
