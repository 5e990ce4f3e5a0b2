"""A pool's conditions: each from the facts by itself, in the order in which they are shown. Pure.

`Ready` is PodsReady and Compatible and, of a DecodePool, PeerReady and RouterReady. Messages say
nothing that changes while nothing happens, so that a pool at rest is never written.
"""

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from tandem_contract import labels

from ..conditions import ConditionType, Reason
from ..observed import PodState
from . import progress
from .actions import Mode
from .status_facts import Facts

Truth = Literal["True", "False", "Unknown"]


class Stated(NamedTuple):
    """A condition without its times."""

    status: Truth
    reason: str
    message: str


_UNDER_WAY: Final = frozenset(
    {Reason.STARTING, Reason.ROLLING_OUT, Reason.SCALING, Reason.WAITING_FOR_PEER}
)
_NO_SPARE: Final = (
    ". While it rolls out, the pool asks for more pods than it has: without a spare accelerator use"
    " rollout.maxSurge: 0 with maxUnavailable: 1"
)


def conditions(facts: Facts) -> dict[ConditionType, Stated]:
    """Every condition that the pool has, `Ready` first."""
    found = dict(_parts(facts))
    return {ConditionType.READY: _ready(facts, found), **found}


def _parts(facts: Facts) -> Iterator[tuple[ConditionType, Stated]]:
    yield ConditionType.PODS_READY, _pods_ready(facts)
    yield ConditionType.COMPATIBLE, _compatible(facts)
    if facts.pairs or facts.is_prefill:
        yield ConditionType.PEER_READY, _peer_ready(facts)
    if not facts.is_prefill:
        yield ConditionType.ROUTER_READY, _router_ready(facts)
    yield ConditionType.PROGRESSING, _progressing(facts)
    yield ConditionType.STALLED, _stalled(facts)
    yield ConditionType.DRAINING, _draining(facts)
    yield ConditionType.SCALING_ACTIVE, _scaling_active(facts)
    if facts.pairs:
        yield ConditionType.TRANSPORT_VERIFIED, _transport_verified(facts)
    yield ConditionType.UPDATE_AVAILABLE, _update_available(facts)


def _ready(facts: Facts, found: dict[ConditionType, Stated]) -> Stated:
    # A pool that disagrees lacks pods for that reason.
    needed = [ConditionType.COMPATIBLE, ConditionType.PODS_READY]
    # Nobody needs a peer or a router to do nothing.
    if not facts.is_prefill and facts.plan.desired != 0:
        needed += [ConditionType.PEER_READY, ConditionType.ROUTER_READY]
    for kind in needed:
        if kind in found and found[kind].status != "True":
            return Stated("False", found[kind].reason, found[kind].message)
    return found[ConditionType.PODS_READY]


def _pods_ready(facts: Facts) -> Stated:
    if facts.plan.mode is Mode.FREEZE and facts.plan.reading.held:
        return Stated("Unknown", Reason.INVALID_SPEC, facts.plan.reading.held.message)
    count = f"{len(facts.ready)} of {facts.desired} pods are ready"
    if facts.desired == 0:
        return Stated("True", Reason.SCALED_TO_ZERO, "no pods are wanted")
    if len(facts.ready) >= facts.desired:
        return Stated("True", Reason.ALL_READY, count)
    within = facts.limits
    if facts.rolling and within and len(facts.ready) >= max(1, within.fewest_ready):
        return Stated("True", Reason.ROLLING_OUT, f"{count}, as many as maxUnavailable leaves")
    if facts.failure is not None:
        return Stated("False", facts.failure.reason, f"{count}: {facts.failure.message}")
    return _short_of_pods(facts, count)


def _short_of_pods(facts: Facts, count: str) -> Stated:
    """What keeps the missing pods, worst first."""
    if facts.misfit is not None:
        return Stated("False", Reason.FITS_NO_NODE, f"{count}: {facts.misfit}")
    unready = [pod for pod in facts.counting if not pod.ready and pod.trouble]
    failed = [pod for pod in unready if pod.over]
    waiting = [pod for pod in unready if not pod.scheduled and not pod.over]
    if failed:
        return Stated("False", Reason.PODS_FAIL, f"{count}: {_told(failed)}")
    if waiting:
        hint = _NO_SPARE if facts.rolling else ""
        return Stated("False", Reason.UNSCHEDULABLE, f"{count}: {_told(waiting)}{hint}")
    if unready:
        return Stated("False", Reason.PODS_FAIL, f"{count}: {_told(unready)}")
    return Stated("False", Reason.PODS_NOT_READY, count)


def _told(pods: list[PodState]) -> str:
    more = f" (and {len(pods) - 1} more)" if len(pods) > 1 else ""
    return f"{pods[0].name}: {pods[0].trouble}{more}"


def _compatible(facts: Facts) -> Stated:
    held = facts.plan.reading.held
    if held is not None:
        status: Truth = "False" if held.reason is Reason.MISMATCH else "Unknown"
        return Stated(status, held.reason, held.message)
    if facts.is_prefill:
        return _agreed_with(facts)
    if not facts.pairs:
        return Stated("True", Reason.ALONE, "the pool pairs with none")
    notes = "".join(f"; {note}" for note in facts.plan.reading.notes)
    name = facts.prefill.key.name if facts.prefill else ""
    return Stated("True", Reason.AGREES, f"agrees with PrefillPool {name}{notes}")


