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

from tandem_contract.paths import Role, RoutingPath
from tandem_planner.choice import Candidates, Choice, Group, choose, would_split
from tandem_planner.cost import RequestFigures
from tandem_planner.figure_table import FigureTable
from tandem_planner.kv_size import KvSize

from ..backends.fleet import Fleet
from ..backends.pairing import can_hand_off
from ..backends.pods import Pod
from ..estimates.cost_record import CostRecord
from ..estimates.request_load import PlacedPrompt
from ..request import InferenceRequest
from .decider import TAIL_BLOCKS, NoBackend, PathDecision, SplitImpossible
from .profile import ScoringContext
from .prompt_tokens import PromptTokens, prompt_tokens
from .unseen import UnseenPlacements, with_unseen


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
    cached_tokens: int
    """Prompt tokens believed to be cached on the decode pod."""
    record: CostRecord
    size: PlacedPrompt
    """What the request is predicted to take."""


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """The pods that may serve a model, and which of them can exchange KV, as rows of the fleet's
    figures. Computed once per change of the pods."""

    rows: tuple[int, ...]
    turns: tuple[int, ...]
    """The position of each pod of `rows` in the order of names, the same in all replicas."""
    decodes: tuple[int, ...]
    groups: tuple[Group, ...]
    prefills: tuple[int, ...]
    """All pods of `groups` that prefill."""
    grouped: frozenset[int]
    """Decode pods that are in a group."""
    is_decode: tuple[bool, ...]
    """Of each row, whether other pods are there to prefill for it."""


