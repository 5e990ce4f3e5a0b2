"""One pass over a set: what is seen → what to write. Pure.

    read      each pool as a type, or what keeps it back       `pools.read_set`
    target    the revision each pool is to come to             `revisions`
    gate      who waits for whom                               `coherence`
    count     how many pods come and go                        `rollout`
    name      which                                            `pod_plan`

A pool that cannot be read is frozen: nothing of it is touched, and the others go on without it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..conditions import Reason
from ..crd import PREFILL_POOL
from ..observed import (
    Body,
    Failure,
    Observed,
    PodState,
    PoolKey,
    PoolResource,
    RevisionState,
)
from ..resources.members import Pool
from ..resources.resolve import DEFAULTS, Defaults
from ..resources.spec import Rollout
from . import budgets, pod_plan, progress, revisions
from .actions import Adopt, Create, Delete, Label, Mode, PoolPlan, SetPlan
from .coherence import Member, gate, laggards
from .reading import Reading, attempt_pods, read_set
from .replacement import due, rests
from .revisions import Target
from .rollout import OPEN, Gate, Limits, Moves, has_served, hold, limits, roll


@dataclass(frozen=True)
class _Seen:
    """One pool, with what belongs to it."""

    resource: PoolResource
    reading: Reading
    pods: tuple[PodState, ...]
    counting: tuple[PodState, ...]
    pinned: tuple[RevisionState, ...]
    current: RevisionState | None
    refused: Failure | None

    @property
    def name(self) -> str:
        return f"{self.resource.key.kind} {self.resource.key.name}"

    @property
    def frozen(self) -> bool:
        held = self.reading.held
        return held is not None and held.reason is Reason.INVALID_SPEC

    @property
    def follows(self) -> Pool | None:
        """The pool as its spec has it, when pods may follow it."""
        kept = self.reading.held or self.reading.paused or self.refused
        return None if kept else self.reading.pool

    @property
    def limits(self) -> Limits:
        rollout = self.reading.pool.spec.rollout if self.reading.pool else Rollout()
        return limits(rollout, self.reading.replicas or 0)


def plan_set(
    observed: Observed,
    defaults: Defaults = DEFAULTS,
    refused: Mapping[PoolKey, Failure] = MappingProxyType({}),
) -> SetPlan:
    """What brings the set one step nearer to its spec; empty (`writes == 0`) once it is there.

    `refused`: pools of whose new revision the API server takes no pod; they keep what they have.
    """
    seen = _see(observed, defaults, refused)
    targets = revisions.targets(
        {one.name: one.follows for one in seen if one.follows},
        {one.name: one.pinned for one in seen},
        defaults,
    )
    members = [_member(one, targets.get(one.name), observed.now) for one in seen]
    steps = []
    for one, member in zip(seen, members, strict=True):
        behind = laggards(member, members)
        decided = _decide(one, targets.get(one.name), behind, defaults)
        steps.append(_step(observed, one, decided, gate(member, members) if not behind else OPEN))
    return _together(observed, steps)


def _see(observed: Observed, defaults: Defaults, refused: Mapping[PoolKey, Failure]) -> list[_Seen]:
    prefill = observed.prefill if observed.prefill and not observed.prefill.deleting else None
    decodes = [one for one in observed.decodes if not one.deleting]
    reading = read_set(prefill.body if prefill else None, [one.body for one in decodes], defaults)
    read = [(one, reading.decodes[one.key.name]) for one in decodes]
    if prefill and reading.prefill:
        read.insert(0, (prefill, reading.prefill))
    return [_seen(observed, *one, defaults, refused.get(one[0].key)) for one in read]


def _seen(
    observed: Observed,
    resource: PoolResource,
    reading: Reading,
    defaults: Defaults,
    refused: Failure | None,
) -> _Seen:
    reading = attempt_pods(reading, lambda pool: revisions.rendered(pool, pool.revision, defaults))
    pods = pod_plan.own_pods(observed, resource)
    pinned = tuple(revisions.owned(observed, resource))
    return _Seen(
        resource, reading, pods, pod_plan.counting(pods, observed.now), pinned,
        revisions.current_of(resource, pinned, pods), refused,
    )  # fmt: skip


def _member(one: _Seen, target: Target | None, now: float) -> Member:
    why = ""
    if one.reading.held:
        why = f"does not agree ({one.reading.held.reason})"
    elif one.reading.paused:
        why = "is paused"
    elif one.refused:
        why = f"is refused ({one.refused.reason})"
    return Member(
        name=one.name,
        prefill=one.resource.key.kind == PREFILL_POOL,
        desired=one.reading.replicas or 0,
        pods=one.counting,
        serving=tuple(pod for pod in one.pods if not pod.over and not progress.stuck(pod, now)),
        target=target.compat if target else None,
        why=why,
    )


def _decide(
    one: _Seen, target: Target | None, behind: tuple[str, ...], defaults: Defaults
) -> PoolPlan:
    """Mode and revisions of a pool."""
    current = one.current.revision if one.current else None
    base = PoolPlan(
        key=one.resource.key, reading=one.reading, mode=Mode.HOLD, desired=one.reading.replicas,
        current=current, update=current, compat=one.current.compat if one.current else None,
        laggards=behind, refused=one.refused,
        template=one.current.template if one.current else None,
    )  # fmt: skip
    if one.frozen:
        return replace(base, mode=Mode.FREEZE)
    if target is None:
        return base
    newer = target.pinned is not None and one.follows is not None and (
        revisions.rendered(one.follows, target.revision, defaults) != target.pinned.template
    )  # fmt: skip
    wanted = replace(
        base, update=target.revision, compat=target.compat, newer_template=newer,
        template=target.template,
    )  # fmt: skip
    if behind:
        return wanted
    served = has_served(one.counting, one.limits, target.revision)
    return replace(wanted, mode=Mode.ROLL, current=target.revision if served else current)


@dataclass(frozen=True)
class _Step:
    """What one pool adds to the plan."""

    plan: PoolPlan
    adopt: tuple[Adopt, ...] = ()
    revision: tuple[Create, ...] = ()
    budget: tuple[Create, ...] = ()
    label: tuple[Label, ...] = ()
    create: tuple[Create, ...] = ()
    delete: tuple[Delete, ...] = ()
    drop_budget: tuple[str, ...] = ()
    drop_revisions: tuple[str, ...] = ()
    again: tuple[float, ...] = ()
    """Unix seconds."""


def _step(observed: Observed, one: _Seen, decided: PoolPlan, gate: Gate) -> _Step:
    """A pool's moves as writes."""
    again = tuple(progress.wakes(one.resource, decided, one.counting, observed.now))
    again += tuple(due(pod) for pod in one.counting if rests(pod, observed.now))
    again += tuple(
        at for at in map(progress.late, one.pods) if at is not None and at > observed.now
    )
    if decided.mode is Mode.FREEZE:
        return _Step(decided)
    moves, source = _moves(one, decided, gate)
    wanted = pod_plan.endpoints_of(observed, one.resource)
    marked, deleted = pod_plan.departures(one.resource, moves.leave, one.pods, observed.now)
    leaving = {label.name for label in marked}
    batches = (
        (moves.come_current, source.template if source else None),
        (moves.come_update, decided.template),
    )
    relabelled = pod_plan.relabels(
        one.resource, (pod for pod in one.pods if pod.name not in leaving), wanted
    )
    return _Step(
        plan=decided,
        adopt=(*_adopted_revisions(one), *pod_plan.adoptions(one.resource, one.pods)),
        revision=tuple(_revision(one, decided)),
        budget=tuple(_budget(observed, one)) if decided.template else (),
        label=(*marked, *relabelled),
        create=tuple(_arrivals(observed, one, batches, wanted=wanted, deleted=deleted)),
        delete=tuple(deleted),
        drop_budget=tuple(_unwanted_budget(observed, one)),
        drop_revisions=tuple(_history(one, decided)),
        again=again,
    )