def _agreed_with(facts: Facts) -> Stated:
    """A PrefillPool is wrong only when everybody says so."""
    if not facts.decodes:
        return Stated("True", Reason.ALONE, "no DecodePool names this pool")
    against = [one for one in facts.decodes if _disagrees(one.reading.held)]
    names = ", ".join(one.key.name for one in against)
    if len(against) == len(facts.decodes):
        return Stated("False", Reason.MISMATCH, f"no DecodePool agrees with this pool: see {names}")
    but = f", but not {names}: see there" if against else ""
    return Stated("True", Reason.AGREES, f"DecodePools agree with this pool{but}")


def _disagrees(held: object) -> bool:
    return getattr(held, "reason", None) is Reason.MISMATCH


def _peer_ready(facts: Facts) -> Stated:
    if facts.is_prefill:
        if not facts.decodes:
            return Stated("False", Reason.PEER_MISSING, "no DecodePool names this pool")
    elif facts.prefill is None:
        held = facts.plan.reading.held
        return Stated("False", Reason.PEER_MISSING, held.message if held else "")
    elif facts.prefill.desired == 0:
        name = facts.prefill.key.name
        return Stated(
            "True", Reason.PEER_SCALED_TO_ZERO,
            f"PrefillPool {name} is scaled to zero: requests are served without a hand-off",
        )  # fmt: skip
    hashes = {pod.compat for pod in facts.ready} or {facts.plan.compat or ""}
    if any(pod.compat in hashes for pod in facts.peers):
        return Stated("True", Reason.PAIRED, "a pod of the other side with this KV layout is ready")
    other = "decode" if facts.is_prefill else "prefill"
    return Stated(
        "False", Reason.PEER_NOT_READY, f"no {other} pod with this pool's KV layout is ready"
    )


def _router_ready(facts: Facts) -> Stated:
    router = facts.router
    if router is None:
        return Stated(
            "Unknown", Reason.ROUTER_PENDING, f"endpoint {facts.endpoint} is not looked at yet"
        )
    return Stated("True" if router.ready else "False", router.reason, router.message)


def _progressing(facts: Facts) -> Stated:
    said = facts.progress
    updated = [pod for pod in facts.active if pod.revision == facts.plan.update]
    ready = len([pod for pod in updated if pod.ready])
    pods = f"{ready} of {facts.desired} pods are of revision {facts.plan.update} and ready"
    # While older pods keep PodsReady true, this is the only place that says why new ones do not.
    counting = [pod for pod in facts.counting if pod.revision == facts.plan.update]
    if failing := [pod for pod in counting if pod.trouble and not pod.ready]:
        pods += f": {_told(failing)}"
    held = facts.plan.reading.held or facts.plan.refused
    messages: dict[Reason, str] = {
        Reason.WAITING_FOR_PEER: f"keeps revision {facts.plan.current} until the whole set can"
        f" change: {', '.join(facts.plan.laggards)}",
        Reason.PAUSED: "spec.paused is true: pods keep their revision",
        Reason.HELD: f"keeps the pods it has: {held.message if held else ''}",
        Reason.COMPLETE: "the pods are as the spec says",
        Reason.PROGRESS_DEADLINE_EXCEEDED: f"no progress within rollout.progressDeadline: {pods}",
    }
    return Stated("True" if said in _UNDER_WAY else "False", said, messages.get(said, pods))


def _stalled(facts: Facts) -> Stated:
    """Whether it stays as it is until somebody does something."""
    held = facts.plan.reading.held
    if held is not None and held.reason in (Reason.INVALID_SPEC, Reason.MISMATCH):
        return Stated("True", held.reason, held.message)
    if facts.failure is not None:
        return Stated("True", facts.failure.reason, facts.failure.message)
    if facts.misfit is not None:
        return Stated("True", Reason.FITS_NO_NODE, facts.misfit)
    if facts.progress is Reason.PROGRESS_DEADLINE_EXCEEDED:
        return Stated("True", facts.progress, _short_of_pods(facts, _progressing(facts)[2]).message)
    return Stated("False", Reason.NOT_STALLED, "nothing keeps the pool from its spec for good")


def _draining(facts: Facts) -> Stated:
    late = sorted(pod.name for pod in facts.leaving if progress.stuck(pod, facts.now))
    if late:
        return Stated(
            "True", Reason.DRAIN_STUCK,
            f"past their grace period and still there: {', '.join(late)}; is their node?",
        )  # fmt: skip
    if facts.leaving:
        return Stated(
            "True", Reason.PODS_DRAIN, f"{len(facts.leaving)} pods finish their requests and leave"
        )
    return Stated("False", Reason.NOTHING_DRAINS, "no pod is leaving")


def _scaling_active(facts: Facts) -> Stated:
    pool = facts.plan.pool
    if pool is None or pool.spec.scaling is None:
        return Stated("False", Reason.NOT_CONFIGURED, "spec.scaling is not given")
    return Stated(
        "False", Reason.AT_MINIMUM,
        f"this release scales nothing by itself: {facts.desired} is scaling.minReplicas",
    )  # fmt: skip


def _transport_verified(facts: Facts) -> Stated:
    status = facts.resource.status
    before = facts.before(ConditionType.TRANSPORT_VERIFIED)
    known = before.get("status") == "True" and status.get("currentRevision") == facts.plan.current
    if facts.moved > 0 or known:
        return Stated(
            "True", Reason.BYTES_MOVED, "decode engines have read KV from prefill engines"
        )
    return Stated("Unknown", Reason.NOTHING_MOVED, "no KV has moved yet: no request was handed off")


def _update_available(facts: Facts) -> Stated:
    if facts.plan.newer_template:
        return Stated(
            "True", Reason.NEWER_TEMPLATE,
            "this operator makes the pods differently than they are pinned: set annotation"
            f" {labels.RESTARTED_AT} to the present time to adopt it",
        )  # fmt: skip
    return Stated("False", Reason.UP_TO_DATE, "the pods are as this operator makes them")
