"""The cheapest pods for a request, by the predicted cost that `cost` defines. Pure.

The functions ending in `_costs` compute for many pods the sums of the terms that `cost` names for
one: they run for every pod and request, so each is one pass over plain floats that are prepared in
a `FigureTable`. Costs that differ by less than `cost.TIE` are equal, and the choice among them is
drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from math import inf
from random import Random
from typing import Final, NamedTuple

from .cost import (
    TIE,
    PodFigures,
    RequestFigures,
    decode_terms,
    idle_prefill_seconds,
    is_transfer_too_long,
    preemption_seconds,
    unified_terms,
)
from .figure_table import ITL_HARM, FigureTable

PREFILL_CANDIDATES: Final = 3
"""Prefill pods named: the choice and two retries, as many as the sidecar makes by default."""


@dataclass(frozen=True, slots=True)
class Group:
    """Pods that can exchange KV, by row: each of `prefills` may prefill for each of `decodes`."""

    prefills: Sequence[int]
    decodes: Sequence[int]


class Candidates(NamedTuple):
    """The pods to choose from. `cached` and `alone` have one entry per row of `pods`."""

    pods: FigureTable
    cached: Sequence[int]
    """Tokens of the request's prompt that are on the pod, or will be when its turn comes."""
    alone: Sequence[int]
    """The same, if the pod computes the prompt. Less than `cached` where other requests' KV is
    still to be transferred to the pod."""
    decodes: Sequence[int]
    """Rows of the pods that may decode, and so serve the request alone."""
    groups: Sequence[Group] = ()
    """Which pairs may share the request; empty: none."""
    tail: int = 32
    """Uncached tokens up to which no request is split, whatever else it costs: the end of a prompt
    whose KV is there is not worth a hand-off."""


class Choice(NamedTuple):
    """The cheapest way to serve a request."""

    decodes: Sequence[int]
    """The pod to decode, then its alternates; empty: no pod may decode."""
    prefills: Sequence[int] = ()
    """The pod to prefill, then the retries; empty: the decode pod serves the request alone."""
    cost: float = inf
    """Seconds."""
    alternative: float = inf
    """Seconds of the cheapest way with the other answer to the question of a split; inf: none."""
    is_transfer_too_long: bool = False
    """Whether the transfer to the chosen pod ruled a split out."""


def prefill_costs(request: RequestFigures, pods: FigureTable, cached: Sequence[int]) -> list[float]:
    """The terms of `split(P, D)` that depend on P, for every pod as P."""
    now = request.now
    n, cached = _at_least_one(request, cached)
    return [
        (ends - now if ends > now else (now - ends) * late)
        + constant
        + (n - hit) * (per_token + per_pair * (n + hit))
        for (ends, late, constant, per_token, per_pair, _), hit in zip(
            pods.computing, cached, strict=True
        )
    ]


def unified_costs(
    request: RequestFigures,
    pods: FigureTable,
    cached: Sequence[int],
    which: Sequence[int],
    prefills: Sequence[float],
) -> list[float]:
    """`unified(D)` for each pod in `which`; `prefills`: what `prefill_costs` returns for the same
    tokens."""
    output, computing = request.output, pods.computing
    costs = [prefills[i] + computing[i][ITL_HARM] * output for i in which]
    return _with_preemption(costs, request, pods, cached, which)


def decode_costs(
    request: RequestFigures, pods: FigureTable, cached: Sequence[int], which: Sequence[int]
) -> list[float]:
    """The terms of `split(P, D)` that depend on D, and the hand-off, for each pod in `which`; inf
    where the transfer takes too long for a split."""
    output = request.output
    if pods.has_windows:
        # Transfers are not linear: term by term.
        return [
            inf
            if is_transfer_too_long(request, pods.pods[i], cached[i])
            else sum(decode_terms(request, pods.pods[i], cached[i]))
            for i in which
        ]
    n, cached = _at_least_one(request, cached)
    costs = [
        constant + (n - hit) * per_token + itl_harm * output
        if (n - hit) * (per_token - share_token - share_pair * (n + hit)) <= spare
        else inf
        for (constant, per_token, itl_harm, spare, share_token, share_pair), hit in zip(
            map(pods.receiving.__getitem__, which), map(cached.__getitem__, which), strict=True
        )
    ]
    return _with_preemption(costs, request, pods, cached, which)


