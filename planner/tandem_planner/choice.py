"""The cheapest pods for a request, by the predicted cost that `cost` defines. Pure.

Costs that differ by no more than `cost.TIE`, or `cost.TIE_SHARE` of the least, are equal, and the
choice among them is drawn: first the decode pod, by the cost of its cheapest pair, then the prefill
pod, by the cost of its pair with it.
"""

from collections.abc import Iterable, Sequence
from math import inf
from random import Random
from typing import Final, NamedTuple

from tandem_contract.fabric_classes import FabricClass

from .cost import (
    PodFigures,
    RequestFigures,
    decode_terms,
    first_token_seconds,
    idle_prefill_seconds,
    is_transfer_too_long,
    tie_seconds,
    unified_terms,
)
from .figure_table import FigureTable
from .groups import Group, Neighbours
from .pair_search import cheapest_pairs
from .pod_costs import (
    add_misses,
    decode_costs,
    least_of,
    prefill_costs,
    transfer_costs,
    unified_costs,
)

PREFILL_CANDIDATES: Final = 3
"""Prefill pods named: the choice and two retries, as many as the sidecar makes by default."""


class Candidates:
    """The pods to choose from. `cached` and `cached_if_computing` have one
    entry per row of `pods`."""

    __slots__ = ("cached", "cached_if_computing", "decodes", "groups", "max_unsplit_tokens", "pods")

    def __init__(  # noqa: PLR0917 - what there is, then the rules
        self,
        pods: FigureTable,
        cached: list[int],
        cached_if_computing: list[int],
        decodes: Sequence[int],
        groups: Sequence[Group] = (),
        max_unsplit_tokens: int = 32,
    ) -> None:
        self.pods = pods
        self.cached = cached
        """Tokens of the request's prompt that are on the pod, or will be when its turn comes."""
        self.cached_if_computing = cached_if_computing
        """The same, if the pod computes the prompt. Less than `cached` where other requests' KV is
        still to be transferred to the pod; more where the pod loads it from storage, which takes
        the seconds `load` of its figures."""
        self.decodes = decodes
        """Rows of the pods that may decode, and so serve the request alone."""
        self.groups = groups
        """Which pairs may share the request; empty: none."""
        self.max_unsplit_tokens = max_unsplit_tokens
        """Uncached tokens up to which no request is split, whatever else it costs: the end of a
        prompt whose KV is there is not worth a hand-off."""


class Choice:
    """The cheapest way to serve a request."""

    __slots__ = (
        "cost",
        "decodes",
        "fabric",
        "is_transfer_too_long",
        "other_path_cost",
        "prefills",
        "ready",
    )

    def __init__(  # noqa: PLR0917 - what was chosen, then what is known of it
        self,
        decodes: Sequence[int],
        prefills: Sequence[int] = (),
        cost: float = inf,
        other_path_cost: float = inf,
        is_transfer_too_long: bool = False,
        fabric: FabricClass = FabricClass.ELSEWHERE,
        ready: float = inf,
    ) -> None:
        self.decodes = decodes
        """The pod to decode, then its alternates; empty: no pod may decode."""
        self.prefills = prefills
        """The pod to prefill, then the retries; empty: the decode pod serves the request alone."""
        self.cost = cost
        """Seconds."""
        self.other_path_cost = other_path_cost
        """Seconds of the cheapest way with the other answer to the question of a split; inf:
        none."""
        self.is_transfer_too_long = is_transfer_too_long
        """Whether the transfer to the chosen pod rules a split out that would be cheaper without
        it."""
        self.fabric = fabric
        """The class of the chosen pair; of no meaning without one."""
        self.ready = ready
        """Seconds of the cheapest prefill pod; inf: there is none."""


def choose(
    request: RequestFigures,
    candidates: Candidates,
    random: Random,
    *,
    count: int = 1,
    alone: Sequence[int] | None = None,
) -> Choice:
    """The cheapest way to serve `request`, with up to `count` decode pods and, for a split, 3
    prefill pods. O(P + D): the best prefill pod of a group is the same for all its decode pods that
    are equally close to it.

    `alone`: those of the pods that may decode which may serve the request alone, as long as there
    is another way; None: all of them.
    """
    if not candidates.decodes:
        return Choice(())
    if alone is not None:
        choice = _choose(request, candidates, alone, random, count)
        if choice.decodes:
            return choice
    return _choose(request, candidates, candidates.decodes, random, count)


