"""One request on the estimates of its pods, from its placement to its end.

The prefill counts on the pod that computes the prompt until the first token, the decode on the
decode pod from then on. Each count is taken once and returned once, in whatever order the events
come.
"""

from typing import Final

import msgspec

from tandem_contract.fabric_classes import FabricClass
from tandem_contract.overlaps import Overlap
from tandem_contract.timing import UNKNOWN, Timing
from tandem_planner.objective import NO_OBJECTIVE, Objective, answer_weight

from .answer_lengths import RunningAnswer
from .overheads import waited_seconds
from .own_requests import EndedRequest
from .pod_estimates import PodEstimates
from .prefill_queue import QueuedPrefill

_LEAST_SHARE: Final = 0.1
"""Share of a leg that is taken for the prefill at least, whatever overhead others had."""
_MOST_DECODING: Final = 0.5
"""Share of a leg that decoding takes at most in one that tells when its first token came: how long
a decode step takes is known only roughly."""


class PlacedPrompt(msgspec.Struct, frozen=True):
    """A request's size when it was placed, in tokens."""

    prompt: int = 0
    """0 for a request that is not read: then it is not counted."""
    cached: int = 0
    """On the pod that computes the prompt, or there by the time of its turn."""
    cached_on_decode: int = 0
    """On the decode pod: what lies beyond is transferred."""
    output: float = 0.0
    """Expected."""
    is_stream: bool = False
    """Whether the answer is a stream: only such a response can begin before its last token."""
    loaded: int = 0
    """Tokens of `cached` that the pod loads from external storage."""
    limit: int = 0
    """Tokens that the answer has at most; 0: not known."""


