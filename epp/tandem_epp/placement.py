"""A request on its pods, from the pick to the end of its stream."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from tandem_contract.timing import parse_timing

from .backends.fleet import Fleet
from .backends.pods import Pod
from .estimates.request_load import PlacedPrompt, RequestLoad
from .ext_proc.messages import HeaderMutation, ResponseHeaders
from .history import Decision
from .metrics import Metrics
from .prompt_entries import PromptEntries
from .prompt_key import PromptForm
from .request import InferenceRequest
from .verdicts import PlacedPods


class PlacementObserver(Protocol):
    """Is told what happens to placements, after they took their counts or returned them."""

    def on_started(self, placement: "Placement") -> None:
        """The request was placed; may set its `number`."""

    def on_answered(self, placement: "Placement", response: ResponseHeaders) -> None:
        """The response headers passed."""

    def on_ended(self, placement: "Placement") -> None:
        """The stream ended."""


@dataclass(slots=True)
class Placement:
    """Counts one request on its pods: on the decode pod until `end`, on the prefill pod until the
    response headers pass, because the prefill is over then.

    Every count is taken once in `__post_init__` and returned exactly once, in whatever order
    responses and the end of the stream come. It holds Pods, not names: a pod that left the fleet
    meanwhile is still decremented.
    """

    mutation: HeaderMutation
    decode: Pod
    prefill: Sequence[Pod]
    """The choice, then the retries. The request counts on the choice alone."""
    request: InferenceRequest | None
    fleet: Fleet
    metrics: Metrics
    decision: Decision
    size: PlacedPrompt
    """What the request was predicted to take."""
    can_fall_back: bool = True
    """Whether the sidecar may serve a split request alone when the prefill fails."""
    observer: PlacementObserver | None = None
    number: int = field(init=False, default=0)
    """The observer's number for this placement."""
    _entries: PromptEntries | None = field(init=False, default=None)
    """The prompt in the prefix index; None for a request that is not read."""
    _pods: PlacedPods = field(init=False)
    _load: RequestLoad = field(init=False)
    _is_judged: bool = field(init=False, default=False)
    """Whether response headers have passed, and with them the outcome is counted."""
    _prefill_in_flight: Pod | None = field(init=False)
    """The prefill pod on which the request counts; None once that count is returned."""

    def __post_init__(self) -> None:
        self.decode.in_flight += 1
        generated = self.decode.counters.generated_tokens
        self._pods = PlacedPods(
            self.decode, self.prefill, self.decision.decided_at, generated, self.can_fall_back
        )
        self._pods.start(self.fleet)
        prefill = self.prefill[0].estimates if self.prefill else None
        self._load = RequestLoad(
            self.decode.estimates, prefill, self.size, self.decision.decided_at
        )
        self._prefill_in_flight = self.prefill[0] if self.prefill else None
        if self._prefill_in_flight is not None:
            self._prefill_in_flight.in_flight += 1
        if self.request is not None:
            # Before the answer, so that requests arriving now with this prefix go to the same pods.
            self._entries = PromptEntries(
                self.fleet.prefixes, self.request.chain, self.decode, self.prefill
            )
        if self.observer is not None:
            self.observer.on_started(self)

    def on_response_headers(self, response: ResponseHeaders, now: float) -> None:
        """Learn from the response's headers, which passed at `now` (Unix seconds)."""
        # The response begins when decoding does: the prefill is over.
        self._end_prefill()
        self.decision.status, self.decision.served = response.status, response.served
        self._correct_decode(response.served)
        if response.is_stream and response.status // 100 == 2:
            self._observe_first_token(response.path)
        if not self._is_judged:
            self._is_judged = True
            self._pods.judge_response(self.fleet, response, now)
        if self._entries is not None:
            self._entries.on_response_headers(response)
        report = parse_timing(response.timing or "")
        if response.status // 100 == 2:
            computing = self._computing_pod(response.prefill).estimates
            self._load.on_response(now, report, computing)
        else:
            self._load.end(now)
        if self.observer is not None:
            self.observer.on_answered(self, response)
        if response.timing is None:
            return
        self.decision.timing = report
        if (prompt_tokens := report.prompt_tokens) is not None:
            self._learn_scale(prompt_tokens)
            if report.cached is not None:
                self.metrics.observe_hit_ratio(report.cached, prompt_tokens, "measured")

    def end(self, now: float) -> None:
        """Return the counts that are left: the stream has ended at `now` (Unix seconds), and the
        request with it."""
        # The stream may end before response headers: then the prefill count is still held.
        self._end_prefill()
        if not self._is_judged:
            self._pods.judge_silence(self.fleet, now)
        if self._entries is not None:
            self._entries.withdraw()
        self._load.end(now)
        self.decode.in_flight -= 1
        self.decision.end()
        if self.observer is not None:
            self.observer.on_ended(self)

    def _observe_first_token(self, path: str | None) -> None:
        """Compare the prediction with what happened; the headers of a stream come with the first
        token."""
        decision = self.decision
        measured = decision.record_first_token()
        # After a failed hand-off another path was taken than the one predicted.
        is_as_planned = path is None or path == decision.path
        if decision.predicted_ttft is not None and decision.path is not None and is_as_planned:
            self.metrics.observe_ttft(decision.predicted_ttft, measured, decision.path)

    def _learn_scale(self, prompt_tokens: int) -> None:
        """Learn how many tokens texts have, from a prompt of `prompt_tokens` tokens."""
        request = self.request
        # How many tokens media have says nothing about texts.
        if request is not None and request.form not in (PromptForm.IDS, PromptForm.MEDIA):
            scales = self.fleet.token_scales
            scales.learn(request.model, request.assumed_tokens, prompt_tokens)
            for pod in (self.decode, *self.prefill[:1]):
                pod.token_scale = scales.scale(request.model)

    def _end_prefill(self) -> None:
        if self._prefill_in_flight is not None:
            self._prefill_in_flight.in_flight -= 1
            self._prefill_in_flight = None

    def _correct_decode(self, served: str | None) -> None:
        """Count the request on the pod at the address `served` from now on, if Envoy used another
        pod than the chosen one: an alternate, or a pod that a gateway chose itself."""
        if served is None or served == self.decode.address:
            return
        # An address of no pod is that of a proxy in between.
        pod = next((pod for pod in self.fleet if pod.address == served), None)
        if pod is not None:
            self.decode.in_flight -= 1
            pod.in_flight += 1
            self.decode = pod
            self._pods = replace(self._pods, decode=pod)
            if self._entries is not None:
                self._entries.move_decode(pod)
            self._load.move_decode(pod.estimates)

    def _computing_pod(self, prefill: str | None) -> Pod:
        """The pod that computed the prompt. A sidecar without a plan names backends by address."""
        return next(
            (pod for pod in self.prefill if prefill in (pod.name, pod.address)), self.decode
        )
