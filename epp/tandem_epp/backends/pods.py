"""One backend as this EPP sees it: load, health, cached prompts, and the pods it can pair with.

`Pod` and `fleet.Fleet` are the only state that requests share. Both belong to one event loop: the
scraper, discovery and the picker change them between two awaits, so there are no locks.
"""

import logging
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import count
from typing import Final

from tandem_contract.config import Backend, HealthChecks
from tandem_contract.paths import Role
from tandem_planner.fabrics import Place

from ..estimates.engine_figures import EngineCounters, Gauges
from ..estimates.pod_estimates import PodEstimates
from ..estimates.prompt_hits import PromptHits
from ..prefix.prefix_tree import PrefixTree
from .adapters import PodAdapters
from .engine_page import ScrapeResult
from .health import Health
from .pace import fade

BLOCK_TOKENS: Final = 16
"""KV block size, in tokens, of a backend whose metrics do not report it: vLLM's default."""
ANSWER_SECONDS: Final = 5.0
"""Seconds for which an answer proves that a pod serves, whose metrics page does not come in time.
Shorter: all pods of a pool whose pages hang at a low load become unhealthy. Longer: a pod that
hangs altogether gets requests for longer."""
CAPACITY_BLOCKS: Final = 31_250
"""KV blocks of a backend whose metrics do not report their number: half a million tokens."""
_DEFAULT_CHECKS: Final = HealthChecks()

_NUMBERS: Final = count(1)
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiscoveredBackend:
    """A backend as discovery reports it now."""

    backend: Backend
    uid: str = ""
    """The Kubernetes pod's uid. Another uid under the same name is another pod, with empty caches.
    Empty for a backend from the configuration file."""
    serving: bool = True
    """False for a pod that exists and must not be chosen: it is not Ready, or it is leaving."""
    leaving: bool = False
    """Whether it is terminating or drains."""


