"""One pass over a set: from what the operator observes to what it writes. Pure.

    validate  each pool as a type, or why it is rejected        `validation`, `pool_state`
    target    the revision to which each pool rolls             `revisions`
    pull      models that are downloaded before                 `model_pulls`
    gate      which pools wait for which                        `revision_gate`
    count     how many pods to add and to remove                `rollout`
    name      which pods                                        `pod_plan`

A pool whose spec cannot be read keeps its current revision in full: its pods are replaced, scaled
and drained. The other pools of the set go on without it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from tandem_contract.custom_resources import PREFILL_POOL

from ..observed import (
    Body,
    Failure,
    Observed,
    PoolKey,
    RevisionState,
)
from ..pods.external_storage import reads_bounds, with_bounds
from ..pods.models import pulled_model
from ..pods.sidecar_flags import reads_annotation, with_flags
from ..resources.resolve import DEFAULTS, Defaults
from . import pod_plan, progress, revisions
from .actions import Adopt, ApplyReplicas, Create, Delete, Label, Mode, PoolPlan, Pull, SetPlan
from .model_pulls import ModelPulls, plan_pulls
from .pool_state import PoolState, pool_states
from .revision_gate import Member, blocked_by, gate
from .revisions import Target
from .rollout import OPEN, Gate, PodChanges, has_served, hold, roll


def plan_set(
    observed: Observed,
    defaults: Defaults = DEFAULTS,
    refused: Mapping[PoolKey, Failure] = MappingProxyType({}),
) -> SetPlan:
    """The writes that bring the set one step nearer to its spec; none once it is there.

    `refused`: pools whose new revision the API server refuses to create pods of, or a Secret that
    these need; they keep the revision that they have.
    """
    pools = pool_states(observed, defaults, refused)
    targets = revisions.choose_targets(
        {pool.name: pool.rollable_pool for pool in pools if pool.rollable_pool},
        {pool.name: pool.pinned for pool in pools},
        defaults,
    )
    pulls = plan_pulls(observed, pools, targets, defaults)
    targets = _with_pulls(pools, targets, pulls, defaults)
    members = [
        _gate_member(pool, targets.get(pool.name), pool.name in pulls.waiting, observed.now)
        for pool in pools
    ]
    writes = []
    for pool, member in zip(pools, members, strict=True):
        # Blocked pools are held, so their gate does not matter.
        blockers = blocked_by(member, members)
        pull = pulls.waiting.get(pool.name) if pool.rollable_pool else None
        plan = _plan_pool(pool, targets.get(pool.name), blockers, pull, defaults)
        pool_gate = OPEN if blockers else gate(member, members)
        writes.append(_plan_writes(observed, pool, plan, pool_gate))
    return _combine(observed, writes, pulls)


def _with_pulls(
    pools: Iterable[PoolState], targets: Mapping[str, Target], pulls: ModelPulls, defaults: Defaults
) -> dict[str, Target]:
    """The targets that pools may roll to now: without those whose model is not there yet."""
    ready = {name: target for name, target in targets.items() if name not in pulls.waiting}
    for pool in pools:
        pulled, target = pulls.pulled.get(pool.name), ready.get(pool.name)
        if pulled and target and pool.rollable_pool:
            template = revisions.render_template(
                pool.rollable_pool, target.revision, defaults, pulled
            )
            ready[pool.name] = replace(target, template=template)
    return ready


def _gate_member(pool: PoolState, target: Target | None, is_pulling: bool, now: float) -> Member:
    reason = ""
    if pool.validation.rejection:
        reason = f"does not agree ({pool.validation.rejection.reason})"
    elif pool.validation.paused:
        reason = "is paused"
    elif pool.refused:
        reason = f"is refused ({pool.refused.reason})"
    elif is_pulling:
        reason = "waits for its model"
    return Member(
        name=pool.name,
        prefill=pool.resource.key.kind == PREFILL_POOL,
        desired=pool.desired,
        pods=pool.counting,
        # A stuck pod serves nothing; waiting for it would block the set for good.
        serving=tuple(pod for pod in pool.pods if not pod.over and not progress.is_stuck(pod, now)),
        target=target.compat if target else None,
        hold_reason=reason,
    )


def _plan_pool(
    pool: PoolState,
    target: Target | None,
    blockers: tuple[str, ...],
    pull: Pull | None,
    defaults: Defaults,
) -> PoolPlan:
    """Mode and revisions of a pool."""
    current = pool.current.revision if pool.current else None
    on_hold = PoolPlan(
        key=pool.resource.key, generation=pool.resource.generation,
        validation=pool.validation, mode=Mode.HOLD,
        desired=pool.desired, current=current, update=current,
        compat=pool.current.compat if pool.current else None,
        blocked_by=blockers, refused=pool.refused, pull=pull,
        template=pool.current.template if pool.current else None,
    )  # fmt: skip
    # The pool may not roll: it is rejected, paused or refused, or waits for its model. It keeps its
    # revision and scales.
    if target is None:
        return on_hold
    newer = target.pinned is not None and pool.rollable_pool is not None and revisions.differs(
        revisions.render_template(
            pool.rollable_pool, target.revision, defaults, pulled_model(target.pinned.template)
        ),
        target.pinned.template,
    )  # fmt: skip
    targeted = replace(
        on_hold, update=target.revision, compat=target.compat, newer_template=newer,
        template=target.template,
    )  # fmt: skip
    if blockers:
        return targeted
    # Once the target serves, lost pods are replaced by it and no longer by the old revision.
    served = has_served(pool.counting, pool.limits, target.revision)
    return replace(targeted, mode=Mode.ROLL, current=target.revision if served else current)


@dataclass(frozen=True)
class _PoolWrites:
    """The part of the set's plan that is about one pool; the fields are SetPlan's."""

    plan: PoolPlan
    adopt: tuple[Adopt, ...] = ()
    create_revisions: tuple[Create, ...] = ()
    apply_budgets: tuple[Create, ...] = ()
    label_pods: tuple[Label, ...] = ()
    create_pods: tuple[Create, ...] = ()
    delete_pods: tuple[Delete, ...] = ()
    delete_budgets: tuple[str, ...] = ()
    delete_revisions: tuple[str, ...] = ()
    apply_replicas: tuple[ApplyReplicas, ...] = ()
    requeue_times: tuple[float, ...] = ()
    """Unix seconds."""


def _plan_writes(observed: Observed, pool: PoolState, plan: PoolPlan, gate: Gate) -> _PoolWrites:
    """The writes for one pool."""
    changes, source = _pod_changes(pool, plan, gate)
    routing = pod_plan.routing_labels(observed, pool.resource)
    draining, deletions = pod_plan.plan_deletions(
        pool.resource, changes.remove, pool.pods, observed.now
    )
    # Pods that get the draining label keep their endpoint labels until they are gone.
    going = {label.name for label in draining}
    relabelled = pod_plan.plan_relabels(
        pool.resource, (pod for pod in pool.pods if pod.name not in going), routing
    )
    batches = (
        (changes.add_current, source.template if source else None),
        (changes.add_update, plan.template),
    )
    return _PoolWrites(
        plan=plan,
        adopt=(*_adopt_revisions(pool), *pod_plan.plan_adoptions(pool.resource, pool.pods)),
        create_revisions=tuple(_create_revision(pool, plan)),
        apply_budgets=tuple(_apply_budget(observed, pool)) if plan.template else (),
        label_pods=(*draining, *relabelled, *_set_sidecar_flags(pool), *_set_bounds(pool)),
        create_pods=tuple(
            _create_pods(observed, pool, batches, routing=routing, deletions=deletions)
        ),
        delete_pods=tuple(deletions),
        delete_budgets=tuple(_delete_budget(observed, pool)),
        delete_revisions=tuple(_delete_revisions(pool, plan)),
        apply_replicas=tuple(_apply_replicas(pool)),
        requeue_times=tuple(_requeue_times(pool, plan, observed.now)),
    )


def _requeue_times(pool: PoolState, plan: PoolPlan, now: float) -> Iterator[float]:
    """Unix seconds at which the plan or the status changes although no object changes."""
    yield from progress.requeue_times(pool.resource, plan, pool.counting, now)
    yield from (
        pod_plan.replacement_time(pod) for pod in pool.counting if pod_plan.is_in_backoff(pod, now)
    )
    yield from (
        pod_plan.available_from(pod, pool.rollout)
        for pod in pool.counting
        if pod.ready and not pod.available
    )
    for pod in pool.pods:
        if (start := progress.stuck_from(pod)) is not None and start > now:
            yield start


def _pod_changes(
    pool: PoolState, plan: PoolPlan, gate: Gate
) -> tuple[PodChanges, RevisionState | None]:
    """Pods to add and to remove, and the revision that `add_current` pods are created from."""
    if plan.mode is Mode.ROLL and plan.update is not None:
        # The revision that served before this pass: `plan.current` may already be the update.
        before = pool.current.revision if pool.current else None
        return roll(pool.counting, pool.limits, before, plan.update, gate), pool.current
    # A held pool that never served replaces its pods from the newest revision that it has.
    source = pool.current or (pool.pinned[-1] if pool.pinned else None)
    return hold(pool.counting, pool.limits, source.revision if source else None), source


def _create_pods(
    observed: Observed,
    pool: PoolState,
    batches: Iterable[tuple[int, Body | None]],
    *,
    routing: Mapping[str, str],
    deletions: Sequence[Delete],
) -> Iterator[Create]:
    """Pods of each template, under names that no pod of the set has."""
    # Both batches share these names. They cannot collide: a pod's name contains its revision.
    existing_names = {str(pod.name) for pod in observed.pods}
    ended = {delete.name for delete in deletions if delete.reason == pod_plan.OVER}
    replaced = [pod for pod in pool.pods if pod.name in ended]
    flags = pool.flags or pod_plan.newest_flags(pool.pods)
    bounds = pool.bounds or pod_plan.newest_bounds(pool.pods)
    for number, template in batches:
        if template is not None:
            # Its annotations have the values from the time when the revision was new.
            template = with_flags(template, flags) if flags else template
            template = with_bounds(template, bounds) if bounds else template
            yield from pod_plan.plan_creations(
                pool.resource, template, number, existing_names, routing=routing, replaced=replaced
            )


def _set_sidecar_flags(pool: PoolState) -> Iterable[Label]:
    """The pool's present flags on its pods, as far as their sidecars read them."""
    reading = {state.revision for state in pool.pinned if reads_annotation(state.template)}
    pods = [pod for pod in pool.pods if pod.revision in reading]
    return pod_plan.plan_flags(pool.resource, pods, pool.flags) if pool.flags else ()


