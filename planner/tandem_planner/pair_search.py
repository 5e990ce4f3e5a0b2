"""The cheapest pairs among pods of which some are nearer to each other than others. Pure.

    pair(P, D) = what P costs + what D costs in the fabric class of the pair

For a decode pod, only the cheapest prefill pod of each class matters: `Nearest` finds them for all
nodes and domains in one pass over the prefill pods. The search visits decode pods in the order of
the least that each may cost, until one costs too much even with the cheapest of all prefill pods.
So under load it looks at few of them. Sorting aside, it is O(P + D).
"""

from collections.abc import Sequence
from math import inf
from typing import Final

from .cost import RequestFigures, preemption_seconds, tie_seconds
from .figure_table import ITL_HARM, FigureTable
from .groups import Neighbours
from .pod_costs import at_least_one, linear_tokens, received_seconds

_NONE: Final = -1
"""No pod, and no node."""


class Nearest:
    """What the cheapest prefill pods cost on each node, in each domain, and of all."""

    def __init__(self, neighbours: Neighbours, prefills: list[float]) -> None:
        """`prefills`: what the prefill pods cost."""
        self._neighbours = neighbours
        domain_of = neighbours.domain_of
        # Of each node: the position of the cheapest, its cost, and that of the second.
        self._first, self._on_node = [_NONE] * len(domain_of), [inf] * len(domain_of)
        self._second = [inf] * len(domain_of)
        # Of each domain: the node of the cheapest, its cost, and that of the cheapest on another.
        self._of_node, self._in_domain = [_NONE] * neighbours.domains, [inf] * neighbours.domains
        self._other = [inf] * neighbours.domains
        # Of all: the domain of the cheapest, its cost, and that of the cheapest in another domain.
        self._domain, self.least, self._beyond = _NONE, inf, inf
        nodes = neighbours.nodes
        for at, cost in enumerate(prefills):
            node = nodes[at]
            if cost < self._on_node[node]:
                self._second[node] = self._on_node[node]
                self._first[node], self._on_node[node] = at, cost
            elif cost < self._second[node]:
                self._second[node] = cost
        for node, cost in enumerate(self._on_node):
            domain = domain_of[node]
            if cost < self._in_domain[domain]:
                self._other[domain] = self._in_domain[domain]
                self._of_node[domain], self._in_domain[domain] = node, cost
            elif cost < self._other[domain]:
                self._other[domain] = cost
        for domain, cost in enumerate(self._in_domain):
            if cost < self.least:
                self._beyond = self.least
                self._domain, self.least = domain, cost
            elif cost < self._beyond:
                self._beyond = cost

    def costs(self, decode: int) -> tuple[float, float, float]:
        """Per class of the pair, what the cheapest prefill pod costs for the decode pod at this
        position; inf: there is none but itself."""
        neighbours = self._neighbours
        node, domain = neighbours.decode_nodes[decode], neighbours.decode_domains[decode]
        near = around = inf
        if node >= 0:
            is_own = self._first[node] == neighbours.own[decode]
            near = self._second[node] if is_own else self._on_node[node]
        if domain >= 0:
            is_near = self._of_node[domain] == node
            around = self._other[domain] if is_near else self._in_domain[domain]
        return near, around, self._beyond if domain == self._domain else self.least


def cheapest_pairs(  # noqa: PLR0917 - the parts of one choice
    request: RequestFigures,
    pods: FigureTable,
    cached: list[int],
    which: Sequence[int],
    neighbours: Neighbours,
    prefills: list[float],
    ready: float,
) -> dict[int, float]:
    """Position in `which`, the decode pods → seconds of the pod's cheapest pair, at least for the
    pods whose pair costs no more than the cheapest one and a tie. Empty where the transfer takes
    too long in all pairs.

    `prefills`: what the prefill pods cost; `ready`: as in `cost.decode_terms`.
    """
    n, cached = at_least_one(request, cached)
    decoded, now, most, twice = request.decoded, request.now, n + request.output, 2.0 * n
    handoff, any_length = request.handoff, request.is_any_transfer_short
    on_node, in_domain, afar = pods.receiving
    has_windows, least_receiving = pods.has_windows, pods.least_receiving
    # A window makes KV smaller than its tokens would be.
    counted = 0 if has_windows else 1
    least: list[float] = []
    for row in which:
        constant, per_token, itl_harm = least_receiving[row]
        least.append(constant + counted * (n - cached[row]) * per_token + itl_harm * decoded)
    nearest, costs, limit = Nearest(neighbours, prefills), dict[int, float](), inf
    base = handoff + nearest.least
    for at in sorted(range(len(which)), key=least.__getitem__):
        # The other terms of the pair only add to it.
        if base + least[at] > limit or base == inf:
            break
        row = which[at]
        near, around, away = nearest.costs(at)
        left = float(n - cached[row])
        size = linear_tokens(pods.pods[row].kv, left) if has_windows else left
        cost = inf
        if near < inf:
            cost = near + received_seconds(on_node[row], left, size, twice, any_length)
        # Nothing is received in less than no time.
        if around < cost:
            around += received_seconds(in_domain[row], left, size, twice, any_length)
            cost = min(cost, around)
        if away < cost:
            cost = min(cost, away + received_seconds(afar[row], left, size, twice, any_length))
        if cost == inf:
            continue
        cost += handoff + pods.computing[row][ITL_HARM] * decoded
        ends, late, queued = pods.queues[row]
        cost += max(0.0, queued + (ends - now if ends > now else (now - ends) * late) - ready)
        if pods.free_tokens[row] < most:
            cost += preemption_seconds(request, pods.pods[row], cached[row])
        costs[at] = cost
        limit = min(limit, cost + tie_seconds(cost))
    return costs
