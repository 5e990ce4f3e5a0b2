"""Revisions of a pool: ControllerRevisions, each a pod template as it was rendered when a user's
spec was first seen. Pure.

A revision is named after the user's spec alone, so a later operator finds it and leaves it as it
is. Where the sides of a set were pinned by different operators and their compat hashes differ,
what is rendered now gets a name with the hash in it, and the whole set moves there together.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from tandem_contract import labels

from ..observed import Body, Observed, PodState, PoolResource, RevisionState, roles_of
from ..pods import manifests
from ..pods.manifests import PodTemplate
from ..resources.canonical import short_hash
from ..resources.members import Pool, as_revision
from ..resources.resolve import Defaults

HISTORY: Final = 5
"""Revisions kept beyond those in use, for rolling back to pods as they were."""


@dataclass(frozen=True)
class Target:
    """The revision a pool is to come to."""

    revision: str
    compat: str
    pinned: RevisionState | None
    """None: it is still to be created."""
    template: PodTemplate = field(repr=False)


def owned(observed: Observed, resource: PoolResource) -> list[RevisionState]:
    """Revisions of a pool, orphans included; those that pin no template are none."""
    return sorted(
        (
            one
            for one in observed.revisions
            if one.template
            and (one.pool, one.kind) == (resource.key.name, resource.key.kind)
            and one.owner in (None, resource.uid)
        ),
        key=lambda one: (one.number, one.name),
    )


def targets(
    pools: Mapping[str, Pool], pinned: Mapping[str, Sequence[RevisionState]], defaults: Defaults
) -> dict[str, Target]:
    """What pools that must pair come to, by any key: revisions of one compat hash.

    The newest hash for which every pool has its spec pinned already; else what is rendered now.
    """
    found = {key: _pinned_for(pool, pinned[key]) for key, pool in pools.items()}
    shared = set.intersection(*(set(one) for one in found.values())) if found else set()
    if shared:
        compat = max(shared, key=lambda c: (max(one[c].number for one in found.values()), c))
        return {key: _of(one[compat]) for key, one in found.items()}
    return {key: _rendered(pool, found[key], pinned[key], defaults) for key, pool in pools.items()}


def rendered(pool: Pool, revision: str, defaults: Defaults) -> PodTemplate:
    """The template that this operator makes of the pool, as JSON holds it; not to be changed."""
    return _render(_Same(pool), revision, defaults)


def current_of(
    resource: PoolResource, pinned: Sequence[RevisionState], pods: Sequence[PodState]
) -> RevisionState | None:
    """The revision that last served: the status says so; without one, the newest with a pod ready.

    None before the first did.
    """
    said = resource.status.get("currentRevision")
    for one in pinned:
        if one.revision == said:
            return one
    ready = {pod.revision for pod in pods if pod.active and pod.ready}
    return next((one for one in reversed(pinned) if one.revision in ready), None)


def unneeded(pinned: Sequence[RevisionState], used: Iterable[str]) -> list[RevisionState]:
    """What history no longer holds: all but the newest few that nothing uses."""
    needed = set(used)
    past = [one for one in pinned if one.revision not in needed]
    return past[: max(0, len(past) - HISTORY)]


def body(resource: PoolResource, target: Target, number: int) -> Body:
    """The ControllerRevision of a target."""
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
            "ownerReferences": [owner(resource)],
        },
        "revision": number,
        "data": target.template,
    }


def sample(revision: Body) -> dict[str, Any]:
    """A pod as the ControllerRevision `revision` pins it."""
    metadata = revision["metadata"]
    return manifests.pod(
        dict(revision["data"]),
        name=f"{metadata['name']}-0",
        namespace=metadata["namespace"],
        owner=metadata["ownerReferences"][0],
        labels={},
    )


def owner(resource: PoolResource) -> dict[str, Any]:
    """The ownerReference of what a pool controls."""
    return {
        "apiVersion": labels.API_VERSION,
        "kind": resource.key.kind,
        "name": resource.key.name,
        "uid": resource.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


class _Same:
    """A pool as a key: the very object, which `read_set` gives again while nobody edits it."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def __hash__(self) -> int:
        return id(self.pool)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.pool is self.pool


@lru_cache(maxsize=1024)
def _render(same: _Same, revision: str, defaults: Defaults) -> PodTemplate:
    made: PodTemplate = json.loads(
        json.dumps(manifests.template(as_revision(same.pool, revision), defaults))
    )
    return made


def _pinned_for(pool: Pool, pinned: Sequence[RevisionState]) -> dict[str, RevisionState]:
    """Compat hash → the newest revision that pins the pool's present spec with it."""
    return {
        one.compat: one
        for one in pinned
        if one.revision in (pool.revision, _qualified(pool, one.compat))
    }


def _rendered(
    pool: Pool,
    found: Mapping[str, RevisionState],
    pinned: Sequence[RevisionState],
    defaults: Defaults,
) -> Target:
    if (known := found.get(pool.compat)) is not None:
        return _of(known)
    taken = any(one.revision == pool.revision for one in pinned)
    revision = _qualified(pool, pool.compat) if taken else str(pool.revision)
    return Target(revision, pool.compat, None, rendered(pool, revision, defaults))


def _qualified(pool: Pool, compat: str) -> str:
    return short_hash({"revision": pool.revision, "compat": compat})


def _of(one: RevisionState) -> Target:
    return Target(one.revision, one.compat, one, dict(one.template))
