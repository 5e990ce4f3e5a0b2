"""A pool's conditions, each computed from the facts by itself, in the order of the status. Pure.

`Ready` is PodsReady and Compatible, and for a DecodePool also PeerReady and RouterReady. Messages
hold nothing that changes by itself (no ages, no counters), so the status of a pool at rest is
never written.
"""

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from tandem_contract import labels

from ..conditions import ConditionType, Reason
from ..observed import PodState
from ..resources.resolve import other_version_hint
from ..resources.spec_parts import Storage
from . import progress
from .actions import PoolPlan
from .status_facts import Facts

Truth = Literal["True", "False", "Unknown"]


class ConditionState(NamedTuple):
    """A condition without its times."""

    status: Truth
    reason: str
    message: str


_PROGRESSING_REASONS: Final = frozenset(
    {
        Reason.STARTING,
        Reason.ROLLING_OUT,
        Reason.SCALING,
        Reason.WAITING_FOR_PEER,
        Reason.MODEL_PULLS,
    }
)
_NO_SPARE: Final = (
    ". While it rolls out, the pool asks for more pods than it has: without a spare accelerator use"
    " rollout.maxSurge: 0 with maxUnavailable: 1"
)


def conditions(facts: Facts) -> dict[ConditionType, ConditionState]:
    """Every condition that the pool has, `Ready` first."""
    # Ready is derived from the others but shown first.
    states = dict(_all_but_ready(facts))
    return {ConditionType.READY: _ready(facts, states), **states}


def _all_but_ready(facts: Facts) -> Iterator[tuple[ConditionType, ConditionState]]:
    yield ConditionType.PODS_READY, _pods_ready(facts)
    yield ConditionType.COMPATIBLE, _compatible(facts)
    if facts.names_prefill or facts.is_prefill:
        yield ConditionType.PEER_READY, _peer_ready(facts)
    if not facts.is_prefill:
        yield ConditionType.ROUTER_READY, _router_ready(facts)
    yield ConditionType.PROGRESSING, _progressing(facts)
    yield ConditionType.RECONCILING, _reconciling(facts)
    yield ConditionType.STALLED, _stalled(facts)
    yield ConditionType.DRAINING, _draining(facts)
    yield ConditionType.SCALING_ACTIVE, _scaling_active(facts)
    if facts.names_prefill:
        yield ConditionType.TRANSPORT_VERIFIED, _transport_verified(facts)
    pool = facts.plan.pool
    if pool is not None and pool.spec.transfer.storage is not None:
        yield ConditionType.STORAGE_REACHABLE, _storage_reachable(facts, pool.spec.transfer.storage)
    yield ConditionType.UPDATE_AVAILABLE, _update_available(facts)


def _ready(facts: Facts, states: dict[ConditionType, ConditionState]) -> ConditionState:
    """The first required condition that is not True, else PodsReady."""
    # Compatible first: a rejected pool may lack pods for that very reason.
    required = [ConditionType.COMPATIBLE, ConditionType.PODS_READY]
    # A pool scaled to zero serves nothing and needs neither peer nor router.
    if not facts.is_prefill and facts.plan.desired != 0:
        required += [ConditionType.PEER_READY, ConditionType.ROUTER_READY]
    for kind in required:
        if kind in states and states[kind].status != "True":
            return ConditionState("False", states[kind].reason, states[kind].message)
    return states[ConditionType.PODS_READY]


def _pods_ready(facts: Facts) -> ConditionState:
    count = f"{len(facts.ready_pods)} of {facts.desired} pods are ready"
    if facts.desired == 0:
        return ConditionState("True", Reason.SCALED_TO_ZERO, "no pods are requested")
    if len(facts.ready_pods) >= facts.desired:
        return ConditionState("True", Reason.ALL_READY, count)
    limits = facts.limits
    if facts.is_rolling and limits and len(facts.ready_pods) >= max(1, limits.fewest_ready):
        return ConditionState("True", Reason.ROLLING_OUT, f"{count}, within maxUnavailable")
    # A refused write explains missing pods better than the state of those that exist.
    if facts.failure is not None:
        return ConditionState("False", facts.failure.reason, f"{count}: {facts.failure.message}")
    if facts.plan.pull is not None:
        return ConditionState("False", Reason.MODEL_PULLS, f"{count}: {facts.plan.pull.message}")
    return _missing_pods(facts, count)


