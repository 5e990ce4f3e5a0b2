"""The latest decisions and their outcome, for `tandem trace`. Holds no prompt and no header.

decision = history.add(Decision(id, now))     for every request: one append
history.explain(decision, explanation)        keeps the predicted costs of the latest decisions
history.find(id)                              for `tandem trace`: a scan of all decisions kept
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice
from time import perf_counter
from typing import Final, Protocol

from msgspec import Struct

from tandem_contract.paths import RoutingPath
from tandem_contract.timing import Timing
from tandem_contract.trace import MAX_SAME_ID, CandidateTrace, CostTrace, DecisionTrace, kv_tier

from ..backends.pods import Pod
from ..estimates.cost_record import Prediction
from ..estimates.engine_figures import Gauges

MAX_TEXT: Final = 256
"""Characters kept of a model name, which a client chose."""
EXPLAINED: Final = 256
"""Latest decisions of which the costs of all candidates are kept: up to some 20 KB each with 100
pods. Older ones keep what was chosen."""


class Explanation(Protocol):
    """What a choice by cost was made from: `estimates.cost_record.CostRecord`."""

    def predict(self) -> Prediction:
        """When the first token is expected."""

    @property
    def itl(self) -> float:
        """Expected seconds between two tokens."""

    def traces(self) -> Sequence[CostTrace]:
        """The costs of all candidates; computed when a person asks."""


class DecisionObserver(Protocol):
    """Is told of all decisions; must not raise."""

    def begin(self, decision: "Decision") -> None:
        """A request was placed."""

    def end(self, decision: "Decision") -> None:
        """The request has ended, or was refused."""


class Candidate(Struct, frozen=True):
    """A pod's address and load when it was chosen. A copy, because a reference to the Pod would
    keep the prefix indexes of a removed pod in memory."""

    name: str
    address: str
    in_flight: int
    gauges: Gauges | None


def candidates(pods: Sequence[Pod]) -> tuple[Candidate, ...]:
    """The present address and load of each of `pods`."""
    return tuple([Candidate(p.name, p.address or "", p.in_flight, p.gauges) for p in pods])


class Decision:
    """The decision for one request. `status` and all that follows is filled in as the response
    passes and the stream ends."""

    __slots__ = (
        "asked",
        "began",
        "beyond",
        "cached_tokens",
        "decided_at",
        "decode",
        "ended",
        "explanation",
        "held",
        "join",
        "loaded_tokens",
        "measured_ttft",
        "model",
        "observer",
        "overhead",
        "path",
        "predicted_itl",
        "predicted_ttft",
        "prefill",
        "priority",
        "prompt_tokens",
        "reason",
        "request_id",
        "rewritten_by",
        "seconds",
        "served",
        "status",
        "timing",
    )

    def __init__(
        self,
        request_id: str,
        decided_at: float,
        *,
        path: RoutingPath | None = None,
        reason: str = "",
        began: float | None = None,
    ) -> None:
        """`began`: by `perf_counter`; None: now."""
        self.request_id = request_id
        self.decided_at = decided_at
        """Unix seconds."""
        self.seconds = 0.0
        """Duration of the decision, from the complete body on."""
        self.held = 0.0
        """Seconds that it waited before, in flow control."""
        self.path = path
        """None when the EPP answered the request itself."""
        self.reason = reason
        self.model: str | None = None
        """The model that serves the request."""
        self.asked: str | None = None
        """The model that the client named, where another one serves the request."""
        self.rewritten_by = ""
        """Name of the InferenceModelRewrite that says so; empty: a header does, or none."""
        self.priority = 0
        """That of the InferenceObjective that the request names."""
        self.decode: tuple[Candidate, ...] = ()
        """The choice, then its alternates."""
        self.prefill: tuple[Candidate, ...] = ()
        """The choice, then the retries."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        """Prompt tokens believed to be cached on the decode pod."""
        self.loaded_tokens = 0
        """Prompt tokens that are expected to be loaded from external storage."""
        self.status: int | None = None
        """HTTP status of the response."""
        self.timing: Timing | None = None
        """The times and token counts that the sidecar sent with the response headers."""
        self.ended: float | None = None
        """Seconds after the decision began at which the request ended."""
        self.explanation: Explanation | None = None
        self.predicted_ttft: float | None = None
        """Seconds from the beginning of the decision to the first token; None: not predicted."""
        self.predicted_itl: float | None = None
        """Seconds between two tokens; None: not predicted."""
        self.overhead = 0.0
        """The part of `predicted_ttft` that is no term of the costs."""
        self.beyond = self.join = 0.0
        """The parts of it that were expected beyond what is computed for the chosen pods, and after
        a hand-off on the decode pod: `estimates.overheads`."""
        self.measured_ttft: float | None = None
        """The same as it was; None if the answer was no stream."""
        self.served: str | None = None
        """`ip:port` of the pod that Envoy used; None if the gateway does not tell."""
        self.observer: DecisionObserver | None = None
        """Is told when the request begins and ends; None: no part needs it."""
        # Durations use the monotonic clock; `decided_at` is wall-clock time for the reader.
        self.began = perf_counter() if began is None else began

    def complete(self) -> float:
        """Record the duration of the decision, now that it is complete; returns it in seconds."""
        self.seconds = perf_counter() - self.began
        # The history keeps thousands of these: a client must not choose their size.
        self.model = self.model[:MAX_TEXT] if self.model else None
        self.asked = self.asked[:MAX_TEXT] if self.asked else None
        return self.seconds

    def record_reply(self, status: int, reason: str) -> None:
        """Record that the EPP answers the request itself."""
        self.status, self.reason = status, reason

    def begin(self) -> None:
        """The request was placed."""
        if self.observer is not None:
            self.observer.begin(self)

    def record_first_token(self) -> float:
        """Record that the first token passed now; returns the seconds that it took."""
        self.measured_ttft = perf_counter() - self.began
        return self.measured_ttft

    def end(self) -> None:
        """Record the end of the request."""
        self.ended = perf_counter() - self.began
        if self.observer is not None:
            self.observer.end(self)

    def trace(self) -> DecisionTrace:
        """The JSON form that `tandem trace` reads."""
        return DecisionTrace(
            request_id=self.request_id,
            decided=self.decided_at,
            decision_seconds=self.seconds,
            held=self.held,
            model=self.model or "",
            asked=self.asked or "",
            priority=self.priority,
            path=self.path,
            reason=self.reason,
            decode=tuple(map(_candidate_trace, self.decode)),
            prefill=tuple(map(_candidate_trace, self.prefill)),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            loaded_tokens=self.loaded_tokens,
            tier=kv_tier(self.cached_tokens, self.loaded_tokens),
            status=self.status,
            timing=self.timing,
            ended=self.ended,
            costs=tuple(self.explanation.traces()) if self.explanation is not None else (),
            predicted_ttft=self.predicted_ttft,
            measured_ttft=self.measured_ttft,
            overhead=self.overhead,
            served=self.served or "",
            predicted_itl=self.predicted_itl,
        )


class History:
    """The latest decisions, oldest first."""

    def __init__(self, size: int) -> None:
        """`size`: the number of decisions kept; 0 keeps none."""
        # A full deque drops its oldest element on append, without copying.
        self._decisions: deque[Decision] = deque(maxlen=size)
        self._explained: deque[Decision] = deque()
        self.observer: DecisionObserver | None = None
        """Is told of all decisions that are added from now on; None: no part needs it."""

    def add(self, decision: Decision) -> Decision:
        """Keep `decision` and drop the oldest one if the history is full. The caller goes on
        filling in the same object, so a request under way can be looked up too."""
        self._decisions.append(decision)
        decision.observer = self.observer
        return decision

    def explain(self, decision: Decision, explanation: Explanation, beyond: float = 0.0) -> None:
        """Keep how the choice of `decision` was made, and drop the explanation of an old one.
        `beyond`: seconds until the first token beyond those that it predicts for the pods, with
        those of the hand-off."""
        first_token, handoff, join = explanation.predict()
        decision.predicted_ttft = first_token - handoff + beyond
        decision.overhead, decision.beyond, decision.join = beyond - handoff, beyond, join
        decision.predicted_itl = explanation.itl
        if not self._decisions.maxlen:
            return
        decision.explanation = explanation
        self._explained.append(decision)
        if len(self._explained) > EXPLAINED:
            self._explained.popleft().explanation = None

    def latest(self, count: int) -> list[DecisionTrace]:
        """The `count` latest decisions, newest last."""
        newest_first = islice(reversed(self._decisions), count)
        return [decision.trace() for decision in newest_first][::-1]

    def find(self, request_id: str) -> list[DecisionTrace]:
        """The decisions for `request_id`, newest last, at most MAX_SAME_ID of them: clients reuse
        ids."""
        # A linear scan: people ask rarely, and an index would cost every request.
        same_id = [decision for decision in self._decisions if decision.request_id == request_id]
        return [decision.trace() for decision in same_id[-MAX_SAME_ID:]]


def _candidate_trace(candidate: Candidate) -> CandidateTrace:
    gauges = candidate.gauges
    return CandidateTrace(
        candidate.name,
        candidate.address,
        candidate.in_flight,
        waiting=gauges.waiting if gauges else None,
        kv_usage=gauges.kv_usage if gauges else None,
    )
