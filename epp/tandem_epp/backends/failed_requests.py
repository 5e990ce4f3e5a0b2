"""Which requests failed at which pods, to tell a request's fault from a pod's. Pure.

A request may carry something that every engine fails on. Its failures say nothing of a pod, but one
failure alone cannot be told from a pod's own. So failures are kept by the request's fingerprint,
and the second pod decides:

    it fails there too, and no pod answered it     the request is at fault: nothing counts
    a pod answers it, then or later                the pods that failed are at fault: all counts

Only pods that did the same part are compared: one may fail to prefill what another decodes.
"""

from collections import OrderedDict
from typing import Final, Generic, NamedTuple, TypeVar

MAX_REQUESTS: Final = 1024
"""Requests that are remembered. Lower: a client that varies its requests is not recognised."""
MEMORY: Final = 300.0
"""Seconds after its last failure for which a request is remembered."""
_MAX_FAILURES: Final = 64
"""Failures of one request whose times are remembered; older ones have faded."""

P = TypeVar("P")


class RequestPart(NamedTuple):
    """What a pod did of a request."""

    fingerprint: int
    is_prefill: bool = False
    """Whether it was the prefill of a split request."""


class FailedPart(Generic[P]):
    """A part that failed lately, with the same prompt each time."""

    __slots__ = ("failed_at", "is_answered", "is_faulty", "last")

    def __init__(self) -> None:
        self.failed_at: list[tuple[P, float]] = []
        """Each failure, by pod, until a pod answers; Unix seconds."""
        self.is_faulty = False
        """Whether it failed on two pods and was not answered: then no failure counts."""
        self.is_answered = False
        """Whether a pod has answered it since: then failures are those pods' own."""
        self.last = 0.0


class FailedRequests(Generic[P]):
    """The requests that failed lately."""

    def __init__(self) -> None:
        self.parts: OrderedDict[RequestPart, FailedPart[P]] = OrderedDict()
        """The one that failed last comes last."""

    def on_failure(self, part: RequestPart, pod: P, now: float) -> list[tuple[P, float]] | None:
        """A request failed at `pod`. None: it counts at the pod. Otherwise the request is at fault:
        the failures that were counted so far and must not."""
        self._drop_expired(now)
        failed = self.parts.pop(part, None) or FailedPart()
        failed.last = now
        self.parts[part] = failed
        if len(self.parts) > MAX_REQUESTS:
            self.parts.popitem(last=False)
        if failed.is_answered:
            return None
        earlier, was_faulty = failed.failed_at, failed.is_faulty
        failed.failed_at = [*earlier[-_MAX_FAILURES + 1 :], (pod, now)]
        failed.is_faulty = was_faulty or any(other is not pod for other, _ in earlier)
        if not failed.is_faulty:
            return None
        return [] if was_faulty else earlier

    def on_answer(self, part: RequestPart, now: float) -> list[tuple[P, float]]:
        """A pod answered the request. Returns the failures that were not counted and must be."""
        self._drop_expired(now)
        if (failed := self.parts.get(part)) is None:
            return []
        uncounted = failed.failed_at if failed.is_faulty else []
        failed.is_answered, failed.is_faulty, failed.failed_at = True, False, []
        return uncounted

    def _drop_expired(self, now: float) -> None:
        """Their pods may have left the fleet."""
        while self.parts and now - next(iter(self.parts.values())).last > MEMORY:
            self.parts.popitem(last=False)