def _missing_pods(facts: Facts, count: str) -> ConditionState:
    """Why pods are missing or unready, the worst cause first."""
    if facts.no_fit_reason is not None:
        return ConditionState("False", Reason.FITS_NO_NODE, f"{count}: {facts.no_fit_reason}")
    unready = [pod for pod in facts.counting_pods if not pod.ready and pod.trouble]
    failed = [pod for pod in unready if pod.over]
    unscheduled = [pod for pod in unready if not pod.scheduled and not pod.over]
    # A failed pod needs a change of the spec; an unscheduled one may only have to wait.
    if failed:
        return ConditionState("False", Reason.PODS_FAIL, f"{count}: {_troubles(facts, failed)}")
    if unscheduled:
        hint = _NO_SPARE if facts.is_rolling else ""
        message = f"{count}: {_troubles(facts, unscheduled)}{hint}"
        return ConditionState("False", Reason.UNSCHEDULABLE, message)
    if unready:
        return ConditionState("False", Reason.PODS_FAIL, f"{count}: {_troubles(facts, unready)}")
    return ConditionState("False", Reason.PODS_NOT_READY, f"{count}{_start_hint(facts)}")


def _start_hint(facts: Facts) -> str:
    """Where the first unready pod says more: a missing volume, say, is only in its events."""
    for pod in facts.counting_pods:
        if pod.scheduled and not pod.ready and pod.phase == "Pending":
            return f": {pod.name} waits for images or volumes: kubectl describe pod {pod.name}"
        if pod.scheduled and not pod.ready:
            return f": {pod.name} starts or loads its weights: kubectl logs {pod.name} -c engine"
    return ""


def _troubles(facts: Facts, pods: list[PodState]) -> str:
    """The first pod's trouble, how many more pods have one, and a hint if the version may be why.

    An engine of another version may not know what the operator writes for its own.
    """
    more = f" (and {len(pods) - 1} more)" if len(pods) > 1 else ""
    pool, hint = facts.plan.pool, ""
    has_run = pods[0].scheduled or pods[0].over
    if has_run and pool is not None and pool.spec.engine.type == "torch":
        hint = other_version_hint(pool.spec.engine.version)
    return f"{pods[0].name}: {pods[0].trouble}{more}{hint}"


def _compatible(facts: Facts) -> ConditionState:
    rejection = facts.plan.validation.rejection
    if rejection is not None:
        status: Truth = "False" if rejection.reason is Reason.MISMATCH else "Unknown"
        return ConditionState(status, rejection.reason, rejection.message)
    if facts.is_prefill:
        return _compatible_with_decodes(facts)
    if not facts.names_prefill:
        return ConditionState("True", Reason.ALONE, "the pool has no prefillRef and needs no peer")
    notes = "".join(f"; {note}" for note in facts.plan.validation.notes)
    name = facts.prefill.key.name if facts.prefill else ""
    return ConditionState("True", Reason.AGREES, f"agrees with PrefillPool {name}{notes}")


def _compatible_with_decodes(facts: Facts) -> ConditionState:
    """A PrefillPool is incompatible only when every DecodePool that names it disagrees with it."""
    if not facts.decodes:
        return ConditionState("True", Reason.ALONE, "no DecodePool names this pool")
    mismatched = [plan for plan in facts.decodes if _is_mismatch(plan)]
    names = ", ".join(plan.key.name for plan in mismatched)
    if len(mismatched) == len(facts.decodes):
        message = f"no DecodePool agrees with this pool: see condition Compatible of {names}"
        return ConditionState("False", Reason.MISMATCH, message)
    but = f", except {names}: see condition Compatible there" if mismatched else ""
    return ConditionState("True", Reason.AGREES, f"DecodePools agree with this pool{but}")


def _is_mismatch(plan: PoolPlan) -> bool:
    rejection = plan.validation.rejection
    return rejection is not None and rejection.reason is Reason.MISMATCH


