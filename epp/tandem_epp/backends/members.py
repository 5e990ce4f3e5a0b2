"""The pods behind one backend's address: one, or one per data-parallel rank.

vLLM with `--data-parallel-size N` runs N engines behind one port, each with its own queue and KV
cache. So each rank is a `Pod` of its own: it is scored, counted and learned about by itself, and a
request's plan names the rank. The metrics page tells how many there are (label `engine`); until the
first scrape, and if the page numbers no ranks from 0, the backend is one pod.
"""

import logging
from collections.abc import Collection, Iterable
from typing import Final

from tandem_contract.config import Backend
from tandem_contract.paths import Role

from ..prefix.prefix_tree import PrefixTree
from .pods import DiscoveredBackend, Pod

Kind = tuple[Role, tuple[str, ...]]
"""Role and models of backends, of which one may stand in for another."""
_log: Final = logging.getLogger(__name__)


class Members:
    """One backend: its pods, which share process, address and page."""

    def __init__(
        self,
        discovered: DiscoveredBackend,
        block_tokens: int,
        capacity: int,
        prefixes: PrefixTree[Pod] | None = None,
    ) -> None:
        """`block_tokens` and `capacity` are the KV block size and the blocks of a pod until its
        page reports them; `prefixes` is the index of the fleet."""
        self.uid, self.url = discovered.uid, discovered.backend.url
        self.has_served = False
        """Whether discovery ever reported it ready."""
        self._block_tokens, self._capacity, self._prefixes = block_tokens, capacity, prefixes
        self.pods: tuple[Pod, ...] = (self._create(discovered.backend, None),)
        """In the order of their ranks."""

    def is_same(self, discovered: DiscoveredBackend) -> bool:
        """Whether `discovered` is this backend, whose pods then keep their state."""
        return (self.uid, self.url) == (discovered.uid, discovered.backend.url)

    def update(self, discovered: DiscoveredBackend) -> None:
        """Weight, models, compat hash or readiness may have changed."""
        self.has_served |= discovered.serving
        for pod in self.pods:
            pod.backend, pod.serving = discovered.backend, discovered.serving
            pod.leaving = discovered.leaving

    def use_unready(self) -> None:
        """Discovery reports it not ready, which is doubted."""
        for pod in self.pods:
            pod.serving = True

    def set_ranks(self, count: int) -> bool:
        """Have `count` ranks; returns whether the number changed. A pod of an unchanged rank keeps
        its state."""
        if count == len(self.pods):
            return False
        first, numbers = self.pods[0], range(count) if count > 1 else (None,)
        by_rank = {pod.rank: pod for pod in self.pods}
        self.pods = tuple(
            by_rank.get(rank) or self._create(first.backend, rank) for rank in numbers
        )
        for pod in self.pods:
            pod.serving, pod.address, pod.healthy = first.serving, first.address, first.healthy
            pod.max_model_len, pod.leaving = first.max_model_len, first.leaving
        return True

    def _create(self, backend: Backend, rank: int | None) -> Pod:
        return Pod(backend, self._block_tokens, self._capacity, self._prefixes, rank)


def doubt_readiness(backends: Collection[Members], doubted: Collection[Kind]) -> frozenset[Kind]:
    """The kinds of which every backend is unready: those that were ready before stay in use, since
    a node whose API server was away reports all its pods so. The scrapes tell which of them answer.
    `doubted`: the kinds of last time, which were logged.
    """
    by_kind: dict[Kind, list[Members]] = {}
    for members in backends:
        backend = members.pods[0].backend
        by_kind.setdefault((backend.role, backend.models), []).append(members)
    unready = {}
    for kind, alike in by_kind.items():
        if not any(members.pods[0].serving for members in alike):
            unready[kind] = [each for each in alike if each.has_served and not each.pods[0].leaving]
    for kind, kept in unready.items():
        for members in kept:
            members.use_unready()
        if kept and kind not in doubted:
            _log.warning(
                "all %s pods are unready: those that were ready and still answer stay in use: %s",
                kind[0].value,
                ", ".join(members.pods[0].name for members in kept),
            )
    return frozenset(unready)


def pods_by_name(backends: Iterable[Members]) -> dict[str, Pod]:
    """The pods of all `backends`, in their order."""
    return {pod.name: pod for members in backends for pod in members.pods}
