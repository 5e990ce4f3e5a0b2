"""Chooses pods as llm-d does: a profile for each phase, and a decider that says whether to split.

`config` makes it of a configuration that lists a scorer, filter, picker, decider or handler.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

from tandem_contract.config import DisaggregatedServing
from tandem_contract.paths import Role, RoutingPath
from tandem_planner.choice import PREFILL_CANDIDATES

from ...backends.fleet import Fleet
from ...backends.pairing import can_hand_off
from ...backends.pods import Pod, in_subset
from ...choice.context import ChoiceContext
from ...choice.fallback import unified_pods
from ...choice.result import NoBackend, PathDecision, SchedulingResult
from ...choice.stored_prompts import load_of
from .decider import DeciderInputs, DeciderSettings, decide_path, is_split, without_prefill
from .plugin_types import PlacementLearner
from .profile import Profile


@dataclass(frozen=True)
class ProfileSummary:
    """The plugins of one phase by name, for a reader."""

    name: str
    filters: tuple[str, ...]
    """In their order; the phase's own role filter first."""
    scorers: tuple[tuple[str, float], ...]
    """Each with its weight."""
    picker: str


@dataclass(frozen=True)
class Summary:
    """The plugins of a choice by scores by name, for a reader."""

    decode: ProfileSummary
    prefill: ProfileSummary
    handler: str
    """Empty: none is listed."""
    decider: str
    """Empty: no request is split."""


@dataclass(frozen=True)
class ScoreChoice:
    """The profiles and the decider of a configuration; a `choice.routing.Chooser`."""

    decode: Profile
    prefill: Profile
    decider: DeciderSettings
    learners: tuple[PlacementLearner, ...]
    """The plugins that remember where requests went."""
    is_split_by_handler: bool
    """Whether a handler names a decider: then requests are split although `disaggregated_serving`
    is silent."""
    summary: Summary

    @property
    def can_split(self) -> bool:
        return self.decider.split

    def choose(
        self,
        fleet: Fleet,
        serving: DisaggregatedServing,
        ready: tuple[Pod, ...],
        context: ChoiceContext,
        *,
        model: str | None,
        subset: frozenset[str] | None,
        random: Random,
    ) -> SchedulingResult | None:
        turn = _OneChoice(self, fleet, serving, context, model, subset, random)
        return turn.choose(ready)

    def on_placed(self, context: ChoiceContext, decode: Pod, prefill: Pod | None) -> None:
        for learner in self.learners:
            learner.on_placed(context, decode, prefill)


