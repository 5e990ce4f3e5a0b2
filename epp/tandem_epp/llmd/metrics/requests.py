"""Metrics of requests under llm-d's names, made of the decisions that the history keeps anyway.

    history.observer = metrics     from now on it is told of all decisions

Each call only appends to a list. The lists are counted at the scrape, or when many requests have
ended.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tandem_contract.commandline import parse_host_port
from tandem_contract.fast_metrics import OTHER, Histogram
from tandem_contract.paths import RoutingPath

from ...backends.fleet import Fleet
from ...placement.history import Decision, History
from .families import (
    ATTEMPTS,
    CACHED,
    DECISIONS,
    DURATION,
    ERRORS,
    FLOW,
    HIT_RATIO,
    INPUT,
    NO_POOL,
    PREDICTED,
    REWRITES,
    RUNNING,
    TOTAL,
    TTFT,
    Labels,
    Pool,
    counters,
    gauges,
    histograms,
)
from .pool import PoolCollector

MAX_MODELS: Final = 100
"""Names and priorities with metrics of their own, of models that some pod serves; later ones are
`other`. llm-d keeps 1,000, each with some two hundred lines on the page."""
_BATCH: Final = 256
"""Ended requests that are counted at once: half a millisecond."""

_SECONDS: Final = (
    0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30,
    45, 60, 120, 180, 240, 300, 360, 480, 600, 900, 1200, 1800, 2700, 3600,
)  # fmt: skip
_TTFT_SECONDS: Final = _SECONDS[: _SECONDS.index(120) + 1]
_TOKENS: Final = (
    1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32778, 65536, 131072, 262144,
    524288, 1048576,
)  # fmt: skip
_TENTHS: Final = tuple(tenth / 10 for tenth in range(11))
"""Buckets are llm-d's, 32778 included: dashboards add up series of both."""

_CODES: Final = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 413: "BadRequest",
    429: "ResourceExhausted", 500: "Internal", 503: "ServiceUnavailable",
}  # fmt: skip
"""llm-d's error codes of refused requests."""
_SPLIT: Final = RoutingPath.PREFILL_THEN_DECODE
_UNPLACED: Final = frozenset({"no_backend", "no_prefill_backend", "fault"})
"""Reasons of refusals for which pods were looked for."""


class _Flow(NamedTuple):
    """What requests that are counted together have in common."""

    asked: str
    """The model that the client named, or that serves the request."""
    target: str
    """The model that serves it."""
    priority: int


_OTHER: Final = _Flow(OTHER, OTHER, 0)


class _FlowFigures:
    """The figures of the requests of one flow."""

    def __init__(self, flow: _Flow) -> None:
        self.flow = flow
        self.placed = self.running = self.split = 0
        self.errors: dict[str, int] = {}
        self.duration, self.predicted = Histogram(_SECONDS), Histogram(_SECONDS)
        self.ttft = Histogram(_TTFT_SECONDS)
        self.input, self.cached = Histogram(_TOKENS), Histogram(_TOKENS)

    def begin(self, decision: Decision) -> None:
        """Count a placed request."""
        self.placed += 1
        self.running += 1
        if decision.path is _SPLIT:
            self.split += 1
        if decision.predicted_ttft is not None:
            self.predicted.observe(decision.predicted_ttft)

    def end(self, decision: Decision) -> None:
        """Count the end of a placed request."""
        self.running -= 1
        if decision.status is None:  # the client left before the answer
            return
        if decision.status >= 400:
            self.count_error("ModelServerError")
        if decision.ended is not None:
            self.duration.observe(decision.ended)
        if decision.measured_ttft is not None:
            self.ttft.observe(decision.measured_ttft)
        timing = decision.timing
        reported = timing.prompt_tokens if timing is not None else None
        if tokens := decision.prompt_tokens if reported is None else reported:
            self.input.observe(tokens)
        if timing is not None and timing.cached is not None:
            self.cached.observe(timing.cached)

    def count_error(self, code: str) -> None:
        """Count an error of this kind."""
        self.errors[code] = self.errors.get(code, 0) + 1


