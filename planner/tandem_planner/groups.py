"""Groups of pods that can exchange KV, and the fabric classes of their pairs. Pure.

A decode pod forms pairs with the prefill pods of its node (same node), of its domain on other nodes
(same domain), and of other domains (elsewhere).

Unified pods are on both sides of one group. No pod prefills for itself.
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
"""Number of a node or domain of which a group has no prefill pod."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Where the pods of a group run, as numbers of nodes and domains, in the order of its pods,
    which are meant by their position. A pod without a known domain has one of its own, or shares
    that of its node."""

    nodes: list[int]
    """Of each prefill pod."""
    domain_of: list[int]
    """Of each node."""
    domains: int
    """How many there are."""
    decode_nodes: list[int]
    """Of each decode pod; _NONE: no prefill pod is there."""
    decode_domains: list[int]
    """Of each decode pod; _NONE: no prefill pod is there."""
    pair_classes: Sequence[tuple[FabricClass, ...]]
    """Of each decode pod, the classes of its pairs."""
    own: list[int]
    """Of each decode pod, the position of the same pod among the prefill pods; _NONE: it is none.
    Then its node has a number, and a pod of an unknown node has a node and a domain of its own."""

    def pair_class(self, prefill: int, decode: int) -> FabricClass:
        """The class of the pods at these positions."""
        node = self.nodes[prefill]
        if node == self.decode_nodes[decode]:
            return SAME_NODE
        return SAME_DOMAIN if self.domain_of[node] == self.decode_domains[decode] else ELSEWHERE

    def pair_costs(
        self, decode: int, prefills: list[float], of_classes: list[float]
    ) -> list[float]:
        """What the decode pod at this position costs with each prefill pod; inf: it is the same
        pod. `prefills`: what these cost; `of_classes`: what the class of a pair adds."""
        node, domain = self.decode_nodes[decode], self.decode_domains[decode]
        domain_of, nodes = self.domain_of, self.nodes
        near, around, away = of_classes
        costs: list[float] = []
        # A call for each pod would take longer than all else here.
        for at, cost in enumerate(prefills):
            of = nodes[at]
            if of == node:
                costs.append(cost + near)
            else:
                costs.append(cost + (around if domain_of[of] == domain else away))
        if (own := self.own[decode]) != _NONE:
            costs[own] = inf
        return costs

    def classes_from(self, prefill: int) -> list[FabricClass]:
        """The class of each decode pod with the prefill pod at this position."""
        node = self.nodes[prefill]
        domain = self.domain_of[node]
        return [
            SAME_NODE if own == node else SAME_DOMAIN if around == domain else ELSEWHERE
            for own, around in zip(self.decode_nodes, self.decode_domains, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Group:
    """Pods that can exchange KV, by row: each of `prefills` may prefill for each of `decodes` but
    itself."""

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
    """The group of these pods, of which some may be on both sides; `places` are those of all rows,
    None: not known."""
    both = frozenset(prefills) & frozenset(decodes)
    if places is None and not both:
        return Group(prefills, decodes)
    place_of = {row: places[row] if places else Place() for row in (*prefills, *decodes)}
    nodes: dict[object, int] = {}
    domains: dict[object, int] = {}
    of_prefills: list[int] = []
    domain_of: list[int] = []
    for row in prefills:
        place, only = place_of[row], row if row in both else None
        domain = domains.setdefault(_domain_key(place, only), len(domains))
        # Pods whose node is not known are, for all that is known, each on a node of its own. No
        # decode pod is on those of pods that only prefill: one number serves for all of a domain.
        node = nodes.setdefault(_node_key(place, only) or ("no node", domain), len(nodes))
        if node == len(domain_of):
            domain_of.append(domain)
        of_prefills.append(node)
    of_decodes = []
    for row in decodes:
        place, only = place_of[row], row if row in both else None
        of_decodes.append((
            nodes.get(_node_key(place, only), _NONE),
            _NONE
            if place == (None, None) and only is None
            else domains.get(_domain_key(place, only), _NONE),
        ))  # fmt: skip
    nodes_in, pods_on = Counter(domain_of), Counter(of_prefills)
    pair_classes = [
        _pair_classes(
            has_neighbour=pods_on[node] > (row in both),
            nodes_around=nodes_in[domain] - (node != _NONE),
            domains_around=len(domains) - (domain != _NONE),
        )
        for row, (node, domain) in zip(decodes, of_decodes, strict=True)
    ]
    classes = {fabric for each in pair_classes for fabric in each}
    if len(classes) <= 1 and not both:
        return Group(prefills, decodes, classes.pop() if classes else ELSEWHERE)
    at = {row: position for position, row in enumerate(prefills)}
    neighbours = Neighbours(
        of_prefills,
        domain_of,
        len(domains),
        [node for node, _ in of_decodes],
        [domain for _, domain in of_decodes],
        pair_classes,
        [at.get(row, _NONE) for row in decodes],
    )
    return Group(prefills, decodes, neighbours=neighbours)


def _node_key(place: Place, only: int | None) -> object:
    """Equal for pods of one node; None: it is not known. `only`: the row of a pod that is on both
    sides of its group; its node is then told from all others."""
    if place.node is not None:
        return ("node", place.node)
    return None if only is None else ("row", only)


def _domain_key(place: Place, only: int | None) -> object:
    """Equal for pods of one domain; a node of which no domain is known counts as one."""
    return _node_key(place, only) if place.domain is None else ("domain", place.domain)


def _pair_classes(
    *, has_neighbour: bool, nodes_around: int, domains_around: int
) -> tuple[FabricClass, ...]:
    """The classes of a decode pod's pairs. `has_neighbour`: another pod of its node prefills;
    `nodes_around`: other nodes of its domain that have prefill pods; `domains_around`: other
    domains that have any."""
    counts = {SAME_NODE: has_neighbour, SAME_DOMAIN: nodes_around, ELSEWHERE: domains_around}
    return tuple(fabric for fabric, count in counts.items() if count > 0)
