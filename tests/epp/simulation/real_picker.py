"""The product's picker as a router of the simulation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from random import Random
from typing import Final

from tandem_contract import headers as wire
from tandem_contract.chains import Chain
from tandem_contract.config import Backend, DisaggregatedServing, ExternalStorage
from tandem_contract.documents import parse_documents
from tandem_contract.paths import Role
from tandem_contract.slo import Slo
from tandem_contract.timing import Timing
from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend, Pod
from tandem_epp.estimates.engine_figures import EngineCounters, Gauges
from tandem_epp.exchange import HttpRequest, ResponseHeaders
from tandem_epp.llmd.plugins.config import load_scheduling
from tandem_epp.metrics.counters import Metrics
from tandem_epp.placement.history import History
from tandem_epp.placement.picker import EndpointPicker
from tandem_epp.placement.placement import Placement
from tandem_epp.placement.preparation import Preparation
from tandem_epp.prefix.blocks import BlockMatch
from tandem_epp.prefix.kv_events.collector import PreciseMatch
from tandem_epp.prefix.prefix_tree import PrefixMatch, PrefixTree
from tandem_epp.process.configuration import Routing
from tandem_planner.objective import make_objective
from tandem_planner.simulation.block_pool import BLOCK
from tandem_planner.simulation.engine import Engine
from tandem_planner.simulation.routers import Page, Route, Router
from tandem_planner.simulation.work import Work

from .workload import body

MODEL: Final = "m"
"""What all pods serve."""
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


class Reports(Enum):
    """What responses tell of a prefill, in the timing header."""

    ENGINE = auto()
    """Everything: the engine writes the header itself."""
    SIDECAR = auto()
    """What a sidecar sees of vLLM: the duration of the leg, and `usage`."""
    NOTHING = auto()
    """No sidecar: there is no header, and no sign of the first token."""


@dataclass(frozen=True, slots=True)
class PickerSettings:
    """How the picker runs."""

    scheduling: str = "{}"
    """Its configuration, in YAML."""
    roles: Sequence[Role] = ()
    """The role of each pod; empty: all unified."""
    has_exact_caches: bool = False
    """Whether it knows the blocks of every pod, as from KV events; else it infers them from what it
    routed."""
    reports: Reports = Reports.ENGINE
    knows_stores: bool = False
    """Whether it knows what the stores of pods have, as from KV events."""
    says_max_tokens: bool = True
    """Whether requests say the length of their answers."""


class ExactPrefixes(PrefixTree[Pod]):
    """An index that knows what each pod caches now. What was placed it infers as always."""

    def __init__(self, engines: Sequence[Engine], pods: Iterable[Pod]) -> None:
        super().__init__()
        self._engines, self._pods = engines, pods
        self.blocks: Sequence[int] = ()
        """Blocks of the prompt that is looked up next."""

    def match(self, chain: Chain) -> PrefixMatch[Pod]:
        """What each pod has of the prompt."""
        placed = super().match(chain).placed
        tokens = [engine.pool.match(self.blocks) * BLOCK for engine in self._engines]
        return PrefixMatch([((pod,), tokens[int(pod.name)]) for pod in self._pods], placed)


class RealPicker(Router):
    """The picker over a fleet with one pod for each engine. It sees what passes Envoy (bodies,
    response headers, ends of streams) and metrics pages."""

    def __init__(
        self, engines: Sequence[Engine], seed: int, settings: PickerSettings | None = None
    ) -> None:
        self._settings = settings or PickerSettings()
        roles = self._settings.roles or [Role.UNIFIED] * len(engines)
        serving = DisaggregatedServing(enabled=any(role is not Role.UNIFIED for role in roles))
        document = parse_documents(self._settings.scheduling, "router.yaml")[0]
        self.fleet = Fleet()
        self._exact = ExactPrefixes(engines, self.fleet)
        if self._settings.has_exact_caches:
            self.fleet.prefixes = self._exact
        self._engines = engines
        self.fleet.stores.is_enabled = self._settings.knows_stores
        stores = [_storage(engine) for engine in engines]
        self.fleet.apply(map(_discovered, range(len(roles)), roles, stores), BLOCK_TOKENS)
        routing = Routing(serving, load_scheduling(document, document.data, serving))
        self.fleet.objectives = routing.scheduling.objectives
        self.picker = EndpointPicker(
            self.fleet, routing, Metrics(self.fleet), History(1), Random(seed)
        )
        self._placements: dict[int, Placement] = {}
        self.subset: frozenset[str] | None = None
        """Addresses of the pods that the next request may go to, as flow control has it; None:
        any."""

    def meet(self, slo: Slo) -> None:
        """Requests that come from now on are to meet `slo`."""
        self.fleet.objectives = {MODEL: make_objective(slo.ttft, slo.itl, slo.attainment)}

    def choose(self, work: Work, now: float, replica: int = 0) -> Route:
        """What the picker decides for the request's body."""
        headers = {wire.REQUEST_ID: f"r{work.index}"}
        subset = None if work.only is None else frozenset({_address(work.only)})
        known = Preparation(precise=self._precise(work), subset=self.subset)
        request = HttpRequest("POST", "/v1/completions", headers, subset, known)
        self._exact.blocks = work.blocks
        data = body(work, says_max_tokens=self._settings.says_max_tokens)
        placement = self._placements[work.index] = self.picker.place(request, data, now)
        prefill = int(placement.prefill[0].name) if placement.prefill else None
        return Route(int(placement.decode.name), prefill)

    def on_response(self, work: Work, status: int, now: float) -> None:
        """The response headers pass."""
        placement = self._placements[work.index]
        prefill = placement.prefill[0].name if placement.prefill else None
        has_header = status == 200 and self._settings.reports is not Reports.NOTHING
        timing = self._timing(work).encode() if has_header else None
        placement.on_response_headers(ResponseHeaders(timing, status, prefill), now)

    def on_end(self, work: Work, now: float) -> None:
        """The stream ends."""
        self._placements.pop(work.index).end(now)

    def on_scrape(self, pages: Sequence[Page], now: float) -> None:
        """The scraper reads every pod's page."""
        changed = [
            pod.apply_scrape(_scraped(page), now)
            for pod, page in zip(self.fleet, pages, strict=True)
        ]
        self.fleet.figures.share()
        if any(changed):
            self.fleet.invalidate_views()

    def _precise(self, work: Work) -> PreciseMatch | None:
        """The length of the prompt and what stores have of it; None: no pod has a store."""
        tokens = {
            str(i): engine.store.tokens(work.blocks)
            for i, engine in enumerate(self._engines)
            if engine.store is not None
        }
        if not tokens:
            return None
        # Without knowledge of stores the length is known all the same, for a fair comparison.
        stored = tokens if self._settings.knows_stores else {}
        return PreciseMatch(work.prompt_tokens, BlockMatch({}), {}, stored)

    def _timing(self, work: Work) -> Timing:
        if work.started is None or work.first_token is None:
            return Timing()
        if self._settings.reports is Reports.SIDECAR:
            leg = work.first_token - work.arrived
            return Timing(leg=leg, prompt=work.prompt_tokens, cached=work.hit_tokens)
        return Timing(
            queue=work.started - work.arrived,
            compute=work.first_token - work.started,
            cached=work.hit_tokens,
            computed=work.prompt_tokens - work.hit_tokens,
        )


def _scraped(page: Page) -> ScrapeResult:
    gauges = Gauges(float(page.running), float(page.waiting), page.used)
    blocks = page.cache_tokens // BLOCK_TOKENS
    return ScrapeResult(gauges, b"1", BLOCK_TOKENS, blocks, EngineCounters(**page.totals))


def _storage(engine: Engine) -> ExternalStorage | None:
    return None if engine.store is None else ExternalStorage(f"file:///{id(engine.store)}")


def _discovered(index: int, role: Role, storage: ExternalStorage | None) -> DiscoveredBackend:
    url = f"http://{_address(index)}"
    return DiscoveredBackend(
        Backend(name=str(index), url=url, role=role, models=(MODEL,), external_storage=storage)
    )


def _address(index: int) -> str:
    return f"10.0.{index // 250}.{index % 250 + 1}:8000"
