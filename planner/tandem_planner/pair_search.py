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
from .pod_costs import at_least_one, transfer_costs

_NOTHING: Final = (-2, inf, inf)
"""Of a node or domain without prefill pods; no pod or node has this number."""


class Nearest:
    """What the cheapest prefill pods cost on each node, in each domain, and of all."""

    def __init__(self, neighbours: Neighbours, prefills: list[float], order: list[int]) -> None:
        """`prefills`: what the prefill pods cost; `order`: their positions, the cheapest first."""
        nodes, domains = neighbours.nodes, neighbours.domains
        self._neighbours = neighbours
        self._on_node: dict[int, tuple[int, float, float]] = {}
        """Node → position of the cheapest, its cost, and the cost of the second cheapest."""
        self._in_domain: dict[int, tuple[int, float, float]] = {}
        """Domain → node of the cheapest, its cost, and the cost of the cheapest on another node."""
        for at in order:
            cost = prefills[at]
            if (cheapest := self._on_node.get(node := nodes[at])) is None:
                self._on_node[node] = at, cost, inf
                # Of one node, only the first one counts.
                if (first := self._in_domain.get(domain := domains[at])) is None:
                    self._in_domain[domain] = node, cost, inf
                elif first[2] == inf:
                    self._in_domain[domain] = first[0], first[1], cost
            elif cheapest[2] == inf:
                self._on_node[node] = cheapest[0], cheapest[1], cost
        self._domain, self._least = domains[order[0]], prefills[order[0]]
        beyond = (prefills[at] for at in order if domains[at] != self._domain)
        self._beyond = next(beyond, inf)
        """The cost of the cheapest in another domain than the cheapest of all."""

    def costs(self, decode: int) -> tuple[float, float, float]:
        """Per class of the pair, what the cheapest prefill pod costs for the decode pod at this
        position; inf: there is none but itself."""
        neighbours = self._neighbours
        node, domain = neighbours.decode_nodes[decode], neighbours.decode_domains[decode]
        cheapest, on_node, second = self._on_node.get(node, _NOTHING)
        first_node, in_domain, other = self._in_domain.get(domain, _NOTHING)
        return (
            second if cheapest == neighbours.own[decode] else on_node,
            other if first_node == node else in_domain,
            self._beyond if domain == self._domain else self._least,
        )


def cheapest_pairs(  # noqa: PLR0917 - the parts of one choice
    request: RequestFigures,
    pods: FigureTable,
    cached: list[int],
    which: Sequence[int],
    neighbours: Neighbours,
    prefills: list[float],
    order: list[int],
    ready: float,
) -> dict[int, float]:
    """Position in `which`, the decode pods → seconds of the pod's cheapest pair, at least for the
    pods whose pair costs no more than the cheapest one and a tie. Empty where the transfer takes
    too long in all pairs.

    `prefills`, `order`: as `Nearest` takes them; `ready`: as in `cost.decode_terms`.
    """
    n, cached = at_least_one(request, cached)
    decoded, now, most = request.decoded, request.now, n + request.output
    # A window makes KV smaller than its tokens would be.
    counted = 0 if pods.has_windows else 1
    least_receiving, least = pods.least_receiving, list[float]()
    for row in which:
        constant, per_token, itl_harm = least_receiving[row]
        least.append(constant + counted * (n - cached[row]) * per_token + itl_harm * decoded)
    nearest, costs, limit = Nearest(neighbours, prefills, order), dict[int, float](), inf
    base = request.handoff + prefills[order[0]]
    for at in sorted(range(len(which)), key=least.__getitem__):
        # The other terms of the pair only add to it.
        if base + least[at] > limit or prefills[order[0]] == inf:
            break
        near, around, away = nearest.costs(at)
        if request.handoff + min(near, around, away) + least[at] > limit:
            continue
        row = which[at]
        on_node, in_domain, afar = transfer_costs(request, pods, cached, row)
        cost = min(near + on_node, around + in_domain, away + afar)
        if cost == inf:
            continue
        cost += request.handoff + pods.computing[row][ITL_HARM] * decoded
        ends, late, queued = pods.queues[row]
        cost += max(0.0, queued + (ends - now if ends > now else (now - ends) * late) - ready)
        if pods.free_tokens[row] < most:
            cost += preemption_seconds(request, pods.pods[row], cached[row])
        costs[at] = cost
        limit = min(limit, cost + tie_seconds(cost))
    return costs
