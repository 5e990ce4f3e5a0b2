"""Routers for the simulation: the real picker, and policies to compare it with."""

from collections.abc import Sequence
from random import Random
from typing import Final, Protocol

from tandem_contract import headers as wire
from tandem_contract.config import Backend, DisaggregatedServing
from tandem_contract.documents import parse_documents
from tandem_contract.paths import Role
from tandem_epp.backends.engine_page import Gauges, ScrapeResult
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend
from tandem_epp.ext_proc.messages import HttpRequest, ResponseHeaders
from tandem_epp.history import History
from tandem_epp.metrics import Metrics
from tandem_epp.picker import EndpointPicker
from tandem_epp.placement import Placement
from tandem_epp.scheduling.config import Routing, load_scheduling

from .engine import Engine, Work
from .workload import prompt_ids

BLOCK_TOKENS: Final = 64
"""KV block size that the simulated pods report."""

LLMD_DEFAULT: Final = """
plugins:
  - type: queue-scorer
  - type: kv-cache-utilization-scorer
  - type: prefix-cache-scorer
schedulingProfiles:
  - name: default
    plugins:
      - {pluginRef: queue-scorer, weight: 2}
      - {pluginRef: kv-cache-utilization-scorer, weight: 2}
      - {pluginRef: prefix-cache-scorer, weight: 3}
"""
"""The default weights of llm-d's scheduler."""


class Router(Protocol):
    """Chooses pods and learns from what it could see in reality."""

    def choose(self, work: Work, now: float) -> int:
        """The index of the pod for a request."""

    def on_first_token(self, work: Work, now: float) -> None:
        """The response of a request begins."""

    def on_end(self, work: Work, now: float) -> None:
        """The response of a request ends."""

    def on_scrape(self, now: float) -> None:
        """Metrics pages are read now."""


class Policy:
    """A router that learns nothing."""

    def __init__(self, engines: Sequence[Engine], seed: int) -> None:
        self.engines, self.random = engines, Random(seed)

    def on_first_token(self, work: Work, now: float) -> None:
        """Nothing."""

    def on_end(self, work: Work, now: float) -> None:
        """Nothing."""

    def on_scrape(self, now: float) -> None:
        """Nothing."""


class RoundRobin(Policy):
    """One pod after the other."""

    _next = 0

    def choose(self, work: Work, now: float) -> int:
        """The next pod."""
        self._next += 1
        return self._next % len(self.engines)


class LeastLoaded(Policy):
    """The pod with the fewest requests, which it knows exactly; ties at random."""

    def choose(self, work: Work, now: float) -> int:
        """The least loaded pod."""
        loads = [engine.running + len(engine.waiting) for engine in self.engines]
        least = min(loads)
        return self.random.choice([i for i, load in enumerate(loads) if load == least])


class Oracle(Policy):
    """Minimises the seconds until the first token, with perfect knowledge of rates, queues and
    caches, plus the harm that the prefill does to the decodes running there."""

    def choose(self, work: Work, now: float) -> int:
        """The cheapest pod; ties at random."""
        costs = [self._cost(engine, work) for engine in self.engines]
        least = min(costs)
        return self.random.choice([i for i, cost in enumerate(costs) if cost <= least])

    def _cost(self, engine: Engine, work: Work) -> float:
        prefill = (work.prompt_tokens - engine.cache.match(work.blocks)) / engine.rate
        return engine.remaining_prefill_seconds() + prefill


class RealPicker:
    """The product's picker over a fleet of unified pods, one for each engine."""

    def __init__(self, engines: Sequence[Engine], scheduling: str, seed: int) -> None:
        serving = DisaggregatedServing(enabled=False)
        document = parse_documents(scheduling, "router.yaml")[0]
        self._engines = engines
        self.fleet = Fleet()
        self.fleet.apply(
            [
                DiscoveredBackend(
                    Backend(
                        name=str(i), url=f"http://10.0.0.{i + 1}:8000", role=Role.UNIFIED,
                        models=("m",),
                    )
                )
                for i in range(len(engines))
            ],
            BLOCK_TOKENS,
        )  # fmt: skip
        routing = Routing(serving, load_scheduling(document, document.data, serving))
        self._picker = EndpointPicker(
            self.fleet, routing, Metrics(self.fleet), History(1), Random(seed)
        )
        self._placements: dict[int, Placement] = {}

    def choose(self, work: Work, now: float) -> int:
        """What the picker decides for the request's body."""
        body = b'{"model":"m","prompt":%b,"max_tokens":%d}' % (
            prompt_ids(work), work.output_tokens,
        )  # fmt: skip
        request = HttpRequest("POST", "/v1/completions", {wire.REQUEST_ID: f"r{work.index}"})
        placement = self._picker.place(request, body, now)
        self._placements[work.index] = placement
        return int(placement.decode.name)

    def on_first_token(self, work: Work, now: float) -> None:
        """The response headers pass the picker."""
        self._placements[work.index].on_response_headers(ResponseHeaders(None), now)

    def on_end(self, work: Work, now: float) -> None:
        """The stream through the picker ends."""
        self._placements.pop(work.index).end(now)

    def on_scrape(self, now: float) -> None:
        """The scraper reads every pod's gauges."""
        for engine, pod in zip(self._engines, self.fleet, strict=True):
            gauges = Gauges(engine.running, len(engine.waiting), engine.kv_usage)
            pod.apply_scrape(ScrapeResult(gauges, b"1", BLOCK_TOKENS, 1_000_000 // BLOCK_TOKENS))
        self.fleet.invalidate_views()
