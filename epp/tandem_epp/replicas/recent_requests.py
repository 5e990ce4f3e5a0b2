"""Which requests this replica placed lately, and where: an access log may speak of these alone.

Any client of the gRPC port can send log entries. An entry counts only if it names the id of a
request that this replica placed, and the backend that served it; and once per request.
"""

from collections import OrderedDict
from typing import Final

from ..placement.placement import Placement

MAX_ENDED: Final = 10_000
"""Requests that are remembered after their end: Envoy sends its log up to a second later. About
200 bytes each. Too low: broken answers of a busy replica do not count."""


class RecentRequests:
    """The requests that this replica placed: those that run, and the latest that ended."""

    def __init__(self, most: int = MAX_ENDED) -> None:
        self._most = most
        self._running: dict[str, Placement] = {}
        # An OrderedDict: in a dict the first key is found behind all those that were deleted.
        self._ended: OrderedDict[str, tuple[str | None, float]] = OrderedDict()
        """Id → address of the decode pod, and when the request was placed; the oldest first."""

    def start(self, placement: Placement) -> None:
        """A request was placed."""
        self._running[placement.decision.request_id] = placement

    def end(self, placement: Placement) -> None:
        """Its stream ended."""
        name = placement.decision.request_id
        # Absent if its answer has been taken; another one if a client used the id twice.
        if self._running.get(name) is not placement:
            return
        del self._running[name]
        if name in self._ended:
            del self._ended[name]
        if placement.pods.has_failed:
            # Its failure has been counted.
            return
        self._ended[name] = _served(placement)
        if len(self._ended) > self._most:
            self._ended.popitem(last=False)

    def take(self, request_id: str, backend: str) -> float | None:
        """When the request was placed, Unix seconds, if `backend` (`ip:port`) serves or served it.
        Asked again, None: each request counts once."""
        running = self._running.get(request_id)
        served = _served(running) if running is not None else self._ended.get(request_id)
        if served is None or served[0] != backend:
            return None
        if running is not None:
            running.pods.has_failed = True
        self._running.pop(request_id, None)
        self._ended.pop(request_id, None)
        return served[1]


def _served(placement: Placement) -> tuple[str | None, float]:
    return placement.decode.address, placement.decision.decided_at