def _moves(one: _Seen, decided: PoolPlan, gate: Gate) -> tuple[Moves, RevisionState | None]:
    """How many come and go, and what those of the current revision are made from."""
    if decided.mode is Mode.ROLL and decided.update is not None:
        before = one.current.revision if one.current else None
        return roll(one.counting, one.limits, before, decided.update, gate), one.current
    # Pods of a pool that never served yet come back from the newest there is.
    source = one.current or (one.pinned[-1] if one.pinned else None)
    return hold(one.counting, one.limits, source.revision if source else None), source


def _arrivals(
    observed: Observed,
    one: _Seen,
    batches: Iterable[tuple[int, Body | None]],
    *,
    wanted: Mapping[str, str],
    deleted: Sequence[Delete],
) -> Iterator[Create]:
    """Pods of each template, under names that no pod of the set has."""
    taken = {str(pod.name) for pod in observed.pods}
    over = {delete.name for delete in deleted if delete.reason == pod_plan.OVER}
    replaced = [pod for pod in one.pods if pod.name in over]
    for number, template in batches:
        if template is not None:
            yield from pod_plan.arrivals(
                one.resource, template, number, taken, wanted=wanted, replaced=replaced
            )


def _adopted_revisions(one: _Seen) -> Iterable[Adopt]:
    for state in one.pinned:
        if state.owner is None:
            yield Adopt(
                one.resource.key, "ControllerRevision", state.name, state.uid,
                revisions.owner(one.resource),
            )  # fmt: skip


