"""One request, and what each pod has of its prompt."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ..backends.pods import Pod
from ..prefix.kv_events.collector import PreciseMatch
from ..prefix.prefix_tree import PrefixMatch, PrefixTree
from ..request.inference import InferenceRequest

_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class ChoiceContext:
    """A request, and lookups that combine it with a pod."""

    __slots__ = ("_match", "headers", "notes", "now", "peer", "precise", "prefixes", "request")

    def __init__(
        self,
        request: InferenceRequest | None,
        prefixes: PrefixTree[Pod] | None = None,
        precise: PreciseMatch | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
        now: float = 0.0,
        *,
        peer: Pod | None = None,
    ) -> None:
        self.request = request
        """None for a request whose body the EPP does not read."""
        self.prefixes = prefixes
        """The prefix index; None: no pod is known to cache anything."""
        self.precise = precise
        """What the precise index has of the prompt; None: it is off, or the prompt is not
        tokenized."""
        self.headers = headers
        """The client's request headers, names in lower case."""
        self.now = now
        """Unix seconds."""
        self.peer = peer
        """The decode pod, once it is chosen: the prefill pod is chosen for it."""
        self.notes: dict[object, object] = {}
        """Plugin → what it found while it filtered or scored, for its own `on_placed`."""
        self._match: PrefixMatch[Pod] | None = None
        """What the index has of the prompt, for all pods; looked up once per request."""

    @property
    def match(self) -> PrefixMatch[Pod]:
        """What each pod has of the prompt, to blocks of the index."""
        if self._match is None:
            if self.request is None or self.prefixes is None:
                return _NO_MATCH
            self._match = self.prefixes.match(self.request.chain)
        return self._match

    def placed_tokens(self, pod: Pod) -> int:
        """Length, in tokens, of the prompt's longest prefix that was routed to `pod` before: it is
        cached there or about to be."""
        placed = self._whole_blocks(self.match.placed_tokens(pod), pod)
        if self.precise is not None and (exact := self.precise.cached(pod.name)) is not None:
            # What was routed and is not answered yet is about to be cached; what was answered and
            # is not cached any more has been evicted.
            is_coming = self.match.placed_tokens(pod) > self.match.cached_tokens(pod)
            if is_coming or not self.precise.is_whole(pod.name):
                return max(exact.total, placed)
            return exact.total
        return placed

    def cached_tokens(self, pod: Pod) -> int:
        """Length, in tokens, of the prompt's longest prefix whose KV is on `pod`, by its KV events
        where they are known; else, believed to be."""
        cached = self._whole_blocks(self.match.cached_tokens(pod), pod)
        if self.precise is not None and (exact := self.precise.cached(pod.name)) is not None:
            return exact.total if self.precise.is_whole(pod.name) else max(exact.total, cached)
        return cached

    def _whole_blocks(self, assumed: int, pod: Pod) -> int:
        """Tokens in whole KV blocks of the pod: an engine caches no part of one."""
        tokens = self.request.tokens(assumed) if self.request else 0
        return tokens - tokens % pod.block_tokens


_NO_MATCH: Final[PrefixMatch[Pod]] = PrefixMatch((), {})
