"""This EPP's own requests on one engine, set against what the engine counts of them.

vLLM counts the seconds of prefill over all requests that ended. While the EPP saw exactly as many
requests end, it knows whose seconds these are. From such a batch follow

    sample      the engine's own duration, if no two of the requests were under way together, or for
                a single one: then what others had in its batch is in it, a part of a step or two
    overhead    what is in a leg beyond the engine's own times: HTTP, tokenization

Requests of other routers, and those that one side counts before a scrape and the other one after
it, keep the numbers apart. Then nothing is learned until they meet, or until the engine is idle.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final

from msgspec import Struct

from tandem_planner.prefill_fit import PrefillSample, prefill_sample

from .engine_figures import EngineCounters, difference

_MOST_REQUESTS: Final = 32
"""Requests of a batch at most: over more of them, numbers that meet by chance say nothing."""
_OVERHEADS: Final = 32
"""Batches of which the median overhead is taken."""
_TOKENS_DIFFER: Final = 1.5
"""Factor by which two counts of the same tokens may differ."""


class EndedRequest(Struct, frozen=True):
    """A request that the engine counts now."""

    uncached: float
    """Prompt tokens that it computed."""
    cached: float
    leg: float | None = None
    """Seconds from sending the request to its first token; None: not known."""
    decodes: bool = False
    """Whether `leg` lasts until the last token instead: the answer came as a whole."""


class OwnRequests:
    """The requests of this EPP and its replicas on one engine since both sides last agreed."""

    def __init__(self) -> None:
        self._before: EngineCounters | None = None
        """The counters when they last agreed; None: not known."""
        self._open = 0
        self._is_serial = True
        """Whether no two requests were under way together."""
        self._ended: list[EndedRequest | None] = []
        """None: the engine counts it, but did not compute its prompt."""
        self._overheads: deque[float] = deque(maxlen=_OVERHEADS)
        self.overhead: float | None = None
        """Seconds by which a leg exceeds the engine's own times of it; None: not known. Every
        answer is corrected by it, so it is computed with each batch."""

    def begin(self) -> None:
        """A request was sent."""
        self._open += 1
        self._is_serial = self._is_serial and self._open == 1

    def end(self, request: EndedRequest | None) -> None:
        """A request that began was answered completely; None: its prompt came from elsewhere."""
        self._open -= 1
        self._ended.append(request)

    def drop(self) -> None:
        """A request that began has ended, and the engine may not count it."""
        self._open -= 1

    def restart(self) -> None:
        """Another process counts: from 0, and perhaps with another overhead."""
        self._overheads.clear()
        self.overhead = None
        self._start(None)

    def advance(self, counters: EngineCounters, *, is_idle: bool) -> PrefillSample | None:
        """Take in a scrape; `is_idle`: the engine had no request. Returns the engine's own duration
        of the requests since both sides last agreed, if that is known. Only a single one may have
        been beside others."""
        before = self._before
        if before is None:
            self._start(counters)
            return None
        counted, ended = round(difference(before.prefills, counters.prefills)), self._ended[:]
        if counted != len(ended):
            # At rest both sides have counted all that they ever will.
            is_final = is_idle and not self._open
            if is_final or max(counted, len(ended)) > _MOST_REQUESTS:
                self._start(counters)
            return None
        if not counted:
            return None
        is_serial = self._is_serial
        self._start(counters)
        requests = [request for request in ended if request is not None]
        seconds = difference(before.prefill_seconds, counters.prefill_seconds)
        if len(requests) < counted or seconds <= 0:
            return None
        excess = _excess(requests, before, counters)
        if excess is not None:
            self._overheads.append(excess / counted)
            self.overhead = max(0.0, median(self._overheads))
        tokens = difference(before.prefill_tokens, counters.prefill_tokens)
        return _sample(requests, tokens, seconds) if is_serial or counted == 1 else None

    def _start(self, counters: EngineCounters | None) -> None:
        self._before = counters
        self._ended.clear()
        self._is_serial = self._open <= 1


def _excess(
    ended: Sequence[EndedRequest], before: EngineCounters, after: EngineCounters
) -> float | None:
    """Seconds by which the legs of all requests exceed the engine's queue, prefill and, where legs
    last so long, decoding. None: not known for all legs, or the engine's seconds of decoding are
    not those of the legs."""
    legs = [request.leg for request in ended if request.leg is not None]
    decodes = {request.decodes for request in ended}
    if len(legs) < len(ended) or len(decodes) > 1:
        return None
    engine = difference(before.queue_seconds, after.queue_seconds)
    engine += difference(before.prefill_seconds, after.prefill_seconds)
    if True in decodes:
        if after.decode_seconds is None:
            return None
        engine += difference(before.decode_seconds, after.decode_seconds)
    return sum(legs) - engine


def _sample(ended: Sequence[EndedRequest], tokens: float, seconds: float) -> PrefillSample:
    """`tokens`: what the engine says it computed. Where that is far from what the EPP believed, the
    EPP was wrong about the cache. A small difference is that between its tokens of a text and the
    engine's: the EPP predicts in its own."""
    believed = sum(request.uncached for request in ended)
    factor = tokens / believed if tokens > 0 else 1.0
    if 1 / _TOKENS_DIFFER < factor < _TOKENS_DIFFER:
        factor = 1.0
    prompts = []
    for request in ended:
        uncached = request.uncached * factor
        prompts.append((uncached, max(0.0, request.uncached + request.cached - uncached)))
    return prefill_sample(prompts, seconds)