def _revision(one: _Seen, decided: PoolPlan) -> Iterable[Create]:
    """The update revision, where it is not pinned yet."""
    known = {state.revision for state in one.pinned}
    if decided.mode is not Mode.ROLL or decided.update is None or decided.update in known:
        return
    target = Target(decided.update, decided.compat or "", None, dict(decided.template or {}))
    number = max((state.number for state in one.pinned), default=0) + 1
    yield Create(one.resource.key, revisions.body(one.resource, target, number))


def _budget(observed: Observed, one: _Seen) -> Iterable[Create]:
    wanted = budgets.budget(one.resource, one.limits)
    if wanted is not None and not budgets.is_kept(wanted, observed.budgets):
        yield Create(one.resource.key, wanted)


def _unwanted_budget(observed: Observed, one: _Seen) -> Iterable[str]:
    name = budgets.name_of(one.resource)
    if budgets.budget(one.resource, one.limits) is None and any(
        body["metadata"]["name"] == name for body in observed.budgets
    ):
        yield name


def _history(one: _Seen, decided: PoolPlan) -> Iterable[str]:
    used = {decided.update, decided.current, one.current.revision if one.current else None}
    used |= {pod.revision for pod in one.pods}
    used.add(one.reading.pool.revision if one.reading.pool else None)
    for state in revisions.unneeded(one.pinned, filter(None, used)):
        yield state.name


def _together(observed: Observed, steps: Sequence[_Step]) -> SetPlan:
    again = [at - observed.now for step in steps for at in step.again]
    return SetPlan(
        key=observed.key,
        adopt=tuple(one for step in steps for one in step.adopt),
        create_revisions=tuple(one for step in steps for one in step.revision),
        apply_budgets=tuple(one for step in steps for one in step.budget),
        label_pods=tuple(one for step in steps for one in step.label),
        create_pods=tuple(one for step in steps for one in step.create),
        delete_pods=tuple(one for step in steps for one in step.delete),
        delete_budgets=tuple(one for step in steps for one in step.drop_budget),
        delete_revisions=tuple(one for step in steps for one in step.drop_revisions),
        requeue_after=max(0.0, min(again)) if again else None,
        pools={step.plan.key: step.plan for step in steps},
    )
