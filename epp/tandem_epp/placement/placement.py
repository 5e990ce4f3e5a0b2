"""A request that this EPP placed, from the pick to the end of its stream."""

from collections.abc import Sequence
from typing import Final, Protocol

from tandem_contract import headers as wire
from tandem_contract.paths import RoutingPath
from tandem_contract.timing import OUT_OF_RANGE, UNKNOWN, Timing, parse_timing

from ..backends.pods import Pod
from ..choice.routing import AddedHeader
from ..estimates.overheads import beyond_terms
from ..exchange import HeaderChanges, ResponseHeaders
from ..metrics.counters import Metrics
from ..request.answered_model import AnsweredModel
from .counted_request import CountedRequest
from .history import Decision

_SPLIT: Final = RoutingPath.PREFILL_THEN_DECODE
_FALLBACK: Final = RoutingPath.FALLBACK


class PlacementObserver(Protocol):
    """Is told what happens to placements, after they took their counts or returned them."""

    def on_started(self, placement: "Placement") -> None:
        """The request was placed; may set its `number`."""

    def on_answered(self, placement: "Placement", response: ResponseHeaders) -> None:
        """The response headers passed."""

    def on_ended(self, placement: "Placement") -> None:
        """The stream ended."""


class Placement:
    """Tells of one request what happens to it: to its pods, metrics, history and the observer."""

    __slots__ = (
        "_unreported_path",
        "added_headers",
        "answered_model",
        "beyond",
        "body",
        "decision",
        "metrics",
        "mutation",
        "number",
        "observer",
        "pods",
    )

    def __init__(  # noqa: PLR0917 - the parts that are told, in their order
        self,
        mutation: HeaderChanges,
        pods: CountedRequest,
        metrics: Metrics,
        decision: Decision,
        observer: PlacementObserver | None = None,
        added_headers: Sequence[AddedHeader] = (),
        answered_model: AnsweredModel | None = None,
        body: bytes | None = None,
    ) -> None:
        self.mutation = mutation
        self.pods = pods
        """The request on its pods."""
        self.metrics, self.decision, self.observer = metrics, decision, observer
        self.added_headers = added_headers
        """What the response tells the client in addition."""
        self.answered_model = answered_model
        """Names the model in the answer as the client did; None: it stays."""
        self.body = body
        """The request's body if its model was replaced, until it is taken."""
        self.beyond: float | None = None
        """Seconds that the first token took beyond the terms of the cost, on the path of the
        decision: `estimates.overheads`. None: not measured."""
        self.number = 0
        """The observer's number for this placement."""
        self._unreported_path: RoutingPath | None = None
        """The path of which no sidecar tells: the client and the metrics hear of it from here. A
        prefill pod that serves alone has none, nor has a backend that somebody else runs."""
        if observer is not None:
            try:
                observer.on_started(self)
            except Exception as err:  # noqa: BLE001 - an exception would reset the request
                self.metrics.faults.count("share", err)

    @property
    def decode(self) -> Pod:
        """The decode pod: the chosen one, until Envoy tells that it used another."""
        return self.pods.decode

    @property
    def prefill(self) -> Sequence[Pod]:
        """The prefill pods: the choice, then the retries."""
        return self.pods.prefill

    def take_body(self) -> bytes | None:
        """The changed body, once: it must not stay in memory as long as the answer takes."""
        body, self.body = self.body, None
        return body

    @property
    def response_headers(self) -> tuple[tuple[str, str], ...]:
        """The headers that the client gets in addition: path and backends of a request of which no
        sidecar tells, and what the configuration adds. Raises nothing: without them the client gets
        its answer, too."""
        path = self._unreported_path
        if not (path or self.added_headers):
            return ()
        headers = list[tuple[str, str] | None]()
        if path is not None:
            headers += ((wire.ROUTING_PATH, path), (wire.DECODE_BACKEND, self.decode.name))
        if path is _FALLBACK:
            headers.append((wire.PREFILL_BACKEND, self.decode.name))
        if not self.added_headers:
            return tuple(header for header in headers if header is not None)
        with self.metrics.faults.contained("session"):
            prefill = self.prefill[0] if self.prefill else None
            served = self.decision.served
            headers += [
                each.response_header(self.decode, prefill, served) for each in self.added_headers
            ]
        return tuple(header for header in headers if header is not None)

    def on_response_headers(self, response: ResponseHeaders, now: float) -> None:
        """Learn from the response's headers, which passed at `now` (Unix seconds). Raises
        nothing: the headers go on to the client, whatever was learned."""
        self.decision.status, self.decision.served = response.status, response.served
        # A path means that a sidecar answered. Only requests that generate have prompt tokens.
        # Whether a split request was handed off, only its sidecar knows.
        if response.path is None and self.decision.prompt_tokens > 0:
            path = self.decision.path
            self._unreported_path = None if path is _SPLIT else path
        try:
            self._learn(response, now)
        # Here and in `end` instead of `contained`, which calls three functions more.
        except Exception as err:  # noqa: BLE001 - statistics must not cost an answer
            self.metrics.faults.count("learn", err)

    def end(self, now: float) -> None:
        """Return the counts that are left: the stream has ended at `now` (Unix seconds), and the
        request with it. Raises nothing."""
        try:
            self.pods.end(now)
        except Exception as err:  # noqa: BLE001 - as above
            self.metrics.faults.count("end", err)
        try:
            self.decision.end()
            if self._unreported_path is not None:
                self.metrics.count_unreported(self._unreported_path)
            if self.observer is not None:
                self.observer.on_ended(self)
        except Exception as err:  # noqa: BLE001 - as above
            self.metrics.faults.count("end", err)

    def _learn(self, response: ResponseHeaders, now: float) -> None:
        report = UNKNOWN if response.timing is None else parse_timing(response.timing)
        # vLLM sends the headers of a stream at once; a sidecar, with the first token.
        is_reported = response.timing is not None or response.path is not None
        if is_reported and response.is_stream and response.status // 100 == 2:
            self._observe_first_token(response.path, report, now)
        if report is OUT_OF_RANGE:
            self.metrics.faults.ignore_timing(response.prefill or self.decode.name)
        self.pods.on_response_headers(response, now, report)
        if self.observer is not None:
            self.observer.on_answered(self, response)
        if response.timing is None:
            return
        self.decision.timing = report
        if (prompt_tokens := report.prompt_tokens) is not None and report.cached is not None:
            self.metrics.observe_hit_ratio(report.cached, prompt_tokens, "measured")

    def _observe_first_token(self, path: str | None, report: Timing, now: float) -> None:
        """Compare the prediction with what happened."""
        decision = self.decision
        measured = decision.record_first_token()
        # After a failed hand-off another path was taken than the one predicted.
        is_as_planned = path is None or path == decision.path
        if decision.predicted_ttft is not None and decision.path is not None and is_as_planned:
            self.metrics.observe_ttft(decision.predicted_ttft, measured, decision.path)
            terms = decision.predicted_ttft - decision.beyond
            self.beyond = beyond_terms(measured, terms, decision.join, report)
            self.pods.fleet.overheads.learn(decision.path, self.beyond, now)
