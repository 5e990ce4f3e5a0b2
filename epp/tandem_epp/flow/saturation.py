"""Whether the pods of a model have room for one more request now. Pure.

A pod has room while a request that it gets would hardly wait there: the prompts before it take
`PATIENCE`, or a step, at most; prompt and answer fit into the free KV; and the engine computes
fewer requests than it is known to compute at once. There is no threshold to set: what is compared
are predicted seconds, and what this EPP and its replicas placed counts at once.

Where the model has an ITL as its objective, a pod that answers requests has room only while its
predicted ITL is within it: prompts that follow each other without a pause let no answer beside them
be in time. An objective that not even one answer alone could meet changes nothing.

Both phases count apart. Pods that decode need KV and a place among those that run; those that
compute prompts need a short queue. A request that is not split needs both of one pod.
"""

from collections.abc import Iterable
from math import inf
from typing import Final, NamedTuple

from tandem_contract.paths import Role
from tandem_planner.cost import PodFigures, predicted_itl

from ..backends.fleet import Fleet
from ..backends.pace import BUSY_INTERVAL
from ..backends.pods import Pod, in_subset

PATIENCE: Final = BUSY_INTERVAL
"""Seconds of prompts ahead with which a pod still has room: until the next scrape. Shorter: an
engine may have nothing to compute until the next request is there. Longer: requests wait in its
queue, where none can be put before another. In `benchmarks.flow`, 0.2 s make the important wait 1.4
times as long as alone, 0.1 s 1.2 times, and 0 s 1.15 times; engines compute as much with each."""
EMPTY_PATIENCE: Final = 1.0
"""The same for a request that finds nothing that waits, and which no more important one follows: to
hold it would serve none. Shorter: at 70 % load some are held. Longer: at the begin of an overload
more requests are in the engines' own queues, in which no tenant goes before another."""
STALE_SECONDS: Final = 2.0
"""Seconds after a scrape for which the free KV that it told counts. Longer: with a metrics page
that does not answer any more, nothing would be sent once that KV is used up."""
_MOST_MODELS: Final = 4096
"""Models that are remembered: adapters come and go."""
KV_SHARE: Final = 0.25
"""Share of a pod's KV cache that a request needs to be free at most. Higher: the others wait here
until one large prompt finds room. Lower: it waits, and others behind it, in an engine's queue."""
PROBE_SECONDS: Final = 1.0
"""Seconds between two requests to a pod of which nothing is known that is new."""


class Roles(NamedTuple):
    """The ready pods of a model."""

    pods: tuple[Pod, ...]
    decodes: tuple[Pod, ...]
    """Those that may decode."""
    prefills: tuple[Pod, ...]
    """Those that only prefill."""


