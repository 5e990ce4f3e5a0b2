"""A request that another replica placed, on its pods: counted as `placement` counts an own one."""

from .backends.fleet import Fleet
from .backends.pods import Pod
from .peers.frames import RequestAnswered, RequestStarted, unpack


class RemoteRequest:
    """Takes its counts at the start and returns each exactly once, in whatever order answer and end
    are told. It holds Pods, not names: a pod that left the fleet is still decremented. A pod that
    this replica does not know, because discovery is behind, is left out."""

    def __init__(self, started: RequestStarted, fleet: Fleet) -> None:
        self._decode = fleet.find(started.decode)
        prefill = "" if started.has_first_token else started.prefill
        self._prefill = fleet.find(prefill)
        self._prefixes, self._chain = fleet.prefixes, unpack(started.chain)
        _count(self._decode, 1)
        _count(self._prefill, 1)
        self._entries = {
            pod: self._prefixes.place(pod, self._chain)
            for pod in (self._decode, self._prefill)
            if pod is not None
        }

    def on_answered(self, answer: RequestAnswered, fleet: Fleet) -> None:
        """The response headers passed: the prefill is over."""
        self._end_prefill()
        served = fleet.find(answer.decode) or self._decode
        if served is not self._decode:
            _count(self._decode, -1)
            _count(served, 1)
            self._move_entry(served)
            self._decode = served
        # The pod that ran the prefill is not told: the choice did, except after a failure.
        if answer.status // 100 == 2:
            for entry in self._entries.values():
                self._prefixes.confirm(entry)

    def end(self) -> None:
        """Return the counts that are left."""
        self._end_prefill()
        _count(self._decode, -1)
        self._decode = None
        for entry in self._entries.values():
            # Without effect on those that were confirmed.
            self._prefixes.withdraw(entry)
        self._entries.clear()

    def _move_entry(self, served: Pod | None) -> None:
        if self._decode is not None and (entry := self._entries.pop(self._decode, None)):
            self._prefixes.withdraw(entry)
        if served is not None:
            self._entries[served] = self._prefixes.place(served, self._chain)

    def _end_prefill(self) -> None:
        _count(self._prefill, -1)
        self._prefill = None


def _count(pod: Pod | None, requests: int) -> None:
    if pod is not None:
        pod.in_flight += requests
        pod.remote_in_flight += requests