class Pod:
    """One backend, or one data-parallel rank of it, and everything this EPP knows about it."""

    tokens_in_flight = 0
    """Uncached prompt tokens of requests that were placed here and are not answered yet."""
    generated_at = 0.0
    """When a scrape last showed tokens that the one before did not; Unix seconds, 0: never."""
    store: str | None = None
    """What tells its external store from others; None: not known. Set by the fleet."""
    max_model_len: int | None = None
    """Tokens of the longest prompt that it takes; None: not known."""
    leaving = False
    """Whether discovery reports that it is terminating or drains."""
    _passes = 0
    """Passed checks in a row."""

    def __init__(
        self,
        backend: Backend,
        block_tokens: int = BLOCK_TOKENS,
        capacity: int = CAPACITY_BLOCKS,
        prefixes: "PrefixTree[Pod] | None" = None,
        rank: int | None = None,
    ) -> None:
        self.backend = backend
        self.rank = rank
        """The data-parallel rank; None where the backend is one engine."""
        self.name = backend.name if rank is None else f"{backend.name}_dp{rank}"
        """As in plans, metrics and response headers: the backend's name, with vLLM's suffix for a
        rank."""
        self.place = Place()
        """Where it runs. Set by the fleet, which knows the domains of all nodes."""
        self.number = next(_NUMBERS)
        """No other pod of this process has it, before or after."""
        self.has_left = False
        """Whether it is no longer in the fleet: only requests that began before refer to it."""
        self.serving = True
        """Whether discovery reports it ready for new requests."""
        self.address = _literal_address(backend)
        """`ip:port`. None until a host name is resolved, and until then the pod is not chosen."""
        self.gauges: Gauges | None = None
        """Load at the last successful scrape, faded since the next one is overdue; None until the
        first one. Replaced by each scrape, never changed."""
        self.scraped_at = 0.0
        """When the last successful scrape ended, in Unix seconds; 0: never."""
        self.prefixes = prefixes if prefixes is not None else PrefixTree()
        """The prefix index of all pods of the fleet, in which this pod is a key."""
        self.prefixes.set_capacity(self, capacity * block_tokens)
        self.adapters = PodAdapters()
        """LoRA adapters in use and resident."""
        self.counters = EngineCounters()
        """The engine's counters at the last successful scrape."""
        self.block_tokens = block_tokens
        self.token_scale = 1.0
        """Tokens per assumed token of the texts that it serves: see `token_scales`."""
        self.in_flight = 0
        """Requests that this EPP and its other replicas placed here and that have not ended."""
        self.remote_in_flight = 0
        """Those of `in_flight` that other replicas placed."""
        self.healthy = True
        """True until checks fail: a backend can serve before its first check."""
        self.estimates = PodEstimates(backend.weight, backend.address)
        """What requests are predicted to take here."""
        self.hits = PromptHits()
        """How much of the prompts that it computed it had cached."""
        self.health = Health()
        """What the outcomes of requests say about it. Changed by `ejections.Ejections`."""
        self.unwarmed_prefills: set[Pod] = set()
        """Prefill pods whose first hand-off to this pod is under way: others are preferred."""
        self.incarnation: bytes | None = None
        """Identity of the process that answered the last scrape, empty when it does not report;
        None before the first answer."""
        self._failures = 0
        """Failed checks in a row."""
        self._scraped: Gauges | None = None
        """`gauges` before they faded."""
        self._in_flight_at_scrape = 0

    @property
    def load(self) -> float:
        """Requests in flight, divided by the backend's weight."""
        return self.in_flight / self.backend.weight

    def is_named(self, name: str | None) -> bool:
        """Whether `name`, of a response header, means this pod: its name or, from a sidecar without
        a plan, its address."""
        return name is not None and name in (self.name, self.address)

    @property
    def ready(self) -> bool:
        """Whether the picker may choose this pod."""
        return self.serving and self.healthy and self.address is not None

    @property
    def is_busy(self) -> bool:
        """Whether this EPP has requests here, or the engine reported any."""
        return self.in_flight > 0 or self.has_work

    @property
    def has_work(self) -> bool:
        """Whether the engine reported requests that run or wait."""
        gauges = self.gauges
        return gauges is not None and (gauges.running > 0 or gauges.waiting > 0)

    @property
    def placed_since_scrape(self) -> int:
        """By how many requests in flight there are more than at the last scrape."""
        return max(0, self.in_flight - self._in_flight_at_scrape)

    def has_answered(self, now: float) -> bool:
        """Whether it answered a request in the last `ANSWER_SECONDS`; `now`: Unix seconds."""
        return now - self.health.answered_at < ANSWER_SECONDS

    @property
    def receives_kv(self) -> bool:
        """Whether other pods may prefill for this one: for a decode pod, and for a unified one
        that has prefill pods beside it (known where the cost chooses)."""
        return self.backend.role is Role.DECODE or self.estimates.is_decode

    def apply_scrape(
        self, result: ScrapeResult, now: float = 0.0, checks: HealthChecks = _DEFAULT_CHECKS
    ) -> bool:
        """Take in a scrape that succeeded at `now` (Unix seconds), which is a passed check; returns
        whether anything changed that scorers see."""
        # Compared before any of these fields is overwritten below.
        changed, was_healthy = result.gauges != self.gauges, self.healthy
        previous, self.incarnation = self.incarnation, result.incarnation
        # What is known before the first answer came from another replica, which scraped this
        # process.
        if previous is not None and previous != result.incarnation:
            # Another process has an empty KV cache, and perhaps another model.
            self.prefixes.clear(self)
            self.max_model_len = None
            self.adapters.clear()
            if self.health.is_ejected:
                log_return(self, "another process answers")
            self.health.on_new_process(now)
            self.estimates.restart()
            self.hits.restart()
        self.block_tokens = result.block_tokens or self.block_tokens
        if result.blocks:
            # The index forgets when the engine's own KV cache would: both hold as many tokens. The
            # index counts assumed ones.
            capacity = result.blocks * self.block_tokens / self.token_scale
            self.prefixes.set_capacity(self, int(capacity))
        self.gauges, self._failures = result.gauges, 0
        self._passes += 1
        self.healthy = self.healthy or self._passes >= checks.healthy_threshold
        if result.counters.generated_tokens != self.counters.generated_tokens:
            self.generated_at = now
        self.counters = result.counters
        self.adapters.apply(result.adapters)
        self._scraped, self._in_flight_at_scrape = result.gauges, self.in_flight
        self.scraped_at = now
        room = result.blocks * self.block_tokens if result.blocks else None
        self.estimates.on_counters(result.counters, result.gauges, room, now)
        self.hits.on_counters(result.counters, receives_kv=self.receives_kv)
        return self.health.on_scrape() or changed or self.healthy != was_healthy

    def fade(self, staleness: float) -> None:
        """Trust `gauges` less: they have been stale for `staleness` seconds (see `pace.fade`)."""
        if self._scraped is not None:
            own, own_at_scrape = self.in_flight, self._in_flight_at_scrape
            self.gauges = fade(self._scraped, own_at_scrape, own, staleness)

    def record_failed_check(self, checks: HealthChecks = _DEFAULT_CHECKS) -> bool:
        """Count a failed check; returns whether it made the backend unhealthy."""
        self._failures, self._passes = self._failures + 1, 0
        has_answered = self.gauges is not None
        if not self.healthy or (has_answered and self._failures < checks.unhealthy_threshold):
            return False
        self.healthy = False
        # It probably restarts. If it does not, its prompts are learned again.
        self.prefixes.clear(self)
        return True


def _literal_address(backend: Backend) -> str | None:
    """`ip:port` where the URL holds an IP address, None where it holds a host name."""
    try:
        ip_address(backend.address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return None
    return backend.address


def log_return(pod: Pod, reason: str) -> None:
    """Log that the ejection of `pod` has ended."""
    _log.info("backend %s serves again: %s", pod.name, reason)


def in_subset(pods: tuple[Pod, ...], subset: frozenset[str] | None) -> tuple[Pod, ...]:
    """The pods that the gateway's subset hint allows, by `ip:port` or by `ip`."""
    if subset is None:
        # The same object, so that what was computed for it is found again.
        return pods
    return tuple(
        pod
        for pod in pods
        if pod.address in subset or (pod.address or "").rpartition(":")[0] in subset
    )
