"""Which pools of a set may roll to a new revision, and what their older pods wait for. Pure.

A prefill pod and a decode pod can hand KV over only when their compat hashes are equal. So a set
moves from one hash to the next as a whole:

- No pool starts before every pool that shares its present hash can move too (`blocked_by`).
- No older pod is removed before every moving pool has an available pod of the new hash (`gate`).
- The last ready prefill pod of an older hash stays while a decode pod of that hash is left.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..observed import PodState
from .rollout import OPEN, Gate, index_of


@dataclass(frozen=True)
class Member:
    """The state of one pool of a set, as input of the gate."""

    name: str
    """For messages: `DecodePool d`."""
    prefill: bool
    desired: int
    pods: tuple[PodState, ...]
    """Pods that fill a place among the replicas (`pod_plan.counting`)."""
    serving: tuple[PodState, ...]
    """All pods that may still serve requests, draining ones included."""
    target: str | None
    """Compat hash to move to; None for a pool that keeps its revision."""
    hold_reason: str = ""
    """With `target` None: why the pool keeps its revision."""

    @property
    def hashes(self) -> frozenset[str]:
        return frozenset(pod.compat for pod in self.pods)


def blocked_by(member: Member, members: Sequence[Member]) -> tuple[str, ...]:
    """Pools for which `member` waits: they keep a hash that `member` shares and would leave.

    A pool that shares no hash with `member` does not block it, whatever is wrong with that pool.
    """
    # Hashes of its present pods that it will have no pods of after the rollout.
    abandoned = member.hashes - {member.target}
    if member.target is None or not abandoned:
        return ()
    return tuple(
        f"{other.name} {other.hold_reason}"
        for other in members
        if other is not member
        and other.target is None
        and other.hashes & abandoned
        and (other.prefill or member.prefill or _share_prefill(other, member, members))
    )


def gate(member: Member, members: Sequence[Member]) -> Gate:
    """When the older pods of a member that moves may be removed."""
    target = member.target
    if target is None or not member.hashes - {target}:
        return OPEN
    # A pool scaled to zero never has a ready pod; waiting for it would block the others for good.
    moving = [other for other in members if other.target == target and other.desired > 0]
    # A pool that moves alone has no peer to wait for.
    if len(moving) < 2:
        return OPEN
    if not all(any(p.available and p.compat == target for p in other.pods) for other in moving):
        return Gate(is_open=False)
    # Decode pods of an older hash need prefill pods of it, but not the other way round.
    if not member.prefill or member.desired == 0:
        return OPEN
    return Gate(keep=_last_of_each_hash(member, members))


def _last_of_each_hash(prefill: Member, members: Sequence[Member]) -> frozenset[str]:
    """One ready older prefill pod for each hash that a decode pod still has."""
    needed = {pod.compat for other in members if not other.prefill for pod in other.serving}
    # Sorted by falling index, so that the pod with the lowest index remains in the mapping.
    last: Mapping[str, PodState] = {
        pod.compat: pod
        for pod in sorted(prefill.pods, key=index_of, reverse=True)
        if pod.ready and pod.compat in needed - {prefill.target}
    }
    return frozenset(pod.name for pod in last.values())


def _share_prefill(first: Member, second: Member, members: Sequence[Member]) -> bool:
    """Whether two DecodePools use prefill pods of the same hash."""
    return any(other.prefill and other.hashes & first.hashes & second.hashes for other in members)
