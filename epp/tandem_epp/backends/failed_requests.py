"""Which requests failed at which pods, to tell a request's fault from a pod's. Pure.

A request may carry something that every engine fails on. Its failures say nothing of a pod, but one
failure alone cannot be told from a pod's own. So failures are kept by the request's fingerprint,
and the second pod decides:

    it fails there too, and no pod answered it     the request is at fault: nothing counts
    a pod answers it                               the pods that failed are at fault
"""

from collections import OrderedDict
from typing import Final, Generic, TypeVar

MAX_REQUESTS: Final = 1024
"""Requests that are remembered. Lower: a client that varies its requests is not recognised."""
MEMORY: Final = 300.0
"""Seconds after its last failure for which a request is remembered."""
_MAX_FAILURES: Final = 64
"""Failures of one request whose times are remembered; older ones have faded."""

P = TypeVar("P")
T = TypeVar("T")


class FailedRequest(Generic[P]):
    """A request that failed lately."""

    __slots__ = ("failed_at", "is_answered", "last")

    def __init__(self, last: float) -> None:
        self.failed_at: list[tuple[P, float]] = []
        """Each failure that counts, by pod; Unix seconds."""
        self.is_answered = False
        """Whether a pod has answered it since: then failures are those pods' own."""
        self.last = last


class FailedRequests(Generic[P]):
    """The requests that failed lately."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, FailedRequest[P]] = OrderedDict()
        self._faulty: OrderedDict[int, float] = OrderedDict()
        """Fingerprints of requests that failed alike on two pods, and when last."""

    def __bool__(self) -> bool:
        return bool(self._requests or self._faulty)

    def on_failure(self, fingerprint: int, pod: P, now: float) -> list[tuple[P, float]] | None:
        """A request failed at `pod`. None: it counts at the pod. Otherwise the request is at fault:
        the failures that were counted so far and must not."""
        last = self._faulty.pop(fingerprint, None)
        if last is not None and now - last <= MEMORY:
            self._faulty[fingerprint] = now
            return []
        request = self._requests.pop(fingerprint, None)
        if request is None or now - request.last > MEMORY:
            request = FailedRequest(now)
        if not request.is_answered and any(other is not pod for other, _ in request.failed_at):
            self._remember(self._faulty, fingerprint, now)
            return request.failed_at
        request.last = now
        request.failed_at = [*request.failed_at[-_MAX_FAILURES + 1 :], (pod, now)]
        self._remember(self._requests, fingerprint, request)
        return None

    def on_answer(self, fingerprint: int) -> None:
        """A pod answered the request."""
        self._faulty.pop(fingerprint, None)
        if (request := self._requests.get(fingerprint)) is not None:
            request.is_answered = True

    @staticmethod
    def _remember(table: OrderedDict[int, T], fingerprint: int, value: T) -> None:
        table[fingerprint] = value
        if len(table) > MAX_REQUESTS:
            table.popitem(last=False)