class Saturation:
    """The room of a fleet's pods."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._roles: dict[str | None, Roles] = {}
        """By model; counts as long as the fleet's view is the same object."""
        self._probed: dict[Pod, float] = {}
        """Pod without fresh figures → when it last had room for want of them."""

    def has_prefill_pods(self, model: str | None) -> bool:
        """Whether a pod is ready that only prefills for `model`."""
        return bool(self.ready(model).prefills)

    def has_room(
        self, model: str | None, tokens: float, now: float, patience: float = PATIENCE
    ) -> bool:
        """Whether any request for `model` whose prompt and answer have `tokens` tokens would wait
        `patience` seconds or a step at most, split or not; also if no pod is ready that may decode,
        which the choice tells."""
        _, decodes, prefills = self.ready(model)
        figures, itl = self._fleet.figures, self._fleet.objective(model).itl
        table, rows = figures.at(now).pods, figures.rows
        # The first that fits decides, mostly the first at all.
        for pod in decodes:
            row = table[rows[pod]]
            can_decode = _can_decode(pod, row, tokens, itl, now)
            if can_decode and (prefills or _can_compute(pod, row, now, patience)):
                break
        else:
            return not decodes
        return not prefills or any(
            _can_compute(pod, table[rows[pod]], now, patience) for pod in prefills
        )

    def pods_with_room(
        self,
        model: str | None,
        tokens: float,
        now: float,
        *,
        is_split: bool,
        hint: frozenset[str] | None = None,
        patience: float = PATIENCE,
    ) -> list[Pod]:
        """The pods that such a request may go to now; none: it waits. `is_split`: where pods are
        ready that only prefill, whether one of them is to compute the prompt. `hint`: addresses of
        the pods that count; None: all."""
        ready, decodes, prefills = self.ready(model)
        if hint is not None:
            allowed = in_subset(ready, hint)
            decodes = tuple(pod for pod in decodes if pod in allowed)
            prefills = tuple(pod for pod in prefills if pod in allowed)
        if not decodes:
            # What there is serves alone, or the choice says why not.
            return [*prefills] or [*ready]
        figures, itl = self._fleet.figures, self._fleet.objective(model).itl
        table, rows = figures.at(now).pods, figures.rows
        free = [pod for pod in decodes if _can_decode(pod, table[rows[pod]], tokens, itl, now)]
        alone = [pod for pod in free if _can_compute(pod, table[rows[pod]], now, patience)]
        if not prefills:
            return alone or self.probe(decodes, now)
        computing = [pod for pod in prefills if _can_compute(pod, table[rows[pod]], now, patience)]
        if not is_split:
            # It may have to be split by now: then any prefill pod computes it.
            alone = alone or self.probe(decodes, now)
            return [*alone, *(computing or prefills)] if alone else []
        if not computing and free:
            computing = self.probe(prefills, now)
        elif computing and not free:
            free = self.probe(decodes, now)
        return [*free, *computing] if free and computing else []

    def ready(self, model: str | None) -> Roles:
        """The ready pods for `model`."""
        pods, key = self._fleet.ready_pods(model), self._fleet.model_key(model)
        roles = self._roles.get(key)
        if roles is None or roles.pods is not pods:
            decodes = tuple(pod for pod in pods if pod.backend.role is not Role.PREFILL)
            prefills = tuple(pod for pod in pods if pod.backend.role is Role.PREFILL)
            if len(self._roles) > _MOST_MODELS:
                self._roles.clear()
            roles = self._roles[key] = Roles(pods, decodes, prefills)
        return roles

    def probe(self, pods: Iterable[Pod], now: float) -> list[Pod]:
        """One of `pods`, which have no room, that gets a request all the same, because what is
        known of it is old; none: there is none."""
        for pod in pods:
            is_stale = now - pod.scraped_at >= STALE_SECONDS
            if is_stale and now - self._probed.get(pod, 0.0) >= PROBE_SECONDS:
                self._probed = {
                    other: at for other, at in self._probed.items() if now - at < PROBE_SECONDS
                }
                self._probed[pod] = now
                return [pod]
        return []


def _has_slot(pod: Pod, now: float) -> bool:
    estimates = pod.estimates
    # What others sent is known from the page alone.
    is_fresh = now - pod.scraped_at < STALE_SECONDS
    return (estimates.active if is_fresh else estimates.known) < estimates.slots.limit


def _can_decode(pod: Pod, figures: PodFigures, tokens: float, itl: float, now: float) -> bool:
    if not _has_slot(pod, now) or not _keeps_itl(pod, figures, itl, now):
        return False
    if now - pod.scraped_at >= STALE_SECONDS or not pod.in_flight:
        return True
    return min(tokens, KV_SHARE * pod.estimates.capacity_tokens) <= figures.free_tokens


def _keeps_itl(pod: Pod, figures: PodFigures, itl: float, now: float) -> bool:
    """Whether the answers of the pod are predicted to keep to `itl` seconds for each token."""
    if itl == inf or not pod.in_flight or pod.estimates.best_decode.step >= itl:
        return True
    return predicted_itl(figures.step, pod.estimates.pace.at(now)) <= itl


def _can_compute(pod: Pod, figures: PodFigures, now: float, patience: float) -> bool:
    # A prompt that takes longer than predicted closes no pod: nothing says for how long.
    wait = figures.queued
    if figures.late_share:
        wait += max(0.0, figures.head_ends - now)
    return _has_slot(pod, now) and wait <= max(patience, figures.step)