def _peer_ready(facts: Facts) -> ConditionState:
    if facts.is_prefill:
        if not facts.decodes:
            return ConditionState("False", Reason.PEER_MISSING, "no DecodePool names this pool")
    elif facts.prefill is None:
        rejection = facts.plan.validation.rejection
        return ConditionState("False", Reason.PEER_MISSING, rejection.message if rejection else "")
    elif facts.prefill.desired == 0:
        name = facts.prefill.key.name
        return ConditionState(
            "True", Reason.PEER_SCALED_TO_ZERO,
            f"PrefillPool {name} is scaled to zero: requests are served without a hand-off",
        )  # fmt: skip
    # Without a ready pod of its own, the pool counts with the hash that it rolls to.
    hashes = {pod.compat for pod in facts.ready_pods} or {facts.plan.compat or ""}
    if any(pod.compat in hashes for pod in facts.peers):
        return ConditionState(
            "True", Reason.PAIRED, "a pod of the other side with this KV layout is ready"
        )
    other = "decode" if facts.is_prefill else "prefill"
    return ConditionState(
        "False", Reason.PEER_NOT_READY, f"no {other} pod with this pool's KV layout is ready"
    )


def _router_ready(facts: Facts) -> ConditionState:
    router = facts.router
    if router is None:
        # After a restart, sets may be reconciled before their endpoints. Until then the stored
        # state stays, or every restart would report pools that serve as not ready.
        if stored := facts.last_condition(ConditionType.ROUTER_READY):
            return ConditionState(stored["status"], stored["reason"], stored["message"])
        return ConditionState(
            "Unknown", Reason.ROUTER_PENDING,
            f"the operator has not reconciled endpoint {facts.endpoint} yet",
        )  # fmt: skip
    return ConditionState("True" if router.ready else "False", router.reason, router.message)


def _progressing(facts: Facts) -> ConditionState:
    plan, reason = facts.plan, facts.progress
    updated = [pod for pod in facts.active_pods if pod.revision == plan.update]
    available = len([pod for pod in updated if pod.available])
    pods = f"{available} of {facts.desired} pods are of revision {plan.update} and available"
    # While older pods keep PodsReady true, only this message says why new pods are not ready.
    counting = [pod for pod in facts.counting_pods if pod.revision == plan.update]
    if failing := [pod for pod in counting if pod.trouble and not pod.ready]:
        pods += f": {_troubles(facts, failing)}"
    held_by = plan.validation.rejection or plan.refused or (plan.pull and plan.pull.failure)
    messages: dict[Reason, str] = {
        Reason.WAITING_FOR_PEER: f"keeps revision {plan.current} until the whole set can"
        f" change: {', '.join(plan.blocked_by)}",
        Reason.PAUSED: "spec.paused is true: pods keep their revision",
        Reason.HELD: f"keeps its present pods: {held_by.message if held_by else ''}",
        Reason.MODEL_PULLS: f"keeps its present pods until its model is there:"
        f" {plan.pull.message if plan.pull else ''}",
        Reason.COMPLETE: "the pods are as the spec says",
        Reason.PROGRESS_DEADLINE_EXCEEDED: f"no progress within rollout.progressDeadline: {pods}",
    }
    status: Truth = "True" if reason in _PROGRESSING_REASONS else "False"
    return ConditionState(status, reason, messages.get(reason, pods))


def _reconciling(facts: Facts) -> ConditionState:
    """Whether the operator still works on the present spec, as kstatus reads the condition.

    Never True beside Stalled: of the two, kstatus would report the one that it finds first.
    """
    stalled, progressing = _stalled(facts), _progressing(facts)
    if stalled.status == "True":
        return ConditionState("False", stalled.reason, stalled.message)
    if facts.failure is not None:
        return ConditionState("True", facts.failure.reason, facts.failure.message)
    is_done = facts.progress in (Reason.COMPLETE, Reason.PAUSED)
    return ConditionState("False" if is_done else "True", progressing.reason, progressing.message)