def _set_bounds(pool: PoolState) -> Iterable[Label]:
    """The pool's present bounds of its store on its pods, as far as their engines read them."""
    reading = {state.revision for state in pool.pinned if reads_bounds(state.template)}
    pods = [pod for pod in pool.pods if pod.revision in reading]
    return pod_plan.plan_bounds(pool.resource, pods, pool.bounds) if pool.bounds else ()


def _adopt_revisions(pool: PoolState) -> Iterable[Adopt]:
    for state in pool.pinned:
        if state.owner is None:
            yield Adopt(
                pool.resource.key, "ControllerRevision", state.name, state.uid,
                revisions.owner_reference(pool.resource),
            )  # fmt: skip


def _create_revision(pool: PoolState, plan: PoolPlan) -> Iterable[Create]:
    """The update revision, unless it is pinned already."""
    pinned = {state.revision for state in pool.pinned}
    if plan.mode is not Mode.ROLL or plan.update is None or plan.update in pinned:
        return
    target = Target(plan.update, plan.compat or "", None, dict(plan.template or {}))
    number = max((state.number for state in pool.pinned), default=0) + 1
    yield Create(pool.resource.key, revisions.controller_revision(pool.resource, target, number))


def _apply_budget(observed: Observed, pool: PoolState) -> Iterable[Create]:
    desired = pod_plan.budget(pool.resource, pool.limits)
    if desired is not None and not pod_plan.has_budget(desired, observed.budgets):
        yield Create(pool.resource.key, desired)