class RequestLoad:
    """Counts one request."""

    def __init__(  # noqa: PLR0917 - where and what was placed, in its order
        self,
        decode: PodEstimates,
        prefill: PodEstimates | None,
        size: PlacedPrompt,
        now: float,
        fabric: FabricClass | None = None,
        objective: Objective = NO_OBJECTIVE,
    ) -> None:
        """`prefill`: the prefill pod; None: the decode pod computes the prompt. `fabric`: the class
        of the pair; None: not known. `objective`: of the model."""
        self._decode, self._size, self._placed_at = decode, size, now
        self._is_split = self._is_transferring = prefill is not None
        self._fabric = fabric
        self._computing = prefill if prefill is not None else decode
        self._is_decoding = False
        lengths = decode.running.lengths.with_limit(size.limit, size.output)
        self._answer = RunningAnswer(lengths, objective)
        self._entry: QueuedPrefill | None = None
        """The prefill in the queue; None once it is over, and for a request that is not read."""
        self._counting: PodEstimates | None = self._computing
        """The pod whose engine will count the request next; None once it has, or if another pod
        serves it."""
        self._ended: EndedRequest | None = None
        """What the engine will count; None: not known."""
        self._is_answered = False
        self._overlap: Overlap | None = None
        """The prompt while it is under way; None for a request that is not read."""
        self._computing.own.begin()
        if self._is_transferring:
            decode.placed_transfers.begin(fabric)
        if size.prompt:
            self._place(now)

    def _place(self, now: float) -> None:
        size, decode, computing = self._size, self._decode, self._computing
        uncached = max(1, size.prompt - size.cached)
        seconds = computing.prefill.best.seconds(uncached, size.cached)
        computing.count_tokens(now)
        self._entry = computing.queue.add(seconds, now, has_first_token=size.is_stream)
        computing.utilization.add(seconds, now)
        computing.pace.add(seconds, now)
        self._overlap = computing.overlaps.begin(decode.sidecar)
        # The new prefill is the last of the queue.
        self._weigh(computing.queue.seconds_left(now))
        own = uncached + size.loaded
        computing.count_placed(seconds, own + (0.0 if self._is_split else size.output))
        decode.awaiting_prefill += 1
        decode.running.add(self._answer)
        if self._is_split:
            decode.count_placed(seconds, size.prompt - size.cached_on_decode + size.output)

    def on_response(
        self,
        now: float,
        timing: Timing = UNKNOWN,
        computing: PodEstimates | None = None,
        fabric: FabricClass | None = None,
    ) -> None:
        """The response begins; `computing`: the pod that computed the prompt, None: the chosen one;
        `fabric`: the class of its pair with the decode pod, None: not known. Learns from it."""
        self._is_answered = True
        self._end_transfer()
        if computing is None:
            fabric = self._fabric
        elif self._is_split and fabric not in (None, self._fabric):
            # A retry on a pod that is nearer or farther than the chosen one.
            self._decode.placed_transfers.add(fabric)
        self._begin_answer(timing, now)
        if self._is_before_first_token(timing):
            if self._entry is not None:
                self._entry.has_first_token = False
                self._computing.changed()
        elif self._entry is not None:
            self._count(-1)
            self._end_prefill(self._entry, now)
            self._is_decoding = True
            self._weigh(now - self._placed_at)
            self._count(1)
        pod = computing if computing is not None else self._computing
        if pod is not self._computing:
            self._stop_counting()
        if not self._size.prompt:
            return
        self._learn(pod, timing, now)
        self._end_overlap()
        if self._is_split and self._counting is self._computing:
            # The prefill engine is done; the decode engine counts the request at its end.
            self._counting.own.end(self._ended)
            self._counting, self._ended = self._decode, None
            self._decode.own.begin()
        if timing.transfer and timing.bytes:
            transferred = (timing.prompt or self._size.prompt) - self._size.cached_on_decode
            self._decode.add_transfers((1, timing.bytes, timing.transfer), now, fabric)
            self._decode.transfer.add_size(transferred, timing.bytes)
            self._decode.exposed.add(waited_seconds(timing), timing.transfer)
            self._decode.learned()

    def move_decode(self, decode: PodEstimates, fabric: FabricClass | None = None) -> None:
        """Another pod than the chosen one serves the request; `fabric`: the class of the chosen
        prefill pod's pair with it."""
        if self._counting is self._decode:
            self._stop_counting()
        self._count(-1)
        if self._is_transferring:
            self._decode.placed_transfers.end(self._fabric)
            decode.placed_transfers.begin(fabric)
        self._decode, self._fabric = decode, fabric
        self._count(1)
        if self._overlap is not None:
            # Its sidecar has sent the prompt.
            self._overlap.end()
            self._overlap = self._computing.overlaps.begin(decode.sidecar)

    def end(self, now: float) -> None:
        """The request ended, answered or not."""
        if self._counting is not None and self._is_answered and self._size.prompt:
            self._counting.own.end(self._ended)
            self._counting = None
        self._stop_counting()
        self._end_transfer()
        self._end_overlap()
        self._decode.count_tokens(now)
        self._decode.running.end(self._answer)
        self._count(-1)
        self._is_decoding = False
        if self._entry is not None:
            self._end_prefill(self._entry, now)

    def _is_before_first_token(self, timing: Timing) -> bool:
        """Whether the response begins before the prompt is computed: vLLM sends the headers of a
        stream at once. Sidecars and Tandem's engine, which report, send them with the first token;
        after a hand-off the prompt is computed in any case."""
        is_reported = timing.leg is not None or timing.compute is not None
        return self._size.is_stream and not self._is_split and not is_reported

    def _begin_answer(self, timing: Timing, now: float) -> None:
        if self._size.is_stream:
            # Where the headers come before the prefill, it counts too: as one token for each step.
            self._decode.count_tokens(now)
            self._decode.running.begin(self._answer)
        elif timing.generated:
            self._answer.lengths.add(timing.generated)

    def _end_transfer(self) -> None:
        if self._is_transferring:
            self._decode.placed_transfers.end(self._fabric)
            self._is_transferring = False

    def _stop_counting(self) -> None:
        if self._counting is not None:
            self._counting.own.drop()
            self._counting = None

    def _count(self, requests: int) -> None:
        """Add to the decode pod's count that this request is in, if it is in one."""
        if self._is_decoding:
            self._decode.decodes += requests
        elif self._entry is not None:
            self._decode.awaiting_prefill += requests
        if self._is_decoding or self._entry is not None:
            if requests > 0:
                self._decode.running.add(self._answer)
            else:
                self._decode.running.remove(self._answer)
        self._decode.changed()

    def _weigh(self, first_token: float) -> None:
        """Weigh the answer by when its first token came, or is expected: in so many seconds."""
        self._answer.weight = answer_weight(first_token, self._answer.objective)

    def _end_overlap(self) -> None:
        if self._overlap is not None:
            self._overlap.end()
            self._overlap = None

    def _end_prefill(self, entry: QueuedPrefill, now: float) -> None:
        self._entry = None
        self._computing.count_tokens(now)
        self._computing.queue.remove(entry, now)
        self._computing.changed()

    def _learn(self, pod: PodEstimates, timing: Timing, now: float) -> None:
        size = self._size
        # A retry ran on another pod than the chosen one: when it began is not known.
        if pod is not self._computing and timing.compute is None:
            return
        prompt = timing.prompt or size.prompt
        cached = timing.cached if timing.cached is not None else min(size.cached, prompt)
        computed = timing.computed if timing.computed is not None else max(1, prompt - cached)
        leg = self._leg(timing)
        self._ended = EndedRequest(computed, cached, timing.leg, (timing.generated or 1) > 1)
        if (interval := self._interval(pod, timing, leg)) is None:
            return
        is_known = self._is_all_known(pod, timing.inflight)
        if is_known:
            pod.observed_at = now
        is_last = not len(pod.queue)
        samples = pod.busy.add(*interval, computed, cached, is_last=is_last, is_known=is_known)
        for sample in samples:
            pod.prefill.add(sample, now)
            pod.learned()

    def _is_all_known(self, pod: PodEstimates, inflight: int | None) -> bool:
        """Whether this EPP counts all prompts that the sidecar had under way at the pod beside this
        one. It counts a prompt from placement to response, longer than the sidecar does; but only
        to the end if the client leaves, when the sidecar may still wait for the engine. So it
        counts fewer if another router placed some, or if clients left. Both kinds of prompts take a
        part of the engine's time, and what they have computed is not known."""
        if inflight is None or self._overlap is None:
            return True
        # Of a pod that took over after a failure, it is not known what was beside the prompt there.
        return inflight <= (self._overlap.others if pod is self._computing else 0)

    def _leg(self, timing: Timing) -> float | None:
        """Seconds from sending the request to its first token; None: not known."""
        if timing.leg is None:
            return None
        decoding = max(0, (timing.generated or 1) - 1) * self._decode.decode.cost.step
        return timing.leg - decoding if decoding <= _MOST_DECODING * timing.leg else None

    def _interval(
        self, pod: PodEstimates, timing: Timing, leg: float | None
    ) -> tuple[float, float] | None:
        """From when to when the prompt was computed, by the best source; None: not known."""
        placed = self._placed_at
        if timing.compute is not None:
            start = placed + (timing.queue or 0.0)
            return start, start + timing.compute
        if leg is None:
            return None
        # What is sent before the engine begins, and what it takes to answer, is no prefill.
        overhead = min(pod.own.overhead or 0.0, (1.0 - _LEAST_SHARE) * leg)
        return placed + overhead, placed + leg
