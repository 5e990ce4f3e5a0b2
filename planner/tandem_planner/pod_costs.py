"""The costs that `cost` defines, for many pods at once. Pure.

Each function computes for many pods the sum of the terms that `cost` names for one: they run for
every pod and request, so each is one pass over plain floats that are prepared in a `FigureTable`.
"""

from collections.abc import Sequence
from math import inf

from tandem_contract.fabric_classes import FabricClass

from .cost import RequestFigures, preemption_seconds
from .figure_table import ITL_HARM, FigureTable
from .kv_size import KvSize
from .objective import in_time, too_late


def prefill_costs(request: RequestFigures, pods: FigureTable, cached: Sequence[int]) -> list[float]:
    """The terms of `split(P, D)` that depend on P, for every pod as P."""
    now = request.now
    n, cached = at_least_one(request, cached)
    return [
        (ends - now if ends > now else (now - ends) * late)
        + constant
        + (n - hit) * (per_token + per_pair * (n + hit))
        # Without `strict`, here and below, `zip` is compiled to a loop over an index.
        for (ends, late, constant, per_token, per_pair, _), hit in zip(  # noqa: B905
            pods.computing, cached
        )
    ]


def add_misses(
    costs: list[float], request: RequestFigures, pods: FigureTable, cached: Sequence[int]
) -> None:
    """Add the term `miss` to what `prefill_costs` returns."""
    now, most, ttft = request.now, request.objective.miss, request.objective.ttft
    n, cached = at_least_one(request, cached)
    # `objective.missed` without its calls, which would take longer than all else here.
    begin, end = in_time(ttft), too_late(ttft)
    slope = most / (end - begin)
    for row, (ends, late, waiting, per_token, per_pair) in enumerate(pods.first_tokens):
        hit = cached[row]
        first = (
            (ends - now if ends > now else (now - ends) * late)
            + waiting
            + (n - hit) * (per_token + per_pair * (n + hit))
        )
        if first > begin:
            costs[row] += most if first >= end else (first - begin) * slope


def unified_costs(
    request: RequestFigures,
    pods: FigureTable,
    cached: Sequence[int],
    which: Sequence[int],
    prefills: Sequence[float],
) -> list[float]:
    """`unified(D)` for each pod in `which`; `prefills`: what `prefill_costs` returns for the same
    tokens."""
    decoded, computing = request.decoded, pods.computing
    costs = [prefills[i] + computing[i][ITL_HARM] * decoded for i in which]
    return _with_preemption(costs, request, pods, cached, which, is_loading=True)


def decode_costs(
    request: RequestFigures,
    pods: FigureTable,
    cached: Sequence[int],
    which: Sequence[int],
    fabric: FabricClass = FabricClass.ELSEWHERE,
    *,
    ready: float = inf,
) -> list[float]:
    """The terms of `split(P, D)` that depend on D, and the hand-off, for each pod in `which` and
    pairs of the class `fabric`; inf where the transfer takes too long for a split. `ready`: as in
    `cost.decode_terms`."""
    decoded, handoff, any_length = request.decoded, request.handoff, request.is_any_transfer_short
    n, cached = at_least_one(request, cached)
    sizes: Sequence[float]
    sizes = uncached = [n - cached[i] for i in which]
    if pods.has_windows:
        # The cost is linear in tokens, but for the KV of long prompts.
        sizes = [linear_tokens(pods.pods[i].kv, n - cached[i]) for i in which]
    receiving = pods.receiving[fabric]
    costs = [
        handoff + constant + size * per_token + itl_harm * decoded
        if any_length
        or size * per_token <= spare + left * (share_token + share_pair * (2 * n - left))
        else inf
        for left, size, (constant, per_token, itl_harm, spare, share_token, share_pair) in zip(  # noqa: B905
            uncached, sizes, [receiving[i] for i in which]
        )
    ]
    costs = _with_queues(costs, request, pods, which, ready)
    return _with_preemption(costs, request, pods, cached, which)


def transfer_costs(
    request: RequestFigures, pods: FigureTable, cached: Sequence[int], row: int
) -> list[float]:
    """What of `decode_costs` the class of a pair changes, for one pod and per class; inf where the
    transfer takes too long."""
    n = max(1, request.prompt)
    hit = min(cached[row], n - 1)
    size, any_length = linear_tokens(pods.pods[row].kv, n - hit), request.is_any_transfer_short
    return [
        constant + size * per_token
        if any_length
        or size * per_token <= spare + (n - hit) * (share_token + share_pair * (n + hit))
        else inf
        for constant, per_token, _, spare, share_token, share_pair in (
            of_class[row] for of_class in pods.receiving
        )
    ]


def linear_tokens(kv: KvSize, tokens: float) -> float:
    """Tokens whose KV would have the size of that of `tokens`, were there no windows."""
    return tokens if kv.long is None else kv.bytes(tokens) / kv.short


def at_least_one(request: RequestFigures, cached: Sequence[int]) -> tuple[int, Sequence[int]]:
    """Length of the prompt, at least 1, and `cached` such that one token is always computed."""
    n = max(1, request.prompt)
    if max(cached, default=0) >= n:
        cached = [min(hit, n - 1) for hit in cached]
    return n, cached


def _with_queues(
    costs: list[float],
    request: RequestFigures,
    pods: FigureTable,
    which: Sequence[int],
    ready: float,
) -> list[float]:
    """`costs` of the pods in `which`, with what their own prefills delay the transfer."""
    if ready == inf:
        return costs
    now, queues = request.now, pods.queues
    return [
        cost + delay
        if (delay := queued + (ends - now if ends > now else (now - ends) * late) - ready) > 0.0
        else cost
        for cost, (ends, late, queued) in zip(costs, [queues[i] for i in which])  # noqa: B905
    ]


def _with_preemption(
    costs: list[float],
    request: RequestFigures,
    pods: FigureTable,
    cached: Sequence[int],
    which: Sequence[int],
    *,
    is_loading: bool = False,
) -> list[float]:
    """`costs` of the pods in `which`, with the term `preemption`. `is_loading`: `cached` has what
    the pods load from storage."""
    most = max(1, request.prompt) + request.output
    # Seldom true: spares most requests the rest.
    if min(pods.free_tokens) < most:
        for at, i in enumerate(which):
            if pods.free_tokens[i] < most:
                pod = pods.pods[i]
                hit = max(0, cached[i] - pod.loaded) if is_loading else cached[i]
                costs[at] += preemption_seconds(request, pod, hit)
    return costs
