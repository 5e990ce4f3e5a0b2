"""The cheapest pods for a request, by the predicted cost that `cost` defines. Pure.

The functions ending in `_costs` compute for many pods the sums of the terms that `cost` names for
one: they run for every pod and request, so each is one pass over plain floats. Costs that differ by
less than `cost.TIE` are equal, and the choice among them is drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from math import inf
from random import Random
from typing import Final

from .cost import (
    HANDOFF_SECONDS,
    MAX_TRANSFER_SHARE,
    TIE,
    PodFigures,
    RequestFigures,
    idle_prefill_seconds,
    preemption_seconds,
)


@dataclass(frozen=True, slots=True)
class Group:
    """Pods that can exchange KV, by index: each of `prefills` may prefill for each of `decodes`."""

    prefills: Sequence[int]
    decodes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The pods to choose from. All sequences have one entry per pod."""

    pods: Sequence[PodFigures]
    cached: Sequence[int]
    """Tokens of the request's prompt that are on the pod, or will be when its turn comes."""
    alone: Sequence[int]
    """The same, if the pod serves the request alone. Less than `cached` where other requests' KV is
    still to be transferred to the pod."""
    decodes: Sequence[int]
    """Indices of the pods that may decode, and so serve the request alone."""
    groups: Sequence[Group] = ()
    """Which pairs may share the request; empty: none."""
    extra: Mapping[int, float] | None = None
    """Index of a pod that may decode → seconds that this very request costs there in addition, such
    as loading an adapter; inf rules it out."""
    tail: int = 32
    """Uncached tokens up to which no request is split, whatever else it costs: the end of a prompt
    whose KV is there is not worth a hand-off."""


@dataclass(frozen=True, slots=True)
class Choice:
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


def unified_costs(
    request: RequestFigures, pods: Sequence[PodFigures], cached: Sequence[int], which: Sequence[int]
) -> list[float]:
    """`unified(D)` of each pod in `which`."""
    prompt, output, now = request
    costs = []
    for i in which:
        (ends, late, cost, fixed, per_token, per_pair, stall, harm, free, standing, *_) = pods[i]
        hit = cached[i]
        uncached = prompt - hit if hit < prompt else 1
        if late:
            left = ends - now
            cost += left if left > 0.0 else -left * late
        prefill = fixed + uncached * (per_token + per_pair * (uncached + 2 * hit))
        cost += prefill * (1.0 + stall) + harm * output + standing
        if uncached + output > free:
            cost += preemption_seconds(request, pods[i], uncached)
        costs.append(cost)
    return costs


def prefill_costs(
    request: RequestFigures, pods: Sequence[PodFigures], cached: Sequence[int], which: Sequence[int]
) -> list[float]:
    """The terms of `split(P, D)` that depend on P, for each pod in `which`."""
    prompt, _, now = request
    costs = []
    for i in which:
        (ends, late, cost, fixed, per_token, per_pair, stall, _, _, standing, *_) = pods[i]
        hit = cached[i]
        uncached = prompt - hit if hit < prompt else 1
        if late:
            left = ends - now
            cost += left if left > 0.0 else -left * late
        prefill = fixed + uncached * (per_token + per_pair * (uncached + 2 * hit))
        costs.append(cost + prefill * (1.0 + stall) + standing)
    return costs


def decode_costs(
    request: RequestFigures, pods: Sequence[PodFigures], cached: Sequence[int], which: Sequence[int]
) -> list[float]:
    """The terms of `split(P, D)` that depend on D, and the hand-off, for each pod in `which`; inf
    where the transfer takes too long for a split."""
    prompt, output, _ = request
    costs = []
    for i in which:
        pod = pods[i]
        (_, _, _, fixed, per_token, per_pair, _, harm, free, standing, latency, per_byte, kv) = pod
        hit = cached[i]
        uncached = prompt - hit if hit < prompt else 1
        size = kv.short * uncached if kv.long is None else kv.bytes(uncached)
        transfer = latency + per_byte * size
        prefill = fixed + uncached * (per_token + per_pair * (uncached + 2 * hit))
        if transfer > MAX_TRANSFER_SHARE * prefill:
            costs.append(inf)
            continue
        cost = transfer + HANDOFF_SECONDS + harm * output + standing
        if uncached + output > free:
            cost += preemption_seconds(request, pod, uncached)
        costs.append(cost)
    return costs