def _stalled(facts: Facts) -> ConditionState:
    """Whether the pool stays as it is until a user or an administrator changes something.

    An invalid spec does from the start. Everything else may pass by itself, as a node pool grows or
    the peer's edit follows, and counts after the deadline.
    """
    rejection = facts.plan.validation.rejection
    if rejection is not None and rejection.reason is Reason.INVALID_SPEC:
        return ConditionState("True", rejection.reason, rejection.message)
    if not facts.is_overdue:
        return ConditionState("False", Reason.NOT_STALLED, "nothing blocks the pool permanently")
    if facts.failure is not None:
        return ConditionState("True", facts.failure.reason, facts.failure.message)
    if rejection is not None:
        return ConditionState("True", rejection.reason, rejection.message)
    if facts.no_fit_reason is not None:
        return ConditionState("True", Reason.FITS_NO_NODE, facts.no_fit_reason)
    message = _missing_pods(facts, _progressing(facts).message).message
    return ConditionState("True", Reason.PROGRESS_DEADLINE_EXCEEDED, message)


def _draining(facts: Facts) -> ConditionState:
    stuck = sorted(pod.name for pod in facts.leaving_pods if progress.is_stuck(pod, facts.now))
    if stuck:
        return ConditionState(
            "True", Reason.DRAIN_STUCK,
            f"still there after their grace period: {', '.join(stuck)}; check whether their node"
            " is ready",
        )  # fmt: skip
    if facts.leaving_pods:
        count = len(facts.leaving_pods)
        return ConditionState(
            "True", Reason.PODS_DRAIN, f"{count} pods finish their requests before they terminate"
        )
    return ConditionState("False", Reason.NOTHING_DRAINS, "no pod is terminating")


def _scaling_active(facts: Facts) -> ConditionState:
    pool = facts.plan.pool
    if pool is None or pool.spec.scaling is None:
        return ConditionState("False", Reason.NOT_CONFIGURED, "spec.scaling is not set")
    return ConditionState(
        "False", Reason.AT_MINIMUM,
        "this release does not scale pools by itself: the pool has scaling.minReplicas pods,"
        f" {facts.desired}",
    )  # fmt: skip


def _transport_verified(facts: Facts) -> ConditionState:
    """True once KV has moved; kept for a revision, because the engines' counters restart at 0."""
    status = facts.resource.status
    before = facts.last_condition(ConditionType.TRANSPORT_VERIFIED)
    # The condition itself is the memory: a restarted operator has not probed any engine yet.
    is_known = before.get("status") == "True" and (
        status.get("currentRevision") == facts.plan.current
    )
    if facts.kv_bytes_moved > 0 or is_known:
        return ConditionState(
            "True", Reason.BYTES_MOVED, "decode engines have read KV from prefill engines"
        )
    return ConditionState(
        "Unknown", Reason.NOTHING_MOVED, "no KV has moved yet: no request was handed off"
    )


def _storage_reachable(facts: Facts, store: Storage) -> ConditionState:
    """Whether the engines can use their external store. The operator asks the engines, never the
    store, which it may be unable to reach."""
    report = facts.storage
    if report is None or report.engines == 0:
        # After a restart of the operator, the stored state stays until the engines were asked.
        stored = facts.last_condition(ConditionType.STORAGE_REACHABLE)
        if report is None and stored:
            return ConditionState(stored["status"], stored["reason"], stored["message"])
        return ConditionState(
            "Unknown", Reason.STORE_UNUSED, f"no ready engine has used {store.endpoint} yet"
        )
    if not report.failing:
        return ConditionState("True", Reason.STORE_ANSWERS, f"the engines can use {store.endpoint}")
    failure = report.message or "the engine names no failure"
    return ConditionState(
        "False", Reason.STORE_FAILS,
        f"{len(report.failing)} of {report.engines} engines cannot use {store.endpoint} and compute"
        f" what they would load; {report.failing[0]}: {failure}",
    )  # fmt: skip


def _update_available(facts: Facts) -> ConditionState:
    if facts.plan.newer_template:
        return ConditionState(
            "True", Reason.NEWER_TEMPLATE,
            "this operator renders the pods differently than their revision pins them: set"
            f" annotation {labels.RESTARTED_AT} to the present time to roll to the new template",
        )  # fmt: skip
    return ConditionState("False", Reason.UP_TO_DATE, "the pods are as this operator renders them")
