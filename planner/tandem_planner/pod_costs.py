"""The costs that `cost` defines, for many pods at once. Pure.

Each function computes for many pods the sum of the terms that `cost` names for one: they run for
every pod and request, so each is one pass over plain floats that are prepared in a `FigureTable`.
"""

from collections.abc import Sequence
from math import inf

from tandem_contract.fabric_classes import FabricClass

from .cost import RequestFigures, preemption_seconds
from .figure_table import ITL_HARM, FigureTable, Receiving
from .kv_size import KvSize
from .objective import in_time, too_late


def prefill_costs(request: RequestFigures, pods: FigureTable, cached: list[int]) -> list[float]:
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
    costs: list[float], request: RequestFigures, pods: FigureTable, cached: list[int]
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
    cached: list[int],
    which: Sequence[int],
    prefills: list[float],
) -> list[float]:
    """`unified(D)` for each pod in `which`; `prefills`: what `prefill_costs` returns for the same
    tokens."""
    decoded, computing = request.decoded, pods.computing
    costs = [prefills[i] + computing[i][ITL_HARM] * decoded for i in which]
    return _with_preemption(costs, request, pods, cached, which, is_loading=True)


def decode_costs(
    request: RequestFigures,
    pods: FigureTable,
    cached: list[int],
    which: Sequence[int],
    fabric: FabricClass = FabricClass.ELSEWHERE,
    *,
    ready: float = inf,
) -> list[float]:
    """The terms of `split(P, D)` that depend on D, and the hand-off, for each pod in `which` and
    pairs of the class `fabric`; inf where the transfer takes too long for a split. `ready`: as in
    `cost.decode_terms`."""
    n, cached = at_least_one(request, cached)
    decoded, handoff, any_length = request.decoded, request.handoff, request.is_any_transfer_short
    now, twice = request.now, 2.0 * n
    receiving, queues = pods.receiving[fabric], pods.queues
    has_windows, has_queues = pods.has_windows, ready < inf
    costs: list[float] = []
    for row in which:
        constant, per_token, itl_harm, spare, share_token, share_pair = receiving[row]
        left = float(n - cached[row])
        transfer = per_token * (linear_tokens(pods.pods[row].kv, left) if has_windows else left)
        cost = inf
        if any_length or transfer <= spare + left * (share_token + share_pair * (twice - left)):
            cost = handoff + constant + transfer + itl_harm * decoded
            if has_queues:
                # What the pod's own prefills delay the transfer.
                ends, late, queued = queues[row]
                delay = queued + (ends - now if ends > now else (now - ends) * late) - ready
                if delay > 0.0:
                    cost += delay
        costs.append(cost)
    return _with_preemption(costs, request, pods, cached, which)


def transfer_costs(
    request: RequestFigures, pods: FigureTable, cached: list[int], row: int
) -> list[float]:
    """What of `decode_costs` the class of a pair changes, for one pod and per class; inf where the
    transfer takes too long."""
    n = max(1, request.prompt)
    left = float(n - min(cached[row], n - 1))
    size, any_length = linear_tokens(pods.pods[row].kv, left), request.is_any_transfer_short
    return [
        received_seconds(of_class[row], left, size, 2.0 * n, any_length)
        for of_class in pods.receiving
    ]


def received_seconds(
    pod: Receiving, left: float, size: float, twice: float, any_length: bool
) -> float:
    """What of `decode_costs` the class of a pair changes; inf where the transfer takes too long.
    `left`: tokens to receive, `size`: the same, as `linear_tokens`; `twice`: two times the prompt;
    `any_length`: as `RequestFigures.is_any_transfer_short`."""
    constant, per_token, _, spare, share_token, share_pair = pod
    transfer = size * per_token
    if any_length or transfer <= spare + left * (share_token + share_pair * (twice - left)):
        return constant + transfer
    return inf


def linear_tokens(kv: KvSize, tokens: float) -> float:
    """Tokens whose KV would have the size of that of `tokens`, were there no windows."""
    return tokens if kv.long is None else kv.bytes(tokens) / kv.short


def at_least_one(request: RequestFigures, cached: list[int]) -> tuple[int, list[int]]:
    """Length of the prompt, at least 1, and `cached` such that one token is always computed."""
    n = max(1, request.prompt)
    for hit in cached:
        if hit >= n:
            return n, [min(hit, n - 1) for hit in cached]
    return n, cached


def least_of(costs: Sequence[float]) -> float:
    """The least of `costs`; inf if there are none. `min` compares objects, which compiled code need
    not."""
    least = inf
    for cost in costs:
        if cost < least:  # noqa: PLR1730 - a call for each cost, where it is not compiled
            least = cost
    return least


def _with_preemption(
    costs: list[float],
    request: RequestFigures,
    pods: FigureTable,
    cached: list[int],
    which: Sequence[int],
    *,
    is_loading: bool = False,
) -> list[float]:
    """`costs` of the pods in `which`, with the term `preemption`. `is_loading`: `cached` has what
    the pods load from storage."""
    most = max(1, request.prompt) + request.output
    # Seldom true: spares most requests the rest.
    if least_of(pods.free_tokens) < most:
        for at, i in enumerate(which):
            if pods.free_tokens[i] < most:
                pod = pods.pods[i]
                hit = max(0, cached[i] - pod.loaded) if is_loading else cached[i]
                costs[at] += preemption_seconds(request, pod, hit)
    return costs
