"""The entries of one request's prompt in the prefix index, from its placement to its outcome."""

from collections.abc import Sequence

from tandem_contract.chains import Chain

from ..backends.pods import Pod
from ..exchange import ResponseHeaders
from ..prefix.placed_prefixes import PrefixEntry
from ..prefix.prefix_tree import PrefixTree


class PromptEntries:
    """Provisional entries on the pods that a request was sent to; each ends exactly once."""

    def __init__(
        self, prefixes: PrefixTree[Pod], chain: Chain, decode: Pod, prefill: Sequence[Pod]
    ) -> None:
        self._prefixes, self._chain, self._candidates = prefixes, chain, prefill
        self._decode = prefixes.place(decode, chain)
        self._prefill = prefixes.place(prefill[0], chain) if prefill else None

    def move_decode(self, pod: Pod) -> None:
        """Another pod than the chosen one decodes."""
        self._prefixes.withdraw(self._decode)
        self._decode = self._prefixes.place(pod, self._chain)

    def on_response_headers(self, response: ResponseHeaders) -> None:
        """Confirm the entries if the response is a 2xx: the KV of the whole prompt is on the decode
        pod then, and on the pod that ran the prefill. Withdraw them otherwise."""
        if response.status // 100 != 2:
            self.withdraw()
            return
        self._prefixes.confirm(self._decode)
        if (entry := self._prefill_entry(response)) is not None:
            self._prefixes.confirm(entry)

    def withdraw(self) -> None:
        """Withdraw what is not confirmed: the request failed or ended without an answer."""
        for entry in (self._decode, self._prefill):
            if entry is not None:
                self._prefixes.withdraw(entry)

    def _prefill_entry(self, response: ResponseHeaders) -> PrefixEntry[Pod] | None:
        """The entry on the pod that ran the prefill; None if none did."""
        if self._prefill is None or response.path is None:
            # A sidecar that does not say what it did followed the choice.
            return self._prefill
        computing = next((pod for pod in self._candidates if pod.is_named(response.prefill)), None)
        if computing is self._candidates[0]:
            return self._prefill
        self._prefixes.withdraw(self._prefill)
        if computing is None or computing.has_left:
            # Nothing would ever remove the entry of a pod that has left the fleet.
            return None
        return self._prefixes.place(computing, self._chain)
