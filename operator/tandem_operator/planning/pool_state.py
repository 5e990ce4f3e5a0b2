"""The pools of a set, each with the objects that belong to it: what a plan starts from. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..observed import Failure, Observed, PodState, PoolKey, PoolResource, RevisionState
from ..pods.external_storage import bounds_text
from ..pods.sidecar_flags import flags_text
from ..resources.pools import DecodePool, Pool
from ..resources.resolve import Defaults
from ..resources.spec import Rollout
from . import pod_plan, revisions
from .rollout import Limits, pool_limits
from .validation import PoolValidation, check_renderable, validate_set


@dataclass(frozen=True)
class PoolState:
    """One pool of a set."""

    resource: PoolResource
    validation: PoolValidation
    pods: tuple[PodState, ...]
    counting: tuple[PodState, ...]
    """Those of `pods` that fill a place among the replicas."""
    pinned: tuple[RevisionState, ...]
    """Its ControllerRevisions, oldest first."""
    current: RevisionState | None
    refused: Failure | None

    @property
    def name(self) -> str:
        return f"{self.resource.key.kind} {self.resource.key.name}"

    @property
    def rollable_pool(self) -> Pool | None:
        """The pool as its spec says, when its pods may roll to that spec."""
        is_held = self.validation.rejection or self.validation.paused or self.refused
        return None if is_held else self.validation.pool

    @property
    def flags(self) -> str | None:
        """The sidecar's flags that pods have to run with; None: those that they have."""
        pool = self.rollable_pool
        return flags_text(pool.spec.sidecar) if isinstance(pool, DecodePool) else None

    @property
    def bounds(self) -> str | None:
        """The bounds of the external store that pods have to keep; None: those that they have."""
        pool = self.rollable_pool
        return bounds_text(pool.spec.transfer.storage) if pool else None

    @property
    def desired(self) -> int:
        """Desired number of pods."""
        if self.validation.replicas is not None:
            return self.validation.replicas
        # The spec has no readable number: the pool keeps the size that it had.
        stored = self.resource.status.get("desiredReplicas")
        return stored if isinstance(stored, int) else len(self.counting) or 1

    @property
    def rollout(self) -> Rollout:
        pool = self.validation.pool
        return pool.spec.rollout if pool else Rollout()

    @property
    def limits(self) -> Limits:
        return pool_limits(self.validation.pool, self.desired)


def pool_states(
    observed: Observed, defaults: Defaults, refused: Mapping[PoolKey, Failure]
) -> list[PoolState]:
    """The set's pools that are not being deleted, the PrefillPool first."""
    prefill = observed.prefill if observed.prefill and not observed.prefill.deleting else None
    # Pods of a pool that is being deleted are left to Kubernetes' garbage collector.
    decodes = [decode for decode in observed.decodes if not decode.deleting]
    validations = validate_set(
        prefill.body if prefill else None, [decode.body for decode in decodes], defaults
    )
    pairs = [(decode, validations.decodes[decode.key.name]) for decode in decodes]
    if prefill and validations.prefill:
        pairs.insert(0, (prefill, validations.prefill))
    return [
        _pool_state(observed, resource, validation, defaults, refused.get(resource.key))
        for resource, validation in pairs
    ]


def _pool_state(
    observed: Observed,
    resource: PoolResource,
    validation: PoolValidation,
    defaults: Defaults,
    refused: Failure | None,
) -> PoolState:
    validation = check_renderable(
        validation, lambda pool: revisions.render_template(pool, pool.revision, defaults)
    )
    rollout = validation.pool.spec.rollout if validation.pool else Rollout()
    pods = pod_plan.own_pods(observed, resource, rollout)
    pinned = tuple(revisions.owned_revisions(observed, resource))
    return PoolState(
        resource, validation, pods, pod_plan.counting(pods, observed.now), pinned,
        revisions.current_revision(resource, pinned, pods), refused,
    )  # fmt: skip
