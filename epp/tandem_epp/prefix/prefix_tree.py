"""The prefix index of all pods: what each of them probably caches, and what was just sent to it.

An entry is provisional from its placement on: requests with the same prefix should go to the same
pod, although its KV is not there yet. A 2xx confirms it; a failure withdraws it. Both halves answer
for all pods at once:

    placed_prefixes   provisional entries, as many as requests are in flight
    cached_prefixes   confirmed ones; each pod forgets the least recently used beyond its capacity

Memory is bounded over all pods. At the limit the pod that holds most forgets first.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Final, Generic, TypeVar

from tandem_contract.chains import Chain

from .cached_prefixes import ENTRY_BYTES, CachedPrefixes
from .placed_prefixes import PlacedPrefixes, PrefixEntry
from .radix_tree import BLOCK_BYTES, NODE_BYTES

K = TypeVar("K", bound=Hashable)

LIMIT_BYTES: Final = 500_000_000
"""Default limit of the index's memory: enough for 100 pods with 100,000 KV blocks of 16 tokens
each. Too low: pods forget prompts that their engines still cache."""
CAPACITY_TOKENS: Final = 500_000
"""Tokens remembered of a pod whose metrics do not report how many it can cache."""
_NEW_NODES: Final = 2
"""Nodes that adding a prompt makes at most: a split, and the blocks that are new."""
_ATTEMPTS: Final = 8
"""Evictions for one prompt at most. Those of prefixes that other pods hold as well free nothing."""
_PLACED_SHARE: Final = 0.25
"""Share of the limit that provisional entries may take; beyond it they are not kept."""


class PrefixMatch(Generic[K]):
    """How much of one prompt each pod has."""

    __slots__ = ("_cached", "groups", "placed")

    def __init__(
        self, groups: Sequence[tuple[tuple[K, ...], int]], placed: Mapping[K, int]
    ) -> None:
        self.groups = groups
        """Pods, and the tokens of the longest prefix that they have answered; pods that have none
        are missing. For a pod that is in several groups the last one counts. Pods that answered the
        same prompts are one group, the same object for each match, so that nothing is done pod by
        pod."""
        self.placed = placed
        """Pod → tokens of the longest prefix that was placed and not answered yet."""
        self._cached: Mapping[K, int] | None = None

    @property
    def cached(self) -> Mapping[K, int]:
        """`groups` as pod → tokens; computed once."""
        if self._cached is None:
            self._cached = {pod: tokens for pods, tokens in self.groups for pod in pods}
        return self._cached

    def cached_tokens(self, pod: K) -> int:
        """Tokens of the longest prefix whose KV is believed to be on `pod`."""
        return self.cached.get(pod, 0)

    def placed_tokens(self, pod: K) -> int:
        """Tokens of the longest prefix that was routed to `pod`, answered or not."""
        return max(self.cached.get(pod, 0), self.placed.get(pod, 0))


class PrefixTree(Generic[K]):
    """One index for all pods; a pod is known by any hashable key."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        """The memory that the index may take."""
        self._cached: CachedPrefixes[K] = CachedPrefixes()
        self._placed: PlacedPrefixes[K] = PlacedPrefixes()
        self._capacities: dict[K, int] = {}

    @property
    def bytes(self) -> int:
        """Estimated memory of the index."""
        return self._cached.bytes + self._placed.bytes

    def set_capacity(self, pod: K, tokens: int) -> None:
        """Remember at most `tokens` tokens of `pod` from now on."""
        if self._capacities.get(pod) != tokens:
            self._capacities[pod] = tokens
            self._cached.shrink(pod, tokens)

    def eviction_harm(self, pod: K) -> float:
        """Seconds that later prompts compute again on `pod` for each second of a prefill there: see
        `tandem_planner.cost.eviction`."""
        return self._cached.eviction_harm(pod)

    def match(self, chain: Chain) -> PrefixMatch[K]:
        """What each pod has of the prompt with this chain."""
        return PrefixMatch(self._cached.match(chain), self._placed.match(chain))

    def recent(self) -> Iterator[tuple[K, Chain]]:
        """The confirmed prompts of all pods in turn, of each pod the most recently used first. The
        index must not change meanwhile."""
        return self._cached.recent()

    def place(self, pod: K, chain: Chain) -> PrefixEntry[K]:
        """Note that a prompt is on its way to `pod`. The entry must be confirmed or withdrawn."""
        is_full = self._placed.bytes > self.limit_bytes * _PLACED_SHARE
        if is_full or not self._make_room(chain):
            chain = chain[:0]
        return self._placed.add(pod, chain)

    def confirm(self, entry: PrefixEntry[K]) -> None:
        """The prompt was answered: its KV is on the pod. Without effect on an entry that was
        confirmed, withdrawn or cleared before."""
        if self._placed.remove(entry) and self._make_room(entry.chain):
            capacity = self._capacities.get(entry.pod, CAPACITY_TOKENS)
            self._cached.add(entry.pod, entry.chain, capacity)

    def withdraw(self, entry: PrefixEntry[K]) -> None:
        """The prompt was not answered. Without effect on an entry that was confirmed, withdrawn or
        cleared before."""
        self._placed.remove(entry)

    def clear(self, pod: K) -> None:
        """Forget all prompts of `pod`: its cache is empty. Entries made before have no effect."""
        self._placed.clear(pod)
        self._cached.clear(pod)

    def remove_pod(self, pod: K) -> None:
        """Forget the pod: it is gone."""
        self.clear(pod)
        self._capacities.pop(pod, None)

    def _make_room(self, chain: Chain) -> bool:
        """Evict when the limit is reached; returns whether there is room for `chain`."""
        room = self.limit_bytes - len(chain) * BLOCK_BYTES - _NEW_NODES * (NODE_BYTES + ENTRY_BYTES)
        if self.bytes <= room:
            return True
        for _ in range(_ATTEMPTS):
            self._cached.shrink_largest()
            if self.bytes <= room:
                return True
        return False
