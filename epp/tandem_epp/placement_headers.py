"""What a placement says in headers: addresses, rank and plan. Pure."""

from collections.abc import Sequence
from typing import Final

from tandem_contract.plan import Plan, Target

from .backends.pods import Pod
from .scheduling.result import SchedulingResult

PLAN_SECONDS: Final = 120.0
"""Seconds for which a plan is valid: one minute in Envoy's queue, and one by which the clocks of
two nodes may differ. The request itself may take longer."""


def addresses(pods: Sequence[Pod]) -> str:
    """The value of the destination header, and of the header that names prefill pods."""
    # Ranks of one backend share its address: each address once, in order.
    return ",".join(dict.fromkeys(pod.address for pod in pods if pod.address is not None))


def common_rank(pods: Sequence[Pod]) -> int | None:
    """The rank that a request needs at whichever of `pods` Envoy sends it to; None: any."""
    ranks = {pod.rank for pod in pods}
    return ranks.pop() if len(ranks) == 1 else None


def plan_of(result: SchedulingResult, request_id: str, now: float) -> Plan:
    """The plan of a request that is placed at `now` (Unix seconds)."""

    def target(pod: Pod) -> Target:
        return Target(pod.name, pod.address or "", pod.rank)

    return Plan(
        path=result.decision.path,
        reason=result.decision.reason,
        decode=target(result.decode[0]),
        prefill=tuple(map(target, result.prefill)),
        cached_tokens=result.cached_tokens,
        request_id=request_id,
        expires=now + PLAN_SECONDS,
    )
