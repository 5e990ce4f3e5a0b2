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
        self._chain = unpack(started.chain)
        _count(self._decode, 1)
        _count(self._prefill, 1)
        for pod in (self._decode, self._prefill):
            if pod is not None:
                pod.placed_prefixes.add(self._chain)

    def on_answered(self, answer: RequestAnswered, fleet: Fleet) -> None:
        """The response headers passed: the prefill is over."""
        self._end_prefill()
        served = fleet.find(answer.decode) or self._decode
        if served is not self._decode:
            _count(self._decode, -1)
            _count(served, 1)
            self._decode = served
        if answer.status // 100 == 2 and self._decode is not None:
            self._decode.cached_prefixes.add(self._chain)

    def end(self) -> None:
        """Return the counts that are left."""
        self._end_prefill()
        _count(self._decode, -1)
        self._decode = None

    def _end_prefill(self) -> None:
        _count(self._prefill, -1)
        self._prefill = None


def _count(pod: Pod | None, requests: int) -> None:
    if pod is not None:
        pod.in_flight += requests
        pod.remote_in_flight += requests
