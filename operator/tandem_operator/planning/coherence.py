"""Which pools of a set may move, and what their older pods wait for. Pure.

Pods pair within one compat hash only. So a set moves from one to the next as a whole: nobody
starts before everybody can, no older pod leaves before every pool has a ready pod of the new hash,
and the last older prefill pod stays while an older decode pod is there to need it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..observed import PodState
from .rollout import OPEN, Gate, index_of


@dataclass(frozen=True)
class Member:
    """What counts of one pool of a set."""

    name: str
    """For people: `DecodePool d`."""
    prefill: bool
    desired: int
    pods: tuple[PodState, ...]
    """Those that count."""
    serving: tuple[PodState, ...]
    """Also those that still finish requests."""
    target: str | None
    """Compat hash to come to; None for a pool that keeps what it has."""
    why: str = ""
    """With `target` None: why it keeps it."""

    @property
    def hashes(self) -> frozenset[str]:
        return frozenset(pod.compat for pod in self.pods)


def laggards(member: Member, members: Sequence[Member]) -> tuple[str, ...]:
    """Pools that `member` waits for: they stay at a hash that it shares with them and would leave.

    A pool that pairs with nobody now holds nobody back, however wrong it is.
    """
    leaving = member.hashes - {member.target}
    if member.target is None or not leaving:
        return ()
    return tuple(
        f"{one.name} {one.why}"
        for one in members
        if one is not member
        and one.target is None
        and one.hashes & leaving
        and (one.prefill or member.prefill or _meet(one, member, members))
    )


def gate(member: Member, members: Sequence[Member]) -> Gate:
    """When the older pods of a member that moves may leave."""
    target = member.target
    if target is None or not member.hashes - {target}:
        return OPEN
    movers = [one for one in members if one.target == target and one.desired > 0]
    if len(movers) < 2:
        return OPEN
    if not all(any(p.ready and p.compat == target for p in one.pods) for one in movers):
        return Gate(is_open=False)
    if not member.prefill or member.desired == 0:
        return OPEN
    return Gate(keep=_last_of_each_hash(member, members))


def _last_of_each_hash(prefill: Member, members: Sequence[Member]) -> frozenset[str]:
    """One ready older prefill pod for each hash that a decode pod still has."""
    needed = {pod.compat for one in members if not one.prefill for pod in one.serving}
    kept: Mapping[str, PodState] = {
        pod.compat: pod
        for pod in sorted(prefill.pods, key=index_of, reverse=True)
        if pod.ready and pod.compat in needed - {prefill.target}
    }
    return frozenset(pod.name for pod in kept.values())


def _meet(one: Member, other: Member, members: Sequence[Member]) -> bool:
    """Whether two DecodePools share the prefill pods that would leave."""
    return any(third.prefill and third.hashes & one.hashes & other.hashes for third in members)