def _choose(
    request: RequestFigures,
    candidates: Candidates,
    which: Sequence[int],
    random: Random,
    count: int,
) -> Choice:
    """The cheapest pair, or the cheapest of the pods `which` alone."""
    pods, cached, groups = candidates.pods, candidates.cached_if_computing, candidates.groups
    prefills = prefill_costs(request, pods, cached)
    if request.objective.miss:
        add_misses(prefills, request, pods, cached)
    costs = unified_costs(request, pods, cached, which, prefills)
    unified = least_of(costs)
    if unified < inf:
        # A prompt that is cached on the pod which alone is the cheapest is not split. Nor is one
        # that this pod loads from storage, unless a prefill pod loads nothing.
        row = which[costs.index(unified)]
        is_cached = request.prompt - cached[row] <= candidates.max_unsplit_tokens
        if is_cached and not (pods.pods[row].load and _saves_load(candidates)):
            groups = ()
    if not groups:
        if unified == inf:
            return Choice(())
        return Choice(_cheapest(costs, which, count, random, tie_seconds(unified)), (), unified)
    of_groups = [[prefills[i] for i in group.prefills] for group in groups]
    ready = _ready(request, candidates, groups, of_groups)
    pairs = [
        _cheapest_pair(request, candidates, group, of_group, ready, random, count)
        for group, of_group in zip(groups, of_groups, strict=True)
    ]
    split = min((pair.cost for pair in pairs), default=inf)
    if split < unified:
        best = random.choice([pair for pair in pairs if pair.cost <= split + tie_seconds(split)])
        return Choice(best.decodes, best.prefills, split, unified, fabric=best.fabric, ready=ready)
    if unified == inf:
        return Choice(())
    chosen = _cheapest(costs, which, count, random, tie_seconds(unified))
    is_too_long = _is_split_ruled_out(request, candidates, groups, of_groups, chosen[0], unified)
    return Choice(chosen, (), unified, split, is_too_long, ready=ready)


def _ready(
    request: RequestFigures,
    candidates: Candidates,
    groups: Sequence[Group],
    prefills: Sequence[list[float]],
) -> float:
    """Seconds until the cheapest prefill pod of `groups` has computed the prompt; inf: there is
    none. `prefills`: the costs of each group's prefill pods."""
    of_groups = [least_of(of_group) for of_group in prefills]
    least = least_of(of_groups)
    if least == inf or not request.objective.miss:
        return least
    # The cost of a miss is no time.
    at = of_groups.index(least)
    row = groups[at].prefills[prefills[at].index(least)]
    cached = candidates.cached_if_computing[row]
    return first_token_seconds(request, candidates.pods.pods[row], cached)


def _saves_load(candidates: Candidates) -> bool:
    """Whether some prefill pod would load nothing from storage."""
    pods = candidates.pods.pods
    return any(not pods[i].load for group in candidates.groups for i in group.prefills)


def would_split(
    request: RequestFigures,
    pod: PodFigures,
    cached: int,
    fabrics: Iterable[FabricClass] = (FabricClass.ELSEWHERE,),
    on_decode: int | None = None,
) -> bool:
    """Whether a split would be cheaper than `pod` alone, were there an idle pod to prefill that is
    as fast as `pod`, loads as much from storage (what is in `cached`), and forms a pair of one of
    the classes `fabrics` with it. `on_decode`: tokens that need no transfer; None: `cached`."""
    there = cached if on_decode is None else on_decode
    ready = pod.load + idle_prefill_seconds(request, pod, cached)
    received = [
        sum(decode_terms(request, pod, there, fabric, ready))
        for fabric in fabrics
        if not is_transfer_too_long(request, pod, there, fabric)
    ]
    split = ready + min(received, default=inf)
    return split < sum(unified_terms(request, pod, cached))


class _Pair(NamedTuple):
    """The cheapest pair of a group."""

    cost: float = inf
    decodes: Sequence[int] = ()
    prefills: Sequence[int] = ()
    fabric: FabricClass = FabricClass.ELSEWHERE


def _cheapest_pair(  # noqa: PLR0917 - the parts of one choice
    request: RequestFigures,
    candidates: Candidates,
    group: Group,
    prefills: list[float],
    ready: float,
    random: Random,
    count: int,
) -> _Pair:
    """`prefills`: the costs of the group's pods that prefill; `ready`: the least of all groups."""
    if group.neighbours is not None:
        return _cheapest_neighbours(
            request, candidates, group, group.neighbours, prefills, ready, random, count
        )
    which = group.decodes
    decodes = decode_costs(
        request, candidates.pods, candidates.cached, which, group.fabric, ready=ready
    )
    # Both terms are compared by the cost of the whole pair, of which they are a part.
    if (cost := least_of(prefills) + least_of(decodes)) == inf:
        return _Pair()
    tie = tie_seconds(cost)
    first = _cheapest(decodes, which, count, random, tie)
    ranking = _cheapest(prefills, group.prefills, PREFILL_CANDIDATES, random, tie)
    return _Pair(cost, first, ranking, group.fabric)


