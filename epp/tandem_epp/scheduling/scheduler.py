"""Chooses the decode pod, the path and the prefill pods of one request.

`Scheduler` applies the configured profiles and the decider to the views of the `Fleet`. It does no
I/O and counts nothing: `picker` turns its result into headers, and `placement` counts the request.

Errors: `decider.NoBackend`, `decider.SplitImpossible`.
"""

from collections.abc import Sequence
from random import Random

from tandem_contract.paths import Role, RoutingPath
from tandem_planner.choice import PREFILL_CANDIDATES

from ..backends.fleet import Fleet
from ..backends.pairing import can_hand_off
from ..backends.pods import Pod
from .candidate_layout import RecentlyUsed
from .config import Routing
from .cost_choice import CostScheduler, CostSettings
from .decider import (
    DeciderInputs,
    NoBackend,
    PathDecision,
    decide_path,
    is_split,
    without_prefill,
)
from .fallback import choose_alone, unified_pods
from .profile import ScoringContext
from .result import SchedulingResult
from .stored_prompts import load_of


class Scheduler:
    """Schedules requests on the pods of a fleet."""

    def __init__(self, fleet: Fleet, routing: Routing, random: Random) -> None:
        self.routing = routing
        """Profiles, decider and fallback; a reload replaces it."""
        self._fleet, self._random = fleet, random
        self._cost = CostScheduler(fleet, random)
        self._narrowed: RecentlyUsed[tuple[int, str | None, frozenset[str]], tuple[Pod, ...]]
        self._narrowed = RecentlyUsed()
        """The pods that the latest subset hints allow: a gateway repeats its hints."""

    def schedule(
        self,
        context: ScoringContext,
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
        if (cost := self.routing.scheduling.cost) is not None:
            choice = self._choose_by_cost(ready, context, model, cost, now)
            if choice is not None:
                return choice
            result = self._without_decode(ready)
        else:
            result = self._schedule_by_scores(ready, context, model, subset)
            prefill = result.prefill[0] if result.prefill else None
            for learner in self.routing.scheduling.learners:
                learner.on_placed(context, result.decode[0], prefill)
        result.size = self._cost.size(context, result.decode[0], result.prefill)
        return result

    def _schedule_by_scores(
        self,
        ready: tuple[Pod, ...],
        context: ScoringContext,
        model: str | None,
        subset: frozenset[str] | None,
    ) -> SchedulingResult:
        decode = self._choose_decode(ready, context)
        if not decode:
            if any(pod.backend.role.serves(Role.DECODE) for pod in ready):
                # Filters ruled out all pods that may decode: no other pod is allowed either.
                raise NoBackend
            return self._without_decode(ready)
        # The decode pod comes first: it determines which prefill pods are compatible.
        prefills = in_subset(self._fleet.prefill_candidates(model, decode[0]), subset)
        can_split = self._has_candidate(model, decode[0], prefills, subset)
        inputs = self._decider_inputs(context, decode[0], can_split)
        may_split = inputs.is_enabled and inputs.is_disaggregated
        if may_split and not inputs.has_prefill_candidate:
            # During a rollout to another compat hash, pods of one hash may have no prefill pod
            # while pods of the other do: a request worth a split goes to the latter.
            with_prefill = in_subset(self._fleet.pods_with_prefill(model), subset)
            if with_prefill and (handoff_decode := self._choose_decode(with_prefill, context)):
                candidates = self._fleet.prefill_candidates(model, handoff_decode[0])
                handoff_prefills = in_subset(candidates, subset)
                can_split = self._has_candidate(model, handoff_decode[0], handoff_prefills, subset)
                handoff_inputs = self._decider_inputs(context, handoff_decode[0], can_split)
                if is_split(handoff_inputs, self.routing.scheduling.decider):
                    decode, prefills, inputs = handoff_decode, handoff_prefills, handoff_inputs
        result = self._decide(context, decode, prefills, inputs)
        if result.decision.path is RoutingPath.FALLBACK:
            return self._prefer_unified(result, ready, context)
        return result

    def _choose_by_cost(
        self,
        ready: tuple[Pod, ...],
        context: ScoringContext,
        model: str | None,
        settings: CostSettings,
        now: float,
    ) -> SchedulingResult | None:
        """None: no pod may decode."""
        serving = self.routing.serving
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

    def _choose_decode(self, pods: Sequence[Pod], context: ScoringContext) -> Sequence[Pod]:
        profile = self.routing.scheduling.decode
        return profile.run(pods, context, profile.max_endpoints, self._random)

    def _decide(
        self,
        context: ScoringContext,
        decode: Sequence[Pod],
        prefills: Sequence[Pod],
        inputs: DeciderInputs,
    ) -> SchedulingResult:
        scheduling = self.routing.scheduling
        decision = decide_path(inputs, scheduling.decider)
        ranking: Sequence[Pod] = ()
        if decision.path is RoutingPath.PREFILL_THEN_DECODE:
            context.peer = decode[0]
            ranking = scheduling.prefill.run(prefills, context, PREFILL_CANDIDATES, self._random)
            if not ranking:
                # The filters of the prefill profile ruled all out.
                decision = without_prefill(scheduling.decider)
            # An alternate of the decode pod must be able to read the same KV.
            decode = [pod for pod in decode if all(can_hand_off(p, pod) for p in ranking)]
        load = inputs.load
        if ranking:
            load = load_of(context, ranking[0], context.placed_tokens(ranking[0]))
        return SchedulingResult(
            decision, decode, ranking, inputs.cached_tokens, loaded_tokens=load.tokens
        )

    def _prefer_unified(
        self, result: SchedulingResult, ready: Sequence[Pod], context: ScoringContext
    ) -> SchedulingResult:
        """Let a unified pod serve the fallback `result`, if one is ready."""
        decode = self._choose_decode(unified_pods(ready), context)
        if not decode:
            return result
        request = context.request
        cached = min(request.prompt_tokens, context.cached_tokens(decode[0])) if request else 0
        return SchedulingResult(result.decision, decode, cached_tokens=cached)

    def _has_candidate(
        self,
        model: str | None,
        decode: Pod,
        prefills: Sequence[Pod],
        subset: frozenset[str] | None,
    ) -> bool:
        """Whether one of `prefills` can hand off to `decode`."""
        if subset is None:
            return self._fleet.has_prefill_candidate(model, decode)
        return any(can_hand_off(pod, decode) for pod in prefills)

    def _decider_inputs(
        self, context: ScoringContext, decode: Pod, has_prefill_candidate: bool
    ) -> DeciderInputs:
        request = context.request
        prompt_tokens = request.prompt_tokens if request else 0
        return DeciderInputs(
            prompt_tokens=prompt_tokens,
            cached_tokens=min(prompt_tokens, context.cached_tokens(decode)),
            block_tokens=max(decode.block_tokens, request.last_block_tokens if request else 0),
            # All pods, not only ready ones: without a healthy prefill pod it is a fallback.
            is_disaggregated=self._fleet.is_disaggregated(decode),
            is_enabled=self.routing.serving.enabled,
            has_prefill_candidate=has_prefill_candidate,
            load=load_of(context, decode, context.cached_tokens(decode)),
            single_engine_reason=request.single_engine_reason if request else "passthrough",
        )

    def _without_decode(self, ready: Sequence[Pod]) -> SchedulingResult:
        """No ready pod may decode: any engine can still serve a request alone, if the fallback is
        allowed. Raises NoBackend."""
        serving = self.routing.serving
        if not ready or (serving.enabled and not serving.fallback_to_unified):
            raise NoBackend
        decision = PathDecision(RoutingPath.FALLBACK, "no_decode_backend")
        return SchedulingResult(decision, [choose_alone(ready, self._random)])


def in_subset(pods: tuple[Pod, ...], subset: frozenset[str] | None) -> tuple[Pod, ...]:
    """The pods that the gateway's subset hint allows, by `ip:port` or by `ip`."""
    if subset is None:
        # The same object, so that profiles reuse the scores they computed for it.
        return pods
    return tuple(
        pod
        for pod in pods
        if pod.address in subset or (pod.address or "").rpartition(":")[0] in subset
    )
