"""The changes to a placed request's headers: where Envoy sends it, and the signed plan. Pure."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from tandem_contract import headers as wire
from tandem_contract.paths import Role
from tandem_contract.plan import CLOCK_SECONDS, Plan, Target, Timeouts
from tandem_contract.plan_signer import PlanSigner

from ..backends.pods import Pod
from ..choice.result import SchedulingResult
from ..choice.routing import Routing
from ..exchange import HeaderChanges, HttpRequest

PLAN_SECONDS: Final = 60.0 + CLOCK_SECONDS
"""Seconds for which a plan is valid: one minute in Envoy's queue, and the difference of clocks. The
request itself may take longer."""

_LENGTH: Final = "content-length"
_INTERNAL: Final = tuple(sorted(wire.INTERNAL))
_MODEL_REWRITES: Final = wire.MODEL_REWRITES


def header_changes(
    request: HttpRequest,
    result: SchedulingResult,
    request_id: str,
    signer: PlanSigner | None,
    now: float,
    *,
    routing: Routing,
    length: int | None = None,
) -> HeaderChanges:
    """The changes for `request`, which was placed as in `result` at `now` (Unix seconds) and goes
    on under `request_id`. `signer`: None sends no plan. `routing`: the configuration, of which the
    plan gets timeouts and limits. `length`: bytes of the body if it was changed."""
    headers = {}
    if length is not None and _LENGTH in request.headers:
        headers[_LENGTH] = str(length)
    if request.headers.get(wire.REQUEST_ID) != request_id:
        headers[wire.REQUEST_ID] = request_id
    headers[wire.DESTINATION_ENDPOINT] = destination = _addresses(result.decode)
    if result.alternate is not None:
        headers[wire.ALTERNATE_ENDPOINT] = result.alternate.address or ""
    if result.prefill:
        headers[wire.PREFILLER_HOST_PORT] = _addresses(result.prefill)
    if (rank := _common_rank(result.decode)) is not None:
        # For an engine without a sidecar in front. A sidecar drops it and obeys the plan.
        headers[wire.DATA_PARALLEL_RANK] = str(rank)
    if signer is not None:
        # Bound to this request id: the plan cannot be replayed for another request.
        headers[wire.PLAN] = signer.sign(_plan(result, request_id, now, routing), now)
    return HeaderChanges(
        tuple(headers.items()), _removals(tuple(headers), *_rewrite_headers(request)), destination
    )


def _rewrite_headers(request: HttpRequest) -> tuple[str, ...]:
    """Those of the request: most have none, and then none is removed."""
    return tuple([name for name in _MODEL_REWRITES if name in request.headers])


# There are as many as combinations of the headers above.
@lru_cache(256)
def _removals(names: tuple[str, ...], *others: str) -> tuple[str, ...]:
    """The internal headers that are not set: a client's copy of them is dropped; and `others`."""
    return (*(name for name in _INTERNAL if name not in names), *others)


def _addresses(pods: Sequence[Pod]) -> str:
    if len(pods) == 1:
        return pods[0].address or ""
    # Ranks of one backend share its address: each address once, in order.
    return ",".join(dict.fromkeys(pod.address for pod in pods if pod.address is not None))


def _common_rank(pods: Sequence[Pod]) -> int | None:
    """The rank that a request needs at whichever of `pods` Envoy sends it to; None: any."""
    if len(pods) == 1:
        return pods[0].rank
    ranks = {pod.rank for pod in pods}
    return ranks.pop() if len(ranks) == 1 else None


def _plan(result: SchedulingResult, request_id: str, now: float, routing: Routing) -> Plan:
    path, reason = result.decision
    serving = routing.serving
    alternates = result.decode[1:] if result.alternate is None else (result.alternate,)
    return Plan(
        path=path,
        reason=reason,
        decode=target_of(result.decode[0]),
        prefill=tuple(map(prefill_target_of, result.prefill)),
        cached_tokens=result.cached_tokens,
        request_id=request_id,
        expires=now + PLAN_SECONDS,
        timeouts=Timeouts(serving.prefill_timeout, serving.kv_transfer_timeout),
        alternates=tuple(map(target_of, alternates)),
        resume=routing.resume,
    )


def target_of(pod: Pod) -> Target:
    """A pod as a plan names it."""
    return Target(pod.name, pod.address or "", pod.rank)


def prefill_target_of(pod: Pod) -> Target:
    """A pod that may prefill, as a plan names it."""
    # A unified pod has a sidecar, which removes what clients may not send.
    return Target(pod.name, pod.address or "", pod.rank, pod.backend.role is Role.UNIFIED)
