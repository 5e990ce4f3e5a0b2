"""Chooses the decode pod, the path and the prefill pods of one request.

The predicted cost chooses, unless the configuration puts a `routing.Chooser` in its place. It does
no I/O and counts nothing: `picker` turns the result into headers, and `placement` counts the
request.

Errors: `result.NoBackend`, `result.SplitImpossible`.
"""

from collections.abc import Sequence
from random import Random

from tandem_contract.paths import RoutingPath

from ..backends.fleet import Fleet
from ..backends.pods import Pod, in_subset
from .candidate_layout import RecentlyUsed
from .context import ChoiceContext
from .cost_choice import CostScheduler
from .fallback import choose_alone, unified_pods
from .result import NoBackend, PathDecision, SchedulingResult, SplitImpossible
from .routing import Routing


class Scheduler:
    """Schedules requests on the pods of a fleet."""

    def __init__(self, fleet: Fleet, routing: Routing, random: Random) -> None:
        self.routing = routing
        """The configuration; a reload replaces it."""
        self._fleet, self._random = fleet, random
        self._cost = CostScheduler(fleet, random)
        self._narrowed: RecentlyUsed[tuple[int, str | None, frozenset[str]], tuple[Pod, ...]]
        self._narrowed = RecentlyUsed()
        """The pods that the latest subset hints allow: a gateway repeats its hints."""

    def schedule(
        self,
        context: ChoiceContext,
        model: str | None,
        subset: frozenset[str] | None,
        now: float,
    ) -> SchedulingResult:
        """Choose pods for a request for `model` among those that `subset` (the gateway's hint)
        allows, at `now` (Unix seconds). Raises NoBackend, SplitImpossible."""
        ready = whole = self._fleet.ready_pods(model)
        if subset is not None:
            key = self._fleet.members_version, self._fleet.model_key(model), subset
            ready = self._narrowed.get(key, lambda: in_subset(whole, subset))
        if (chooser := self.routing.scheduling.chooser) is None:
            choice = self._choose_by_cost(ready, context, model, now)
            if choice is not None:
                return choice
            result = self._without_decode(ready)
        else:
            serving, random = self.routing.serving, self._random
            choice = chooser.choose(
                self._fleet, serving, ready, context, model=model, subset=subset, random=random
            )
            result = choice if choice is not None else self._without_decode(ready)
            chooser.on_placed(
                context, result.decode[0], result.prefill[0] if result.prefill else None
            )
        result.size = self._cost.size(context, result.decode[0], result.prefill)
        return result

    def would_split(self, context: ChoiceContext, model: str | None, now: float) -> bool:
        """Whether a request would be split now, as far as that is known without placing it: where
        other choosers decide, every request that may be."""
        if not self.routing.serving.enabled:
            return False
        if self.routing.scheduling.chooser is not None:
            return self.routing.scheduling.can_split
        try:
            choice = self._choose_by_cost(self._fleet.ready_pods(model), context, model, now)
        except (NoBackend, SplitImpossible):
            return False
        return choice is not None and bool(choice.prefill)

    def _choose_by_cost(
        self,
        ready: tuple[Pod, ...],
        context: ChoiceContext,
        model: str | None,
        now: float,
    ) -> SchedulingResult | None:
        """None: no pod may decode."""
        serving, settings = self.routing.serving, self.routing.scheduling.cost
        choice = self._cost.schedule(
            ready,
            context,
            model,
            settings,
            now,
            can_split=serving.enabled,
            can_fall_back=serving.fallback_to_unified,
        )
        is_fallback = choice is not None and choice.decision.path is RoutingPath.FALLBACK
        if choice is not None and is_fallback and (unified := unified_pods(ready)):
            alone = self._cost.schedule(
                tuple(unified),
                context,
                model,
                settings,
                now,
                can_split=False,
                can_fall_back=True,
            )
            result = alone or choice
            result.decision = choice.decision
            return result
        return choice

    def _without_decode(self, ready: Sequence[Pod]) -> SchedulingResult:
        """No ready pod may decode: any engine can still serve a request alone, if the fallback is
        allowed. Raises NoBackend."""
        serving = self.routing.serving
        if not ready or (serving.enabled and not serving.fallback_to_unified):
            raise NoBackend
        decision = PathDecision(RoutingPath.FALLBACK, "no_decode_backend")
        return SchedulingResult(decision, [choose_alone(ready, self._random)])
