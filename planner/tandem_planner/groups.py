"""Groups of pods that can exchange KV, and the cheapest prefill pod of each fabric class. Pure.

A decode pod forms pairs with the prefill pods of its node (same node), of its domain on other nodes
(same domain), and of other domains (elsewhere). Where these differ, the cheapest prefill pod of
each class takes one pass over the prefill pods for the cheapest of each node, one over the nodes
for the cheapest of each domain and the cheapest on another node there, and one over the domains for
the same two: O(P + D), however many nodes there are.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from tandem_contract.fabric_classes import FabricClass

from .fabrics import Place

SAME_NODE, SAME_DOMAIN, ELSEWHERE = FabricClass
_NONE: Final = -1
"""Number of a node or domain of which a group has no prefill pod. As an index it means the last
element, which is that of no node and costs inf."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Where the pods of a group run, as numbers of nodes and domains, in the order of its pods.
    A pod without a known domain has one of its own, or shares that of its node."""

    nodes: Sequence[int]
    """Of each prefill pod."""
    domains: Sequence[int]
    """Of each prefill pod."""
    domain_of: Sequence[int]
    """Of each node."""
    decode_nodes: Sequence[int]
    """Of each decode pod; _NONE: no prefill pod is there."""
    decode_domains: Sequence[int]
    """Of each decode pod; _NONE: no prefill pod is there."""
    pair_classes: Sequence[tuple[FabricClass, ...]]
    """Of each decode pod, the classes of its pairs."""
    classes: Sequence[FabricClass]
    """Those of which the group has pairs."""

    def classes_to(self, decode: int) -> list[FabricClass]:
        """The class of each prefill pod with the decode pod at this position."""
        node, domain = self.decode_nodes[decode], self.decode_domains[decode]
        return [
            SAME_NODE if own == node else SAME_DOMAIN if around == domain else ELSEWHERE
            for own, around in zip(self.nodes, self.domains, strict=True)
        ]

    def classes_from(self, prefill: int) -> list[FabricClass]:
        """The class of each decode pod with the prefill pod at this position."""
        node, domain = self.nodes[prefill], self.domains[prefill]
        return [
            SAME_NODE if own == node else SAME_DOMAIN if around == domain else ELSEWHERE
            for own, around in zip(self.decode_nodes, self.decode_domains, strict=True)
        ]

    def cheapest_prefills(self, costs: Sequence[float]) -> tuple[list[float], ...]:
        """Per class, the least of the prefill pods' `costs` for each decode pod; inf without a
        prefill pod of the class."""
        on_node = [inf] * (len(self.domain_of) + 1)
        for node, cost in zip(self.nodes, costs, strict=True):
            if cost < on_node[node]:  # noqa: PLR1730 - `min` takes three times as long
                on_node[node] = cost
        # Of each domain: the cheapest, its node, and the cheapest on another node.
        domains = max(self.domain_of, default=_NONE) + 1
        in_domain, node_of, beside = [inf] * (domains + 1), [-2] * (domains + 1), [inf] * domains
        # Not strict: the last element of `on_node` is that of no node.
        for node, (domain, cost) in enumerate(zip(self.domain_of, on_node, strict=False)):
            if cost < in_domain[domain]:
                beside[domain], in_domain[domain] = in_domain[domain], cost
                node_of[domain] = node
            elif cost < beside[domain]:
                beside[domain] = cost
        # Of all domains: the cheapest, and the cheapest in another domain.
        least = min(in_domain)
        best = in_domain.index(least)
        second = min((cost for domain, cost in enumerate(in_domain) if domain != best), default=inf)
        decodes = list(zip(self.decode_nodes, self.decode_domains, strict=True))
        none = [inf] * len(decodes)
        return (
            [on_node[node] for node, _ in decodes] if SAME_NODE in self.classes else none,
            [
                beside[domain] if node_of[domain] == node else in_domain[domain]
                for node, domain in decodes
            ]
            if SAME_DOMAIN in self.classes
            else none,
            [second if domain == best else least for _, domain in decodes],
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Pods that can exchange KV, by row: each of `prefills` may prefill for each of `decodes`."""

    prefills: Sequence[int]
    decodes: Sequence[int]
    fabric: FabricClass = ELSEWHERE
    """The class of all pairs, unless there are `neighbours`."""
    neighbours: Neighbours | None = None
    """None: all pairs are of one class."""

    def pair_classes(self) -> Sequence[tuple[FabricClass, ...]]:
        """The classes of the pairs of each decode pod."""
        if self.neighbours is None:
            return [(self.fabric,)] * len(self.decodes)
        return self.neighbours.pair_classes


def make_group(
    prefills: Sequence[int], decodes: Sequence[int], places: Sequence[Place] | None = None
) -> Group:
    """The group of these pods; `places` are those of all rows, None: not known."""
    if places is None:
        return Group(prefills, decodes)
    nodes: dict[object, int] = {}
    domains: dict[object, int] = {}
    of_prefills: list[tuple[int, int]] = []
    domain_of: list[int] = []
    for row in prefills:
        place = places[row]
        domain = domains.setdefault(_domain_key(place), len(domains))
        # Pods whose node is not known are, for all that is known, each on a node of its own; a
        # decode pod is on none of these, so one number serves for those of a domain.
        key = ("node", place.node) if place.node is not None else ("no node", domain)
        node = nodes.setdefault(key, len(nodes))
        if node == len(domain_of):
            domain_of.append(domain)
        of_prefills.append((node, domain))
    of_decodes = [
        (
            nodes.get(("node", place.node), _NONE) if place.node is not None else _NONE,
            _NONE if place == (None, None) else domains.get(_domain_key(place), _NONE),
        )
        for place in map(places.__getitem__, decodes)
    ]
    nodes_in = Counter(domain_of)
    pair_classes = [
        _pair_classes(node, domain, nodes_in[domain], len(domains)) for node, domain in of_decodes
    ]
    classes = sorted({fabric for each in pair_classes for fabric in each})
    if len(classes) <= 1:
        return Group(prefills, decodes, classes[0] if classes else ELSEWHERE)
    neighbours = Neighbours(
        *_columns(of_prefills), domain_of, *_columns(of_decodes), pair_classes, classes
    )
    return Group(prefills, decodes, neighbours=neighbours)


def _domain_key(place: Place) -> object:
    """Equal for pods of one domain; a node of which no domain is known counts as one."""
    if place.domain is not None:
        return ("domain", place.domain)
    return ("node", place.node) if place.node is not None else None


def _pair_classes(
    node: int, domain: int, nodes_in_domain: int, domains: int
) -> tuple[FabricClass, ...]:
    """The classes of a decode pod's pairs. `nodes_in_domain`: nodes of its domain that have prefill
    pods; `domains`: those that have any."""
    counts = {
        SAME_NODE: node != _NONE,
        SAME_DOMAIN: nodes_in_domain > (node != _NONE),
        ELSEWHERE: domains > (domain != _NONE),
    }
    return tuple(fabric for fabric, is_there in counts.items() if is_there)


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [first for first, _ in pairs], [second for _, second in pairs]
