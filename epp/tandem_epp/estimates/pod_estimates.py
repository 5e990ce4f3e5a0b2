"""Everything that the cost of a request on one pod depends on.

`figures(now)` is what the planner takes; it is computed again only after something changed.
Requests that other routers sent are seen in the engine's gauges: those beyond the known ones count
as waiting prefills of average length, or as decodes.
"""

from collections.abc import Callable
from math import exp, inf
from typing import Final, NamedTuple

from tandem_contract.fabric_classes import FabricClass
from tandem_contract.overlaps import Overlaps
from tandem_planner.cost import (
    DECODE_RESERVE,
    DECODE_WEIGHT,
    LATE_SHARE,
    OWN_STEP,
    PodFigures,
    congestion,
    stall_share,
)
from tandem_planner.decode_fit import DecodeCost, DecodeFit
from tandem_planner.kv_size import KvSize
from tandem_planner.objective import ITL_WEIGHT
from tandem_planner.prefill_fit import PREFILL_PRIOR, PrefillCost, PrefillFit
from tandem_planner.transfer import TransferFit, Transfers, assumed_kv_bytes

from .answer_lengths import RunningAnswers
from .busy_period import BusyPeriod
from .engine_counters import CounterWindow
from .engine_figures import EngineCounters, Gauges
from .engine_slots import EngineSlots
from .exposed_share import ExposedShare
from .fabric_fits import FabricFits, PlacedTransfers
from .own_requests import OwnRequests
from .prefill_queue import PrefillQueue

_ANSWERS: Final = 100
"""Answers of which the average is taken, at most."""


class AnswerLengths:
    """The average of one pod."""

    def __init__(self) -> None:
        self.average: float | None = None
        """Tokens per answer; None: not known."""
        self._generated = self._answers = 0.0
        """Tokens and answers of the average; old ones are halved again and again."""

    def add(self, generated: float, answers: float) -> None:
        """Between two scrapes, so many tokens were generated and answers ended."""
        # Sums, not a mean per window: an answer's tokens are generated in many windows, of which
        # only one has its end.
        self._generated += generated
        self._answers += answers
        if self._answers:
            self.average = self._generated / self._answers
        if self._answers > _ANSWERS:
            self._generated, self._answers = self._generated / 2, self._answers / 2


WINDOW_SECONDS: Final = 60.0
"""Time constant of the average. Shorter: it follows single long prompts, which the queue already
counts. Longer: a pod that has become quiet is avoided for longer."""
PACE_SECONDS: Final = 6.0
"""Likewise of `pace`: about as long as an answer runs. Shorter: a pod whose answers wait for a long
prompt gets the next one, and their mean ITL is too long. Longer: many prompts begin at once before
it shows. At three times the load of Mooncake's conversations, with flow control and objectives of
2 s and 50 ms, 3 s give 0.78 to 0.97 of the goodput that 6 s do, 20 s 1.02 to 1.09; at twice what
pods compute of short prompts 1.01 and 0.69 (as in `benchmarks.flow`)."""


class Utilization:
    """The utilization of one pod. Only what this EPP and its replicas place is counted."""

    def __init__(self, window: float) -> None:
        """`window`: seconds over which the share is averaged."""
        self._window = window
        self.share = 0.0
        """Seconds of prefills placed per second, a moving average as of the latest call; above 1 if
        the pod cannot keep up with them."""
        self._at = 0.0
        """The time for which `share` holds."""

    def add(self, seconds: float, now: float) -> None:
        """A prefill that takes `seconds` was placed."""
        self.fade(now)
        self.share += seconds / self._window

    def fade(self, now: float) -> None:
        """Time passed. Placements that other replicas report may be older than the latest one."""
        if now > self._at:
            self.share, self._at = self.at(now), now

    def at(self, now: float) -> float:
        """The share at `now` (Unix seconds), without another placement."""
        return self.share * exp(min(0.0, self._at - now) / self._window)


OUTPUT_PRIOR: Final = 200.0
"""Tokens of an answer before any is counted."""
_WEIGHT: Final = 0.1
"""Weight of the newest value in moving averages."""
_STEP_TOKENS: Final = 2048
"""Prompt tokens that an engine computes in one step, in which each answer gets one token: the
default of vLLM and others. Too high: answers that a prefill delayed are taken for shorter ones."""
_NEVER: Final = inf
_OBSERVED_SECONDS: Final = 60.0
"""Seconds for which answers that tell how long prefills take are enough to learn from."""