def _delete_budget(observed: Observed, pool: PoolState) -> Iterable[str]:
    name = pod_plan.budget_name(pool.resource)
    if pod_plan.budget(pool.resource, pool.limits) is None and any(
        body["metadata"]["name"] == name for body in observed.budgets
    ):
        yield name


def _delete_revisions(pool: PoolState, plan: PoolPlan) -> Iterable[str]:
    """Unused revisions beyond the history that is kept."""
    # A revision in use keeps its object: pods lost meanwhile are created from it again.
    used = {plan.update, plan.current, pool.current.revision if pool.current else None}
    used |= {pod.revision for pod in pool.pods}
    # The revision of the present spec, even if the pool cannot roll to it now.
    used.add(pool.validation.pool.revision if pool.validation.pool else None)
    for state in revisions.expired_revisions(pool.pinned, filter(None, used)):
        yield state.name


def _apply_replicas(pool: PoolState) -> Iterable[ApplyReplicas]:
    """A number for /scale, which autoscalers read, where the user states none.

    The number is the pool's own: a user who leaves `replicas` to an autoscaler by removing it does
    not shrink the pool. Under `scaling` the operator's number is withdrawn.
    """
    spec = pool.resource.body["spec"]
    if "replicas" not in spec and "scaling" not in spec:
        yield ApplyReplicas(pool.resource.key, pool.resource.uid, pool.desired)
    elif "scaling" in spec and pool.resource.owns_replicas:
        yield ApplyReplicas(pool.resource.key, pool.resource.uid, None)


def _combine(observed: Observed, pools: Sequence[_PoolWrites], pulls: ModelPulls) -> SetPlan:
    delays = [time - observed.now for pool in pools for time in pool.requeue_times]
    return SetPlan(
        key=observed.key,
        adopt=tuple(write for pool in pools for write in pool.adopt),
        create_jobs=pulls.create,
        create_revisions=tuple(write for pool in pools for write in pool.create_revisions),
        apply_budgets=tuple(write for pool in pools for write in pool.apply_budgets),
        label_pods=tuple(write for pool in pools for write in pool.label_pods),
        create_pods=tuple(write for pool in pools for write in pool.create_pods),
        delete_pods=tuple(write for pool in pools for write in pool.delete_pods),
        delete_budgets=tuple(name for pool in pools for name in pool.delete_budgets),
        delete_revisions=tuple(name for pool in pools for name in pool.delete_revisions),
        delete_jobs=pulls.delete,
        apply_replicas=tuple(write for pool in pools for write in pool.apply_replicas),
        requeue_after=max(0.0, min(delays)) if delays else None,
        pools={pool.plan.key: pool.plan for pool in pools},
    )
