"""Chooses decode pod, path and prefill pod at once, by the predicted cost in seconds.

`CostScheduler` collects the figures of the pods that may serve a request, asks the planner's
`choose`, and gives the choice its path and reason. What the cost is, term by term, is in
`tandem_planner.cost`.

    reason               path                  the cheapest way is
    worth_it             prefill_then_decode   a pair of pods
    cached               fast_decode           a pod that has all of the prompt but its end
    cheaper_here         unified               one pod, cheaper than any pair
    transfer_too_long    unified               one pod: the transfer exceeds half of the prefill
    not_disaggregated    unified               one pod, since no other may prefill for it
    no_prefill_backend   fallback              a pair, but no pod that could prefill is healthy

A request that one engine must serve alone has that rule's reason and the path unified.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from tandem_contract.paths import Role, RoutingPath
from tandem_planner.choice import Candidates, Choice, Group, choose, would_split
from tandem_planner.cost import FAILURE_SECONDS, PodFigures, RequestFigures
from tandem_planner.kv_size import KvSize

from ..backends.fleet import Fleet
from ..backends.pairing import can_hand_off
from ..backends.pods import Pod
from ..estimates.cost_record import CostRecord
from ..estimates.kinds import fill_in
from ..estimates.pod_estimates import OUTPUT_PRIOR
from ..estimates.request_load import PlacedPrompt
from ..request import InferenceRequest
from .decider import TAIL_BLOCKS, PathDecision, SplitImpossible
from .profile import ScoringContext
from .unseen import UnseenPlacements, with_unseen

_FILL_IN_SECONDS: Final = 0.1
"""Seconds between two rounds in which pods without samples take over the figures of alike pods."""


@dataclass(frozen=True)
class CostSettings:
    """The settings of the choice by cost."""

    kv: Mapping[str, KvSize] = field(default_factory=dict)
    """Model → size of its KV, from its config.json. Others are learned from transfers."""
    max_endpoints: int = 1
    """Addresses in the destination header: the decode pod and its alternates."""
    split: bool = True
    """False: never split."""


@dataclass(frozen=True, slots=True)
class CostChoice:
    """The chosen pods, the path, and what the choice was made from."""

    decision: PathDecision
    decode: Sequence[Pod]
    """The choice, then its alternates."""
    prefill: Sequence[Pod]
    """The choice, then the retries; empty without a split."""
    record: CostRecord


@dataclass(frozen=True, slots=True)
class _Layout:
    """The pods that may serve a model, and which of them can exchange KV. Computed once per change
    of the pods."""

    pods: tuple[Pod, ...]
    names: tuple[str, ...]
    turns: tuple[int, ...]
    """The position of each pod in the order of names, which is the same in all replicas."""
    decodes: tuple[int, ...]
    groups: tuple[Group, ...]
    prefills: tuple[int, ...]
    """All pods of `groups` that prefill."""
    grouped: frozenset[int]
    """Decode pods that are in a group."""


class CostScheduler:
    """Schedules requests on the pods of a fleet by cost."""

    def __init__(self, fleet: Fleet, random: Random) -> None:
        self._fleet, self._random = fleet, random
        self._layouts: dict[str | None, _Layout] = {}
        """Model → layout, as of `_version`."""
        self._version: object = None
        self._filled_in_at = 0.0
        self._unseen = UnseenPlacements()
        self._output_tokens = OUTPUT_PRIOR
        """Tokens of an answer, on average over the pods."""

    def schedule(
        self,
        ready: tuple[Pod, ...],
        context: ScoringContext,
        model: str | None,
        settings: CostSettings,
        now: float,
        *,
        is_whole_fleet: bool,
        can_split: bool,
        can_fall_back: bool,
    ) -> CostChoice | None:
        """Choose among `ready`; None when none of them may decode. `is_whole_fleet`: they are all
        pods for `model`, not a gateway's subset; `can_split`: the configuration allows a split;
        `can_fall_back`: or one pod instead of a split. Raises SplitImpossible."""
        if now - self._filled_in_at >= _FILL_IN_SECONDS:
            self._fill_in(now)
        layout = self._layout(ready, model, settings, is_whole_fleet=is_whole_fleet)
        if not layout.decodes:
            return None
        request, refusal = context.request, _single_engine_reason(context)
        figures = RequestFigures(
            request.prompt_tokens if request else 0, self.expected_output(request), now
        )
        may_split = can_split and settings.split and refusal is None
        pods: Sequence[PodFigures] = _all_figures(layout.pods, now)
        if (order := self._fleet.replica_order()).replicas > 1:
            placed = self._unseen.count_decision(now)
            pods = with_unseen(pods, layout.pods, layout.turns, order, placed)
        cached = context.all_placed_tokens(layout.pods)
        # What is placed on a decode pod may still have to be transferred there.
        alone = [
            context.cached_tokens(pod) if hit and pod.estimates.is_decode else hit
            for pod, hit in zip(layout.pods, cached, strict=True)
        ]
        groups = layout.groups if may_split else ()
        block_tokens = layout.pods[layout.decodes[0]].block_tokens
        tail = TAIL_BLOCKS * max(block_tokens, request.last_block_tokens if request else 0)
        extra = None
        if model is not None and self._fleet.is_adapter(model):
            extra = {i: layout.pods[i].adapters.load_seconds(model) for i in layout.decodes}
        candidates = Candidates(pods, cached, alone, layout.decodes, groups, extra, tail)
        choice = choose(figures, candidates, self._random, count=settings.max_endpoints)
        if not (can_split and self._fleet.is_disaggregated(layout.pods[choice.decodes[0]])):
            refusal = "not_disaggregated"
        elif not settings.split:
            refusal = "split_off"
        decision = _decide(context, layout, candidates, figures, choice, refusal)
        if decision.path is RoutingPath.FALLBACK and not can_fall_back:
            raise SplitImpossible("no prefill backend is healthy")
        prefills = layout.prefills if may_split else ()
        record = CostRecord(
            figures, layout.names, pods, cached, alone, layout.decodes, prefills,
            choice.decodes[0], choice.prefills[0] if choice.prefills else None,
        )  # fmt: skip
        return CostChoice(
            decision,
            [layout.pods[i] for i in choice.decodes],
            [layout.pods[i] for i in choice.prefills],
            record,
        )

    def size(self, context: ScoringContext, decode: Pod, prefill: Sequence[Pod]) -> PlacedPrompt:
        """What the request is predicted to take on the chosen pods."""
        request = context.request
        if request is None:
            return PlacedPrompt()
        prompt = request.prompt_tokens
        on_decode = min(prompt, context.placed_tokens(decode))
        if prefill:
            cached = min(prompt, context.placed_tokens(prefill[0]))
        else:
            is_decode = decode.estimates.is_decode
            cached = min(on_decode, context.cached_tokens(decode)) if is_decode else on_decode
        output = self.expected_output(request)
        return PlacedPrompt(prompt, cached, on_decode, output, is_stream=request.is_stream)

    def expected_output(self, request: InferenceRequest | None) -> float:
        """Tokens that the answer to `request` is expected to have."""
        if request is None:
            return 0.0
        limit = request.max_tokens
        return self._output_tokens if limit is None else min(self._output_tokens, float(limit))

    def _layout(
        self,
        ready: tuple[Pod, ...],
        model: str | None,
        settings: CostSettings,
        *,
        is_whole_fleet: bool,
    ) -> _Layout:
        version = (self._fleet.members_version, settings)
        if version != self._version:
            self._layouts.clear()
            self._version = version
        # Names that no backend lists share one layout: clients cannot grow the table.
        key = self._fleet.model_key(model)
        layout = self._layouts.get(key) if is_whole_fleet else None
        if layout is None:
            layout = self._make_layout(ready, model)
            self._apply_settings(layout.pods, settings)
            if is_whole_fleet:
                self._layouts[key] = layout
        return layout

    def _make_layout(self, ready: tuple[Pod, ...], model: str | None) -> _Layout:
        indices = {pod: i for i, pod in enumerate(ready)}
        decodes = tuple(i for i, pod in enumerate(ready) if pod.backend.role.serves(Role.DECODE))
        members: dict[tuple[int, ...], list[int]] = {}
        for i in decodes:
            candidates = self._fleet.prefill_candidates(model, ready[i])
            prefills = tuple(
                indices[pod] for pod in candidates if pod in indices and can_hand_off(pod, ready[i])
            )
            if prefills:
                members.setdefault(prefills, []).append(i)
        names = tuple(pod.name for pod in ready)
        groups = tuple(Group(prefills, tuple(which)) for prefills, which in members.items())
        return _Layout(
            ready,
            names,
            tuple(sorted(names).index(name) for name in names),
            decodes,
            groups,
            tuple(sorted({i for group in groups for i in group.prefills})),
            frozenset(i for group in groups for i in group.decodes),
        )

    def _apply_settings(self, pods: Sequence[Pod], settings: CostSettings) -> None:
        for pod in pods:
            estimates = pod.estimates
            # A unified pod is spared too where other pods are there to prefill for it.
            serves_decode = pod.backend.role.serves(Role.DECODE)
            estimates.is_decode = serves_decode and self._fleet.is_disaggregated(pod)
            known = (settings.kv[model] for model in pod.backend.models if model in settings.kv)
            estimates.kv = next(known, None)
            estimates.changed()

    def _fill_in(self, now: float) -> None:
        self._filled_in_at = now
        # First whatever the role, then overruled by pods of the same role where some are known:
        # a decode pod that never computed a prompt is no faster than the prefill pods.
        for is_role_equal in (False, True):
            fill_in(
                (
                    (
                        pod.backend.role if is_role_equal else None,
                        pod.backend.models,
                        pod.backend.compat,
                    ),
                    pod.estimates,
                )
                for pod in self._fleet
            )
        outputs = [o for pod in self._fleet if (o := pod.estimates.output_tokens) is not None]
        if outputs:
            self._output_tokens = sum(outputs) / len(outputs)


def _decide(  # noqa: PLR0917 - the parts of one decision
    context: ScoringContext,
    layout: _Layout,
    candidates: Candidates,
    request: RequestFigures,
    choice: Choice,
    refusal: str | None,
) -> PathDecision:
    """The path and the reason of a choice; `refusal`: why a split was out of the question."""
    if choice.prefills:
        return PathDecision(RoutingPath.PREFILL_THEN_DECODE, "worth_it")
    if refusal is not None:
        return PathDecision(RoutingPath.UNIFIED, refusal)
    index = choice.decodes[0]
    pod = layout.pods[index]
    # Only what is confirmed makes a prefill superfluous; what is placed may still be computed.
    cached = context.cached_tokens(pod)
    if cached and request.prompt - cached <= candidates.tail:
        return PathDecision(RoutingPath.FAST_DECODE, "cached")
    if index not in layout.grouped:
        figures = candidates.pods[index]
        if would_split(request, figures, candidates.alone[index]):
            return PathDecision(RoutingPath.FALLBACK, "no_prefill_backend")
    if choice.is_transfer_too_long:
        return PathDecision(RoutingPath.UNIFIED, "transfer_too_long")
    return PathDecision(RoutingPath.UNIFIED, "cheaper_here")


def _all_figures(pods: Sequence[Pod], now: float) -> list[PodFigures]:
    """The figures of each pod; inlined, because this runs for every pod and request."""
    made = []
    for pod in pods:
        estimates = pod.estimates
        if (figures := estimates.known_figures) is None or estimates.expires <= now:
            figures = estimates.figures(now)
        if rate := pod.health.failure_rate:
            figures = figures._replace(standing=figures.standing + FAILURE_SECONDS * rate)
        made.append(figures)
    return made


def _single_engine_reason(context: ScoringContext) -> str | None:
    return context.request.single_engine_reason if context.request else "passthrough"