class PodEstimates:
    """The estimates of one pod."""

    loads: TransferFit | None = None
    """Loads from the pod's external store, by all pods of it; None: no store is known."""
    capacity_tokens: float = inf
    """Tokens for which the KV cache has room in all."""
    serves_decode: bool = True
    """Whether answers are generated here: a prefill leg is none."""

    pace: Utilization
    """The utilization of late: what answers that run now notice."""

    def __init__(self, weight: float = 1.0, sidecar: str = "") -> None:
        """`weight`: how much faster than others the pod is assumed to be until it is measured;
        `sidecar`: the address of its sidecar, if it has one."""
        self.utilization, self.pace = Utilization(WINDOW_SECONDS), Utilization(PACE_SECONDS)
        self.queue = PrefillQueue()
        prior = PrefillCost(*(c / weight for c in PREFILL_PRIOR))
        self.prefill, self.decode, self.transfer = PrefillFit(prior), DecodeFit(), TransferFit()
        """Of these the last one is that of all transfers to the pod."""
        self.fabrics = FabricFits(self.transfer)
        """The transfers of each fabric class."""
        self.placed_transfers = PlacedTransfers()
        self.busy = BusyPeriod()
        self.overlaps = Overlaps()
        """The prompts that this EPP and its replicas know to be under way here, by the sidecar that
        sends them to the engine."""
        self.sidecar = sidecar
        """Address of the pod's sidecar, which its data-parallel ranks share."""
        self.exposed = ExposedShare()
        """Of the transfers to the pod."""
        self.kv: KvSize | None = None
        """From the model's config.json; None: learned from transfers, else assumed."""
        self.decodes = self.awaiting_prefill = 0
        """Requests of this EPP and its replicas that decode here, and those that will and are still
        being prefilled."""
        self.running = RunningAnswers()
        """Those of `decodes`, and of `awaiting_prefill`, which prefills here delay."""
        self.answers, self.slots = AnswerLengths(), EngineSlots()
        self.own = OwnRequests()
        self.observed_at: float | None = None
        """When an answer last told how long its prefill took: counters are not used then."""
        self.is_decode = self.is_unified = False
        """Whether other pods are there to prefill for this one, so that it is spared from prefills;
        and whether it does both phases and no prefill pod is there. Only then `congestion` counts:
        it would move prompts from busy prefill pods to decode pods, whose answers become slow."""
        self._counters = CounterWindow()
        self._has_exact = False
        """Whether the requests of the window taught by themselves."""
        self.mean_prefill = PREFILL_PRIOR.seconds(1000)
        """Seconds of a prefill, a moving average of those placed."""
        self._unknown_waiting = self._unknown_running = 0.0
        """Requests of other routers at the last scrape."""
        self._running = 0.0
        """Requests that the engine computed at the last scrape."""
        self.shared_decode: DecodeCost | None = None
        """Medians of the decode fits of alike pods; None: the pod's own counts. A slope is hard to
        measure beside prefills, and two pods with unequal errors would not share the load."""
        self._free_tokens, self._placed_tokens = inf, 0.0
        """Tokens for which the KV cache had room at the last scrape, and those that requests placed
        since then need."""
        self.on_change: Callable[[], object] = lambda: None
        """Called whenever `figures` may return something else than before."""
        self._figures: PodFigures | None = None
        """The result of `figures`, valid until `expires`; None: something changed."""
        self._rates = self._make_rates()
        """What the figures have of the fits, as of the latest `learned`."""
        self.expires = _NEVER
        """When the head of the queue ends without a first token to tell it."""

    def figures(self, now: float) -> PodFigures:
        """What the cost depends on; `now` only moves on."""
        if self._figures is None or self.expires <= now:
            self.queue.drain(now)
            self._figures = self._make_figures()
            head = self.queue.head
            is_seen = head is None or head.has_first_token
            self.expires = _NEVER if is_seen else self.queue.head_ends
        return self._figures

    @property
    def active(self) -> float:
        """Requests that the engine has, as far as is known: those that run and those that wait."""
        return self.known + self._unknown_running + self._unknown_waiting

    @property
    def known(self) -> int:
        """Those of this EPP and its replicas."""
        # A prefill leaves the queue when it should have ended; its request may still await the
        # answer that tells.
        return self.decodes + max(len(self.queue), self.awaiting_prefill)

    @property
    def best_decode(self) -> DecodeCost:
        """What to expect of a decode step."""
        # Prefills on the pod itself are few: its own samples can be relied on.
        if self.is_decode:
            return self.decode.best
        return self.shared_decode or self.decode.cost

    def changed(self) -> None:
        """The queue, the decodes or the pod's health changed."""
        self._figures = None
        self.on_change()

    def learned(self) -> None:
        """A fit or a setting changed. Fits are computed now, so that no decision waits for it."""
        self._rates = self._make_rates()
        self.changed()

    def count_tokens(self, now: float) -> None:
        """Count what the running answers have got until `now`: before the queue changes, and before
        one of them begins or ends."""
        decode = self._rates.decode
        seconds = decode.step + decode.slope * self.decodes
        if self.queue.head is not None:
            seconds += _STEP_TOKENS * self._rates.prefill.per_token
        if self.running.advance(now, seconds):
            self.changed()

    def count_placed(self, seconds: float, tokens: float) -> None:
        """A request whose prefill takes `seconds`, and that needs KV for `tokens`, was placed."""
        self.mean_prefill += _WEIGHT * (seconds - self.mean_prefill)
        self._placed_tokens += tokens
        self.changed()

    def add_transfers(
        self, sample: tuple[float, float, float], now: float, fabric: FabricClass | None
    ) -> None:
        """Learn from transfers to the pod: their number, bytes, and seconds of all of them.
        `fabric`: their class; None: several, or not known."""
        self.transfer.add(*sample, now)
        if fabric is not None:
            self.fabrics.fit(fabric).add(*sample, now)

    def on_counters(
        self, counters: EngineCounters, load: Gauges, capacity_tokens: float | None, now: float
    ) -> None:
        """Take in a scrape; `capacity_tokens`: the size of the KV cache, None: not reported."""
        waiting = max(0.0, load.waiting - load.deferred)
        known = self.known
        # What waits for KV from a prefill pod is no sign of a full engine.
        explained = max(len(self.queue), self.awaiting_prefill)
        self.slots.on_scrape(load.running, waiting, explained, known)
        unknown = max(0.0, waiting + load.running - known)
        self._unknown_waiting = min(unknown, max(0.0, waiting - len(self.queue)))
        self._unknown_running = unknown - self._unknown_waiting
        if capacity_tokens is not None:
            self.capacity_tokens = capacity_tokens
            self._free_tokens = capacity_tokens * (1.0 - load.kv_usage)
            self._placed_tokens = 0.0
        self.utilization.fade(now)
        self.count_tokens(now)
        self._learn_from_counters(counters, load, now)
        self._running = load.running
        self.learned()

    def restart(self) -> None:
        """Another process answers: nothing measured before applies to it."""
        self.prefill.restart()
        self.decode.restart()
        self.transfer.restart()
        self.fabrics.restart()
        self._counters.restart()
        self.own.restart()
        self.slots.restart()
        self.observed_at = None
        self.exposed = ExposedShare()
        self._free_tokens, self._placed_tokens = inf, 0.0
        self.learned()

    def _learn_from_counters(self, counters: EngineCounters, load: Gauges, now: float) -> None:
        is_idle = not load.running and not load.waiting
        exact = self.own.advance(counters, is_idle=is_idle)
        is_observed = self.observed_at is not None and now - self.observed_at < _OBSERVED_SECONDS
        if exact is not None and not is_observed:
            self.prefill.add(exact, now)
            self._has_exact = True
        samples = self._counters.advance(counters, now)
        if samples is None:
            return
        fabric, has_warm_up = self.placed_transfers.take()
        if samples.prefill is not None and not is_observed and not self._has_exact:
            self.prefill.add(samples.prefill, now)
        self._has_exact = False
        if samples.itl is not None:
            # Between two tokens of a request, the engine also computes prompts.
            prefilling = min(0.9, samples.tokens_per_second * self.prefill.cost.per_token)
            decodes = (load.running + self._running) / 2
            self.decode.add(max(1.0, decodes), samples.itl * (1.0 - prefilling), now)
        if samples.transfer is not None and not has_warm_up:
            self.add_transfers(samples.transfer, now, fabric)
        if samples.load is not None and self.loads is not None:
            self.loads.add(*samples.load, now)
            self.loads.add_size(samples.loaded_tokens, samples.load[1])
        self.answers.add(samples.generated, samples.answers)

    @property
    def _answer_tokens(self) -> float:
        average = self.answers.average
        return OUTPUT_PRIOR if average is None else average

    def _make_rates(self) -> "_Rates":
        prefill = self.prefill.best
        kv = self.kv or KvSize(self.transfer.bytes_per_token or assumed_kv_bytes(prefill))
        return _Rates(prefill, self.best_decode, self.fabrics.costs, kv)

    def _make_figures(self) -> PodFigures:
        queue = self.queue
        prefill, decode, transfers, kv = self._rates
        decodes = self.decodes + self._unknown_running
        queued = queue.seconds_behind_head + self._unknown_waiting * self.mean_prefill
        # By the time of its first token, a request meets those before it in the queue too.
        itl_harm = DECODE_WEIGHT * decode.slope * (decodes + self.awaiting_prefill)
        step = decode.step + decode.slope * decodes
        if self.is_decode:
            itl_harm += OWN_STEP * step
        stall = self.running.harm(step, self.utilization.share)
        if self.serves_decode:
            stall += self._unknown_running * ITL_WEIGHT * stall_share(self._answer_tokens)
        if self.is_decode:
            stall += DECODE_RESERVE
        # By position: by name it takes twice as long, for each decision.
        return PodFigures(
            queue.head_ends,
            LATE_SHARE if queue.head is not None else 0.0,
            queued,
            prefill.fixed,
            prefill.per_token,
            prefill.per_pair,
            stall,
            itl_harm,
            self._free_tokens - self._placed_tokens,
            0.0,  # standing
            transfers,
            kv,
            step,
            self.exposed.value,
            congestion(self.utilization.share) if self.is_unified else 0.0,
        )


class _Rates(NamedTuple):
    """What does not change with each request."""

    prefill: PrefillCost
    decode: DecodeCost
    transfers: Transfers
    kv: KvSize