@dataclass(frozen=True, slots=True)
class _OneChoice:
    """The choice for one request."""

    settings: ScoreChoice
    fleet: Fleet
    serving: DisaggregatedServing
    context: ChoiceContext
    model: str | None
    subset: frozenset[str] | None
    random: Random

    def choose(self, ready: tuple[Pod, ...]) -> SchedulingResult | None:
        """As `ScoreChoice.choose`."""
        decode = self._choose_decode(ready)
        if not decode:
            if any(pod.backend.role.serves(Role.DECODE) for pod in ready):
                # Filters ruled out all pods that may decode: no other pod is allowed either.
                raise NoBackend
            return None
        # The decode pod comes first: it determines which prefill pods are compatible.
        prefills, inputs = self._inputs(decode[0])
        may_split = inputs.is_enabled and inputs.is_disaggregated
        if may_split and not inputs.has_prefill_candidate:
            # During a rollout to another compat hash, pods of one hash may have no prefill pod
            # while pods of the other do: a request worth a split goes to the latter.
            with_prefill = in_subset(self.fleet.pods_with_prefill(self.model), self.subset)
            if with_prefill and (handoff_decode := self._choose_decode(with_prefill)):
                handoff_prefills, handoff_inputs = self._inputs(handoff_decode[0])
                if is_split(handoff_inputs, self.settings.decider):
                    decode, prefills, inputs = handoff_decode, handoff_prefills, handoff_inputs
        result = self._decide(decode, prefills, inputs)
        if result.decision.path is RoutingPath.FALLBACK:
            return self._prefer_unified(result, ready)
        return result

    def _choose_decode(self, pods: Sequence[Pod]) -> Sequence[Pod]:
        """All that the filters keep, best first."""
        return self.settings.decode.run(pods, self.context, len(pods), self.random)

    def _inputs(self, decode: Pod) -> tuple[tuple[Pod, ...], DeciderInputs]:
        """The prefill pods for this decode pod, and what the decider needs to know."""
        prefills = in_subset(self.fleet.prefill_candidates(self.model, decode), self.subset)
        if self.subset is None:
            can_split = self.fleet.has_prefill_candidate(self.model, decode)
        else:
            can_split = any(can_hand_off(pod, decode) for pod in prefills)
        request, cached = self.context.request, self.context.cached_tokens(decode)
        prompt_tokens = request.prompt_tokens if request else 0
        inputs = DeciderInputs(
            prompt_tokens=prompt_tokens,
            cached_tokens=min(prompt_tokens, cached),
            block_tokens=max(decode.block_tokens, request.last_block_tokens if request else 0),
            # All pods, not only ready ones: without a healthy prefill pod it is a fallback.
            is_disaggregated=self.fleet.is_disaggregated(decode),
            is_enabled=self.serving.enabled,
            has_prefill_candidate=can_split,
            is_unified=decode.backend.role is Role.UNIFIED,
            load=load_of(self.context, decode, cached),
            single_engine_reason=request.single_engine_reason if request else "passthrough",
        )
        return prefills, inputs

    def _decide(
        self, decode: Sequence[Pod], prefills: Sequence[Pod], inputs: DeciderInputs
    ) -> SchedulingResult:
        context, decider = self.context, self.settings.decider
        decision = decide_path(inputs, decider)
        ranking: Sequence[Pod] = ()
        if decision.path is RoutingPath.PREFILL_THEN_DECODE:
            context.peer = decode[0]
            profile = self.settings.prefill
            ranking = profile.run(prefills, context, PREFILL_CANDIDATES, self.random)
            if not ranking:
                # The filters of the prefill profile ruled all out.
                decision = without_prefill(decider)
        load = inputs.load
        if ranking:
            load = load_of(context, ranking[0], context.placed_tokens(ranking[0]))
        return self._result(decision, decode, ranking, inputs.cached_tokens, load.tokens)

    def _prefer_unified(self, result: SchedulingResult, ready: Sequence[Pod]) -> SchedulingResult:
        """Let a unified pod serve the fallback `result`, if one is ready."""
        decode = self._choose_decode(unified_pods(ready))
        if not decode:
            return result
        request, cached = self.context.request, self.context.cached_tokens(decode[0])
        tokens = min(request.prompt_tokens, cached) if request else 0
        return self._result(result.decision, decode, (), tokens, 0)

    def _result(
        self,
        decision: PathDecision,
        decode: Sequence[Pod],
        prefill: Sequence[Pod],
        cached: int,
        loaded: int,
    ) -> SchedulingResult:
        """`decode`: the choice, and after it the pods that may take its place, best first."""
        chosen = decode[0]
        # Another pod must be able to read the same KV, and no pod prefills for itself.
        others = (
            pod
            for pod in islice(decode, 1, None)
            if pod not in prefill and all(can_hand_off(p, pod) for p in prefill)
        )
        named, alternate = self.settings.decode.max_endpoints, None
        if named == 1:
            # Ranks of one backend share its address.
            alternate = next((pod for pod in others if pod.address != chosen.address), None)
        return SchedulingResult(
            decision,
            [chosen, *islice(others, named - 1)],
            prefill,
            cached,
            loaded_tokens=loaded,
            alternate=alternate,
        )