def choose(
    request: RequestFigures, candidates: Candidates, random: Random, *, count: int = 1
) -> Choice:
    """The cheapest way to serve `request`, with up to `count` decode pods and, for a split, 3
    prefill pods. O(P + D): the best prefill pod of a group is the same for all its decode pods."""
    extra = candidates.extra
    costs = unified_costs(request, candidates.pods, candidates.alone, candidates.decodes)
    if extra:
        costs = [c + extra.get(i, 0.0) for c, i in zip(costs, candidates.decodes, strict=True)]
    unified = min(costs, default=inf)
    groups = () if _is_cached(request, candidates, costs, unified) else candidates.groups
    pairs = [_cheapest_pair(request, candidates, group, random, count) for group in groups]
    split = min((pair.cost for pair in pairs), default=inf)
    if split < unified:
        best = random.choice([pair for pair in pairs if pair.cost <= split + TIE])
        return Choice(best.decodes, best.prefills, split, unified)
    if unified == inf:
        return Choice(())
    decodes = _cheapest(costs, candidates.decodes, count, random)
    is_too_long = any(decodes[0] in pair.too_long for pair in pairs)
    return Choice(decodes, (), unified, split, is_too_long)


def _is_cached(
    request: RequestFigures, candidates: Candidates, costs: Sequence[float], least: float
) -> bool:
    """Whether the pod that alone is the cheapest has all of the prompt but its tail."""
    return least < inf and (
        request.prompt - candidates.alone[candidates.decodes[costs.index(least)]] <= candidates.tail
    )


def would_split(request: RequestFigures, pod: PodFigures, cached: int) -> bool:
    """Whether a split would be cheaper than `pod` alone, were there an idle pod to prefill that is
    as fast as `pod`."""
    prefill = idle_prefill_seconds(request, pod, cached)
    split = prefill + decode_costs(request, [pod], [cached], [0])[0]
    return split < unified_costs(request, [pod], [cached], [0])[0]


@dataclass(frozen=True, slots=True)
class _Pair:
    """The cheapest pair of a group."""

    cost: float = inf
    decodes: Sequence[int] = ()
    prefills: Sequence[int] = ()
    too_long: frozenset[int] = frozenset()
    """Decode pods to which the transfer would take too long."""


_PREFILLS: Final = 3
"""Prefill pods named: the choice and two retries, as many as a sidecar makes by default."""


def _cheapest_pair(
    request: RequestFigures, candidates: Candidates, group: Group, random: Random, count: int
) -> _Pair:
    pods, cached, extra = candidates.pods, candidates.cached, candidates.extra
    costs = prefill_costs(request, pods, cached, group.prefills)
    prefills = _cheapest(costs, group.prefills, _PREFILLS, random)
    if not prefills:
        return _Pair()
    decode = decode_costs(request, pods, cached, group.decodes)
    too_long = frozenset(i for i, c in zip(group.decodes, decode, strict=True) if c == inf)
    if extra:
        decode = [c + extra.get(i, 0.0) for c, i in zip(decode, group.decodes, strict=True)]
    if (least := min(decode, default=inf)) == inf:
        return _Pair(too_long=too_long)
    decodes = _cheapest(decode, group.decodes, count, random)
    return _Pair(min(costs) + least, decodes, prefills, too_long)


def _cheapest(
    costs: Sequence[float], which: Sequence[int], count: int, random: Random
) -> list[int]:
    """Up to `count` of the pods `which`, the cheapest first; the first is drawn among equals."""
    if not costs or (least := min(costs)) == inf:
        return []
    equal = [i for cost, i in zip(costs, which, strict=True) if cost <= least + TIE]
    first = equal[0] if len(equal) == 1 else random.choice(equal)
    if count == 1:
        return [first]
    others = nsmallest(count, zip(costs, which, strict=True))
    return [first, *(i for cost, i in others if i != first and cost < inf)][:count]