def _cheapest_neighbours(  # noqa: PLR0917 - the parts of one choice
    request: RequestFigures,
    candidates: Candidates,
    group: Group,
    neighbours: Neighbours,
    prefills: list[float],
    ready: float,
    random: Random,
    count: int,
) -> _Pair:
    """The same where pairs are of several fabric classes, or pods are on both sides. Retries and
    alternates are the next cheapest with the chosen decode and prefill pod, so they may be of
    another class."""
    pods, cached, which = candidates.pods, candidates.cached, group.decodes
    least, equal = cheapest_pairs(request, pods, cached, which, neighbours, prefills, ready)
    if not equal:
        return _Pair()
    tie = tie_seconds(least)
    first = [decode] = [_draw(equal, random)]
    of_decode = transfer_costs(request, pods, cached, which[decode])
    pairs = neighbours.pair_costs(decode, prefills, of_decode)
    ranking = _cheapest_at(pairs, PREFILL_CANDIDATES, random, tie)
    if count > 1:
        of_all = [
            decode_costs(request, pods, cached, which, fabric, ready=ready)
            for fabric in FabricClass
        ]
        from_prefill = neighbours.classes_from(ranking[0])
        others = [of_all[fabric][at] for at, fabric in enumerate(from_prefill)]
        # The choice stays the first one, whatever others cost with its prefill pod.
        others[decode] = -inf
        if ranking[0] in neighbours.own:
            # No pod prefills for itself.
            others[neighbours.own.index(ranking[0])] = inf
        first = _cheapest_at(others, count, random, tie)
    return _Pair(
        least,
        [which[at] for at in first],
        [group.prefills[at] for at in ranking],
        neighbours.pair_class(ranking[0], decode),
    )


def _is_split_ruled_out(  # noqa: PLR0917 - the parts of one choice
    request: RequestFigures,
    candidates: Candidates,
    groups: Sequence[Group],
    prefills: Sequence[list[float]],
    decode: int,
    unified: float,
) -> bool:
    """Whether only the transfer to `decode`, which costs `unified` seconds alone, rules out a split
    that would be cheaper without it. `prefills`: the costs of each group's prefill pods."""
    pods, cached = candidates.pods, candidates.cached
    too_far = []
    for group, of_group in zip(groups, prefills, strict=True):
        if decode in group.decodes:
            of_classes = transfer_costs(request, pods, cached, decode)
            classes = group.pair_classes()[group.decodes.index(decode)]
            if classes and all(of_classes[fabric] == inf for fabric in classes):
                too_far.append(min(of_group))
    if not too_far:
        return False
    ready = min(map(min, filter(None, prefills)), default=inf)
    terms = decode_terms(request, pods.pods[decode], cached[decode], ready=ready)
    return min(too_far) < unified - sum(terms) + terms.transfer


def _cheapest(
    costs: list[float], which: Sequence[int], count: int, random: Random, tie: float
) -> list[int]:
    """Up to `count` of the pods `which`, the cheapest first; the first is drawn among those that
    cost at most `tie` seconds more."""
    return [which[at] for at in _cheapest_at(costs, count, random, tie)]


def _cheapest_at(costs: list[float], count: int, random: Random, tie: float) -> list[int]:
    """Their positions."""
    if (least := least_of(costs)) == inf:
        return []
    most = least + tie
    equal = [at for at, cost in enumerate(costs) if cost <= most]
    first = _draw(equal, random)
    if count == 1:
        return [first]
    # Among equals any order will do.
    others = equal if len(equal) >= count else _least_at(costs, count)
    return [first, *[at for at in others if at != first]][:count]


def _draw(equal: list[int], random: Random) -> int:
    """One of them. Not `choice`, which calls three functions to be exact in the last digit."""
    return equal[0] if len(equal) == 1 else equal[int(random.random() * len(equal))]


def _least_at(costs: list[float], count: int) -> list[int]:
    """The positions of the `count` least of `costs`, without those that are inf."""
    order: list[int] = []
    for _ in range(count):
        least, best = inf, -1
        for at, cost in enumerate(costs):
            if cost < least and at not in order:
                least, best = cost, at
        if best < 0:
            break
        order.append(best)
    return order