def _at_least_one(request: RequestFigures, cached: Sequence[int]) -> tuple[int, Sequence[int]]:
    """Length of the prompt, at least 1, and `cached` such that one token is always computed."""
    n = max(1, request.prompt)
    if max(cached, default=0) >= n:
        cached = [min(hit, n - 1) for hit in cached]
    return n, cached


def _with_preemption(
    costs: list[float],
    request: RequestFigures,
    pods: FigureTable,
    cached: Sequence[int],
    which: Sequence[int],
) -> list[float]:
    """`costs` of the pods in `which`, with the term `preemption`."""
    most = max(1, request.prompt) + request.output
    # Seldom true: spares most requests the rest.
    if min(pods.free_tokens) < most:
        for at, i in enumerate(which):
            if pods.free_tokens[i] < most:
                costs[at] += preemption_seconds(request, pods.pods[i], cached[i])
    return costs


def choose(
    request: RequestFigures, candidates: Candidates, random: Random, *, count: int = 1
) -> Choice:
    """The cheapest way to serve `request`, with up to `count` decode pods and, for a split, 3
    prefill pods. O(P + D): the best prefill pod of a group is the same for all its decode pods."""
    pods, alone, which = candidates.pods, candidates.alone, candidates.decodes
    if not which:
        return Choice(())
    prefills = prefill_costs(request, pods, alone)
    costs = unified_costs(request, pods, alone, which, prefills)
    unified = min(costs)
    # A prompt that is cached on the pod which alone is the cheapest is not split.
    rest = request.prompt - alone[which[costs.index(unified)]]
    groups = () if unified < inf and rest <= candidates.tail else candidates.groups
    pairs = []
    for group in groups:
        decodes = decode_costs(request, pods, candidates.cached, group.decodes)
        pairs.append(
            _cheapest_pair(group, [prefills[i] for i in group.prefills], decodes, random, count)
        )
    split = min((pair.cost for pair in pairs), default=inf)
    if split < unified:
        best = random.choice([pair for pair in pairs if pair.cost <= split + TIE])
        return Choice(best.decodes, best.prefills, split, unified)
    if unified == inf:
        return Choice(())
    chosen = _cheapest(costs, which, count, random)
    is_too_long = any(chosen[0] in pair.too_long for pair in pairs)
    return Choice(chosen, (), unified, split, is_too_long)


def would_split(request: RequestFigures, pod: PodFigures, cached: int) -> bool:
    """Whether a split would be cheaper than `pod` alone, were there an idle pod to prefill that is
    as fast as `pod`."""
    if is_transfer_too_long(request, pod, cached):
        return False
    prefill = idle_prefill_seconds(request, pod, cached)
    split = prefill + sum(decode_terms(request, pod, cached))
    return split < sum(unified_terms(request, pod, cached))


class _Pair(NamedTuple):
    """The cheapest pair of a group."""

    cost: float = inf
    decodes: Sequence[int] = ()
    prefills: Sequence[int] = ()
    too_long: Sequence[int] = ()
    """Decode pods to which the transfer would take too long."""


def _cheapest_pair(
    group: Group, prefills: list[float], decodes: list[float], random: Random, count: int
) -> _Pair:
    """`prefills`, `decodes`: the costs of the group's pods."""
    too_long: Sequence[int] = ()
    if inf in decodes:
        too_long = [i for i, cost in zip(group.decodes, decodes, strict=True) if cost == inf]
    first = _cheapest(decodes, group.decodes, count, random)
    if not first or not prefills:
        return _Pair(too_long=too_long)
    ranking = _cheapest(prefills, group.prefills, PREFILL_CANDIDATES, random)
    return _Pair(min(prefills) + min(decodes), first, ranking, too_long)


def _cheapest(
    costs: Sequence[float], which: Sequence[int], count: int, random: Random
) -> list[int]:
    """Up to `count` of the pods `which`, the cheapest first; the first is drawn among equals."""
    if not costs or (least := min(costs)) == inf:
        return []
    most = least + TIE
    equal = [i for cost, i in zip(costs, which, strict=True) if cost <= most]
    first = equal[0] if len(equal) == 1 else random.choice(equal)
    if count == 1:
        return [first]
    if len(equal) >= count:
        # Among equals any order will do.
        others = equal
    else:
        others = [i for cost, i in nsmallest(count, zip(costs, which, strict=True)) if cost < inf]
    return [first, *(i for i in others if i != first)][:count]