class RequestMetrics(Collector):
    """Counts decisions by model, and makes the metrics at the scrape."""

    def __init__(self, fleet: Fleet, pool: Pool = NO_POOL) -> None:
        self._fleet = fleet
        self._namespace = pool.namespace
        self._begun: list[Decision] = []
        self._ended: list[Decision] = []
        # By the values of a `_Flow`: to make one takes longer than to find its figures.
        self._flows: dict[tuple[str, str, int], _FlowFigures] = {}
        # Where a request that has not ended is counted, by its decision's id: its model may become
        # known meanwhile.
        self._running: dict[int, _FlowFigures] = {}
        self._answered: set[str] = set()
        """Names that no pod lists and with which an engine answered 2xx."""
        self._placed: dict[tuple[str, str, str], int] = {}
        """Model, name of the decode pod, its address → number of requests placed there."""
        self._unplaced: dict[str, int] = {}
        """Model → requests for which no pod was found."""
        self._rewritten: dict[tuple[str, str, str], int] = {}
        """InferenceModelRewrite, model that the client named, model that served → requests."""
        self._hit_ratio = Histogram(_TENTHS)

    def begin(self, decision: Decision) -> None:
        """A request was placed."""
        self._begun.append(decision)

    def end(self, decision: Decision) -> None:
        """The request has ended, or was refused."""
        self._ended.append(decision)
        if len(self._ended) >= _BATCH:
            self._count()

    def _count(self) -> None:
        """Count all that is listed. The begun first: a request is in both lists if it was short."""
        begun, self._begun = self._begun, []
        ended, self._ended = self._ended, []
        for decision in ended:
            self._learn_names(decision)
        for decision in begun:
            # Requests without a model are probes, and what the EPP does not read.
            if decision.model is not None:
                self._count_placed(decision)
        for decision in ended:
            if decision.path is None:
                self._count_refused(decision)
            elif (figures := self._running.pop(id(decision), None)) is not None:
                figures.end(decision)

    def _count_placed(self, decision: Decision) -> None:
        figures = self._running[id(decision)] = self._figures(decision)
        figures.begin(decision)
        asked, target, _ = figures.flow
        if decision.decode:
            chosen = decision.decode[0]
            key = target, chosen.name, chosen.address
            self._placed[key] = self._placed.get(key, 0) + 1
        if decision.rewritten_by:
            key = decision.rewritten_by, asked, target
            self._rewritten[key] = self._rewritten.get(key, 0) + 1
        if prompt := decision.prompt_tokens:
            self._hit_ratio.observe(min(1.0, decision.cached_tokens / prompt))

    def _count_refused(self, decision: Decision) -> None:
        """Count a request that the EPP answered, unless with a list of models."""
        status = decision.status or 0
        if status < 400:
            return
        figures = self._figures(decision)
        figures.count_error(_CODES.get(status, "Unknown"))
        if decision.reason in _UNPLACED:
            target = figures.flow.target
            self._unplaced[target] = self._unplaced.get(target, 0) + 1

    def _figures(self, decision: Decision) -> _FlowFigures:
        target = decision.model or ""
        asked = decision.asked or target
        if (figures := self._flows.get((asked, target, decision.priority))) is not None:
            return figures
        is_full = len(self._flows) >= MAX_MODELS
        # Clients choose names: one that no engine serves gets no metrics of its own.
        is_served = self._is_served(target) and self._is_served(asked)
        flow = _Flow(asked, target, decision.priority) if is_served and not is_full else _OTHER
        return self._flows.setdefault(flow, _FlowFigures(flow))

    def _is_served(self, model: str) -> bool:
        return not model or model in self._answered or self._fleet.knows_model(model)

    def _learn_names(self, decision: Decision) -> None:
        """Pods that list no models serve some all the same: an engine answered with 2xx."""
        status = decision.status
        if status is None or not 200 <= status < 300 or len(self._answered) >= MAX_MODELS:
            return
        self._answered.update(filter(None, (decision.model, decision.asked)))

    def collect(self) -> Iterable[Metric]:
        """The metrics now."""
        self._count()
        models = [(_labels(figures.flow), figures) for figures in self._flows.values()]
        plugin = {"plugin_name": "predicted-cost", "plugin_type": "predicted-cost"}
        return [
            *counters(TOTAL, ((row, each.placed) for row, each in models)),
            *counters(
                ERRORS,
                (
                    ({**row, "error_code": code}, number)
                    for row, each in models
                    for code, number in each.errors.items()
                ),
            ),
            *gauges(RUNNING, ((row, each.running) for row, each in models)),
            *histograms(DURATION, ((row, each.duration) for row, each in models)),
            *histograms(TTFT, (({**row, "streaming": "true"}, e.ttft) for row, e in models)),
            *histograms(INPUT, ((row, each.input) for row, each in models)),
            *histograms(CACHED, ((row, each.cached) for row, each in models)),
            *histograms(PREDICTED, (({**row, **plugin}, e.predicted) for row, e in models)),
            *counters(ATTEMPTS, self._attempt_rows()),
            *counters(DECISIONS, _decision_rows(models)),
            *counters(REWRITES, self._rewrite_rows()),
            *histograms(HIT_RATIO, [(_plugin("approx-prefix-cache-producer"), self._hit_ratio)]),
        ]

    def _rewrite_rows(self) -> Iterable[tuple[Labels, float]]:
        for (name, asked, target), number in self._rewritten.items():
            labels = {"model_rewrite_name": name, "model_name": asked, "target_model": target}
            yield labels, number

    def _attempt_rows(self) -> Iterable[tuple[Labels, float]]:
        """A pod that left the fleet leaves the metric with it."""
        for key in [key for key in self._placed if self._fleet.find(key[1]) is None]:
            del self._placed[key]
        for (model, pod, address), number in self._placed.items():
            port = str(parse_host_port(address).port) if address else ""
            labels = _attempt("success", model, pod, port)
            yield {**labels, "namespace": self._namespace}, number
        for model, number in self._unplaced.items():
            yield _attempt("failure", model, "", ""), number


def add_llmd_metrics(
    registry: CollectorRegistry, history: History, fleet: Fleet, pool: Pool = NO_POOL
) -> RequestMetrics:
    """Add to `registry` the metrics of the decisions of `history` and of the pods of `fleet`."""
    requests = RequestMetrics(fleet, pool)
    history.observer = requests
    registry.register(requests)
    registry.register(PoolCollector(fleet, pool))
    return requests


def _labels(flow: _Flow) -> dict[str, str]:
    """llm-d's labels of requests."""
    models = {"model_name": flow.asked, "target_model_name": flow.target}
    return {**FLOW, **models, "priority": str(flow.priority)}


def _attempt(status: str, model: str, pod: str, port: str) -> Labels:
    pods = {"endpoint_name": pod, "pod_name": pod, "namespace": "", "port": port}
    return {"status": status, "target_model_name": model, **pods}


def _plugin(name: str) -> dict[str, str]:
    return {"plugin_name": name, "plugin_type": name}


def _decision_rows(
    models: Iterable[tuple[dict[str, str], _FlowFigures]],
) -> Iterable[tuple[Labels, float]]:
    for row, each in models:
        labels = {**_plugin("disagg-profile-handler"), "model_name": row["model_name"] or "unknown"}
        yield {**labels, "decision_type": "prefill-decode"}, each.split
        yield {**labels, "decision_type": "decode-only"}, each.placed - each.split
