"""Where pods run, by their labels, and the filter and scorer that prefer prefill pods near the
decode pod. Without labels, or before a decode pod is chosen, neither has an influence.

Levels and scores are llm-d's (llm-d-router, topology-affinity-filter and topology-affinity-scorer).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from ...backends.pods import Pod
from ...choice.context import ChoiceContext
from .llmd_parameters import Level, TopologyParameters
from .profile import keep_if


class Distance(IntEnum):
    """The closest place that two pods share."""

    HOST = 0
    RACK = 1
    ZONE = 2
    REGION = 3
    NONE = 4


DISTANCES: Final[Mapping[Level, Distance]] = {
    Level.HOST: Distance.HOST,
    Level.RACK: Distance.RACK,
    Level.ZONE: Distance.ZONE,
    Level.REGION: Distance.REGION,
}
SCORES: Final[Mapping[Distance, float]] = {
    Distance.HOST: 1.0,
    Distance.RACK: 0.2,
    Distance.ZONE: 0.05,
    Distance.REGION: 0.02,
    Distance.NONE: 0.0,
}
"""By the bandwidth of KV transfers at that distance, not evenly spaced."""


def distance(first: Pod, second: Pod, keys: TopologyParameters) -> Distance:
    """The first of host, rack, zone and region whose label both pods have with the same value."""
    for key, level in zip(
        (keys.hostname, keys.rack, keys.zone, keys.region), Distance, strict=False
    ):
        value = first.backend.labels.get(key)
        if value and value == second.backend.labels.get(key):
            return level
    return Distance.NONE


@dataclass(frozen=True)
class TopologyFilter:
    """Keeps pods as near to the decode pod as `farthest`; all of them if none is, or if no decode
    pod is chosen yet."""

    keys: TopologyParameters
    farthest: Distance
    is_steady = False

    def keep(self, pods: Sequence[Pod], context: ChoiceContext) -> Sequence[Pod]:
        if (peer := context.peer) is None:
            return pods
        return keep_if(pods, lambda p: distance(peer, p, self.keys) <= self.farthest) or pods


@dataclass(frozen=True)
class TopologyScorer:
    """Nearness to the decode pod: 1 on its host, 0.2 in its rack, 0.05 in its zone, 0.02 in its
    region, else 0; higher is better. 0 each while no decode pod is chosen."""

    keys: TopologyParameters
    is_steady = False

    def score(self, pods: Sequence[Pod], context: ChoiceContext) -> list[float]:
        if (peer := context.peer) is None:
            return [0.0] * len(pods)
        return [SCORES[distance(peer, pod, self.keys)] for pod in pods]
