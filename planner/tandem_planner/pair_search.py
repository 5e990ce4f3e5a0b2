"""The cheapest pairs among pods of which some are nearer to each other than others. Pure.

    pair(P, D) = what P costs + what D costs in the fabric class of the pair

For a decode pod, only the cheapest prefill pod of each class matters: `Nearest` finds them for all
nodes and domains in one pass over the prefill pods. The search leaves out a decode pod that costs
too much even with the cheapest of all prefill pods. It is O(P + D).
"""

from collections.abc import Sequence
from math import inf
from typing import Final

from .cost import RequestFigures, preemption_seconds, tie_seconds
from .figure_table import FigureTable, Receiving
from .groups import Neighbours
from .pod_costs import at_least_one, linear_tokens, received_seconds

_NONE: Final = -1
"""No pod, and no node."""


class Nearest:
    """What the cheapest prefill pods cost on each node, in each domain, and of all."""

    def __init__(self, neighbours: Neighbours, prefills: list[float]) -> None:
        """`prefills`: what the prefill pods cost."""
        self._neighbours = neighbours
        nodes, domain_of, domains = neighbours.nodes, neighbours.domain_of, neighbours.domains
        # Of each node: the position of the cheapest, its cost, and that of the second.
        number = len(domain_of)
        first, on_node, second = [_NONE] * number, [inf] * number, [inf] * number
        for at, cost in enumerate(prefills):
            node = nodes[at]
            if cost < on_node[node]:
                second[node] = on_node[node]
                first[node], on_node[node] = at, cost
            elif cost < second[node]:
                second[node] = cost
        # Of each domain: the node of the cheapest, its cost, and that of the cheapest on another.
        of_node, in_domain, other = [_NONE] * domains, [inf] * domains, [inf] * domains
        for node, cost in enumerate(on_node):
            domain = domain_of[node]
            if cost < in_domain[domain]:
                other[domain] = in_domain[domain]
                of_node[domain], in_domain[domain] = node, cost
            elif cost < other[domain]:
                other[domain] = cost
        # Of all: the domain of the cheapest, its cost, and that of the cheapest in another domain.
        self._domain, self.least, self._beyond = _NONE, inf, inf
        for domain, cost in enumerate(in_domain):
            if cost < self.least:
                self._beyond = self.least
                self._domain, self.least = domain, cost
            elif cost < self._beyond:
                self._beyond = cost
        self._first, self._on_node, self._second = first, on_node, second
        self._of_node, self._in_domain, self._other = of_node, in_domain, other

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
) -> tuple[float, list[int]]:
    """Seconds of the cheapest pair, and the positions in `which`, the decode pods, of those whose
    pairs cost as much, by a tie. inf and none where the transfer takes too long in all pairs.

    `prefills`: what the prefill pods cost; `ready`: as in `cost.decode_terms`.
    """
    n, cached = at_least_one(request, cached)
    decoded, now, most, twice = request.decoded, request.now, n + request.output, 2.0 * n
    handoff, any_length = request.handoff, request.is_any_transfer_short
    has_windows, least_receiving = pods.has_windows, pods.least_receiving
    nearest = Nearest(neighbours, prefills)
    least, limit, base = inf, inf, handoff + nearest.least
    # Positions, and what their pairs cost.
    found: list[int] = []
    costs: list[float] = []
    at = -1
    for row in which:
        at += 1
        left = float(n - cached[row])
        constant, per_token, itl_harm = least_receiving[row]
        # A window makes KV smaller than its tokens would be.
        bound = base + constant + itl_harm * decoded
        if not has_windows:
            bound += left * per_token
        # The other terms of the pair only add to it.
        if bound > limit or bound == inf:
            continue
        size = linear_tokens(pods.pods[row].kv, left) if has_windows else left
        cost = _with_transfer(nearest.costs(at), pods.receiving, row, left, size, twice, any_length)
        if cost == inf:
            continue
        cost += handoff + itl_harm * decoded
        ends, late, queued = pods.queues[row]
        cost += max(0.0, queued + (ends - now if ends > now else (now - ends) * late) - ready)
        if pods.free_tokens[row] < most:
            cost += preemption_seconds(request, pods.pods[row], cached[row])
        if cost <= limit:
            found.append(at)
            costs.append(cost)
            if cost < least:
                least, limit = cost, cost + tie_seconds(cost)
    # Without `strict`, `zip` is compiled to a loop over an index.
    return least, [at for at, cost in zip(found, costs) if cost <= limit]  # noqa: B905


def _with_transfer(  # noqa: PLR0917 - as `received_seconds`
    of_classes: tuple[float, float, float],
    receiving: tuple[list[Receiving], ...],
    row: int,
    left: float,
    size: float,
    twice: float,
    any_length: bool,
) -> float:
    """The least, over the classes of pairs, of what the cheapest prefill pod costs and its KV's
    transfer to the pod in this row; inf: all transfers take too long."""
    near, around, away = of_classes
    on_node, in_domain, afar = receiving
    cost = inf
    if near < inf:
        cost = near + received_seconds(on_node[row], left, size, twice, any_length)
    # Nothing is received in less than no time.
    if around < cost:
        around += received_seconds(in_domain[row], left, size, twice, any_length)
        cost = min(cost, around)
    if away < cost:
        cost = min(cost, away + received_seconds(afar[row], left, size, twice, any_length))
    return cost