class CostScheduler:
    """Schedules requests on the pods of a fleet by cost."""

    def __init__(self, fleet: Fleet, random: Random) -> None:
        self._fleet, self._random = fleet, random
        self._layouts: dict[str | None, _Layout] = {}
        """Model → layout, as of `_version`."""
        self._version: object = None
        self._unseen = UnseenPlacements()

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
        `can_fall_back`: or one pod instead of a split. Raises
        SplitImpossible; NoBackend when no predicted cost is finite."""
        layout = self._layout(ready, model, settings, is_whole_fleet=is_whole_fleet)
        if not layout.decodes:
            return None
        request, refusal = context.request, _single_engine_reason(context)
        figures = RequestFigures(
            request.prompt_tokens if request else 0, self.expected_output(request), now
        )
        may_split = can_split and settings.split and refusal is None
        # First: it brings the rows up to date.
        table = self._fleet.figures.at(now)
        if (order := self._fleet.replica_order()).replicas > 1:
            placed = self._unseen.count_decision(now)
            table = with_unseen(
                table, self._fleet.figures, layout.rows, layout.turns, order, placed
            )
        tokens = prompt_tokens(context, self._fleet.figures)
        candidates = self._candidates(table, tokens, layout, context, model, may_split=may_split)
        choice = choose(figures, candidates, self._random, count=settings.max_endpoints)
        if not choice.decodes:
            raise NoBackend
        pods = self._fleet.figures.pods
        decode, prefill = [pods[i] for i in choice.decodes], [pods[i] for i in choice.prefills]
        if not (can_split and self._fleet.is_disaggregated(decode[0])):
            refusal = "not_disaggregated"
        elif not settings.split:
            refusal = "split_off"
        cached = min(figures.prompt, tokens.cached[choice.decodes[0]])
        decision = _decide(layout, candidates, figures, choice, cached, refusal)
        if decision.path is RoutingPath.FALLBACK and not can_fall_back:
            raise SplitImpossible("no prefill backend is healthy")
        record = CostRecord(
            figures, self._fleet.figures.names, tuple(candidates.pods.pods), candidates.cached,
            candidates.alone, layout.decodes, layout.prefills if may_split else (),
            choice.decodes[0], choice.prefills[0] if choice.prefills else None,
        )  # fmt: skip
        size = _size(request, record) if request is not None else PlacedPrompt()
        return CostChoice(decision, decode, prefill, cached, record, size)

    def size(self, context: ScoringContext, decode: Pod, prefill: Sequence[Pod]) -> PlacedPrompt:
        """What the request is predicted to take on pods that were not chosen by cost."""
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
        average, limit = self._fleet.figures.output_tokens, request.max_tokens
        return average if limit is None else min(average, float(limit))

    def _candidates(
        self,
        table: FigureTable,
        tokens: PromptTokens,
        layout: _Layout,
        context: ScoringContext,
        model: str | None,
        *,
        may_split: bool,
    ) -> Candidates:
        pods, request, cached = self._fleet.figures, context.request, tokens.placed
        # What is placed on a decode pod may still have to be transferred there.
        alone = cached
        if tokens.cached is not cached:
            alone = [
                confirmed if is_decode else placed
                for confirmed, placed, is_decode in zip(
                    tokens.cached, cached, layout.is_decode, strict=True
                )
            ]
        block_tokens = pods.pods[layout.decodes[0]].block_tokens
        extra = None
        if model is not None and self._fleet.is_adapter(model):
            extra = {i: pods.pods[i].adapters.load_seconds(model) for i in layout.decodes}
        return Candidates(
            table,
            cached,
            alone,
            layout.decodes,
            layout.groups if may_split else (),
            extra,
            TAIL_BLOCKS * max(block_tokens, request.last_block_tokens if request else 0),
        )

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
            self._apply_settings(ready, settings)
            layout = self._make_layout(ready, model)
            if is_whole_fleet:
                self._layouts[key] = layout
        return layout

    def _make_layout(self, ready: tuple[Pod, ...], model: str | None) -> _Layout:
        row_of, allowed = self._fleet.figures.rows, frozenset(ready)
        decodes = [pod for pod in ready if pod.backend.role.serves(Role.DECODE)]
        members: dict[tuple[int, ...], list[int]] = {}
        for decode in decodes:
            prefills = tuple(
                row_of[pod]
                for pod in self._fleet.prefill_candidates(model, decode)
                if pod in allowed and can_hand_off(pod, decode)
            )
            if prefills:
                members.setdefault(prefills, []).append(row_of[decode])
        names = sorted(pod.name for pod in ready)
        return _Layout(
            tuple(row_of[pod] for pod in ready),
            tuple(names.index(pod.name) for pod in ready),
            tuple(row_of[pod] for pod in decodes),
            tuple(Group(prefills, tuple(which)) for prefills, which in members.items()),
            tuple(sorted({i for prefills in members for i in prefills})),
            frozenset(i for which in members.values() for i in which),
            tuple(pod.estimates.is_decode for pod in self._fleet),
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


def _decide(  # noqa: PLR0917 - the parts of one decision
    layout: _Layout,
    candidates: Candidates,
    request: RequestFigures,
    choice: Choice,
    cached: int,
    refusal: str | None,
) -> PathDecision:
    """The path and the reason of a choice; `cached`: tokens on the chosen decode pod, `refusal`:
    why a split was out of the question."""
    if choice.prefills:
        return PathDecision(RoutingPath.PREFILL_THEN_DECODE, "worth_it")
    if refusal is not None:
        return PathDecision(RoutingPath.UNIFIED, refusal)
    # Only what is confirmed makes a prefill superfluous; what is placed may still be computed.
    if cached and request.prompt - cached <= candidates.tail:
        return PathDecision(RoutingPath.FAST_DECODE, "cached")
    row = choice.decodes[0]
    if row not in layout.grouped and would_split(
        request, candidates.pods.pods[row], candidates.alone[row]
    ):
        return PathDecision(RoutingPath.FALLBACK, "no_prefill_backend")
    if choice.is_transfer_too_long:
        return PathDecision(RoutingPath.UNIFIED, "transfer_too_long")
    return PathDecision(RoutingPath.UNIFIED, "cheaper_here")


def _size(request: InferenceRequest, record: CostRecord) -> PlacedPrompt:
    """What the request is predicted to take on the chosen pods."""
    prompt, output, _ = record.request
    computing = record.decode if record.prefill is None else record.prefill
    cached = min(prompt, record.alone[computing])
    on_decode = min(prompt, record.cached[record.decode])
    return PlacedPrompt(prompt, cached, on_decode, output, is_stream=request.is_stream)


def _single_engine_reason(context: ScoringContext) -> str | None:
    return context.request.single_engine_reason if context.request else "passthrough"
