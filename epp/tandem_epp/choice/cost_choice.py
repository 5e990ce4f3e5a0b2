"""Chooses decode pod, path and prefill pod at once, by the predicted cost in seconds.

`CostScheduler` collects the figures of the pods that may serve a request, asks the planner's
`choose`, and gives the choice its path and reason. What the cost is, term by term, is in
`tandem_planner.cost`.

    reason               path                  the cheapest way is
    worth_it             prefill_then_decode   a pair of pods
    always               prefill_then_decode   a pair, since the configuration splits everything
    prefill_limit        prefill_then_decode   a pair, since more of the prompt is not cached than
                                               a decode pod may prefill
    cached               fast_decode           a pod that has all of the prompt but its end
    stored               fast_decode           a pod that loads it from external storage
    cheaper_here         unified               one pod, cheaper than any pair
    transfer_too_long    unified               one pod: the transfer exceeds half of the prefill
    not_disaggregated    unified               one pod, since no other may prefill for it
    split_off            unified               one pod, since the configuration forbids a split
    no_prefill_backend   fallback              a pair, or a pair is prescribed, but no pod that
                                               could prefill is healthy

A request that one engine must serve alone has that rule's reason and the path unified.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from tandem_contract.config import SplitMode
from tandem_contract.fabric_classes import FabricClass
from tandem_contract.paths import Role, RoutingPath
from tandem_contract.slo import Slo
from tandem_planner.choice import Candidates, Choice, choose, would_split
from tandem_planner.cost import RequestFigures
from tandem_planner.figure_table import FigureTable
from tandem_planner.kv_size import KvSize
from tandem_planner.storage import NO_LOAD, Load, is_served_from_storage

from ..backends.fleet import Fleet
from ..backends.pods import Pod
from ..estimates.cost_record import CostRecord
from ..estimates.request_load import PlacedPrompt
from ..request.inference import InferenceRequest
from .candidate_layout import CandidateLayout, RecentlyUsed, make_layout, partner_fabrics
from .context import ChoiceContext
from .prompt_tokens import PromptTokens, prompt_tokens
from .result import MAX_UNSPLIT_BLOCKS, NoBackend, PathDecision, SchedulingResult, SplitImpossible
from .stored_prompts import Loads, add_loads, load_of

_UNIFIED: Final = RoutingPath.UNIFIED
# Made once: to make a named tuple takes as long as the rest of the decision on the path.
_WORTH_IT: Final = PathDecision(RoutingPath.PREFILL_THEN_DECODE, "worth_it")
_ALWAYS: Final = PathDecision(RoutingPath.PREFILL_THEN_DECODE, "always")
_LIMIT: Final = PathDecision(RoutingPath.PREFILL_THEN_DECODE, "prefill_limit")
_CACHED: Final = PathDecision(RoutingPath.FAST_DECODE, "cached")
_STORED: Final = PathDecision(RoutingPath.FAST_DECODE, "stored")
_NO_PREFILL: Final = PathDecision(RoutingPath.FALLBACK, "no_prefill_backend")
_TOO_LONG: Final = PathDecision(_UNIFIED, "transfer_too_long")
_CHEAPER_HERE: Final = PathDecision(_UNIFIED, "cheaper_here")


@dataclass(frozen=True)
class CostSettings:
    """The settings of the choice by cost."""

    kv: Mapping[str, KvSize] = field(default_factory=dict)
    """Model → size of its KV, from its config.json. Others are learned from transfers."""
    max_endpoints: int = 1
    """Addresses in the destination header: the decode pod and its alternates."""
    split: SplitMode = "auto"
    max_prefill_on_decode: int | None = None
    """As in `DisaggregatedServing`, as is `split`."""
    slos: Mapping[str, Slo] = field(default_factory=dict)
    """Model or adapter → what its requests are to meet."""
    is_split_by_plugin: bool = False
    """Whether the plugin names what to split: then requests are split although
    `disaggregated_serving` is silent."""


class CostScheduler:
    """Schedules requests on the pods of a fleet by cost."""

    def __init__(self, fleet: Fleet, random: Random) -> None:
        self._fleet, self._random = fleet, random
        self._layouts: dict[str | None, CandidateLayout] = {}
        """Model → layout, as of `_version`."""
        self._narrowed: RecentlyUsed[tuple[str | None, tuple[Pod, ...]], CandidateLayout]
        self._narrowed = RecentlyUsed()
        """Those of some of the pods, as of `_version`."""
        self._fabrics: dict[Pod, frozenset[FabricClass]] = {}
        """What `partner_fabrics` returns, as of `_version`."""
        self._version: object = None
        self._alternates = 0
        """Counts on with each pod that is considered: the requests of a pod that fails spread."""

    def schedule(
        self,
        ready: tuple[Pod, ...],
        context: ChoiceContext,
        model: str | None,
        settings: CostSettings,
        now: float,
        *,
        can_split: bool,
        can_fall_back: bool,
    ) -> SchedulingResult | None:
        """Choose among `ready`, which are all or some of the fleet's ready pods for `model`; None
        when none of them may decode. `can_split`: the configuration allows a split;
        `can_fall_back`: or one pod instead of a split. Raises SplitImpossible; NoBackend when no
        predicted cost is finite."""
        layout = self._layout(ready, model, settings)
        if not layout.decodes:
            return None
        request, refusal = context.request, _single_engine_reason(context)
        prompt = request.prompt_tokens if request else 0
        may_split = can_split and refusal is None
        # First: it brings the rows up to date.
        table = self._fleet.figures.at(now)
        if model is not None and self._fleet.is_adapter(model):
            table = _with_adapter(table, self._fleet.figures.pods, layout.rows, model)
        tokens = prompt_tokens(context, self._fleet.figures)
        candidates = self._candidates(table, tokens, layout, request, may_split=may_split)
        loads: Loads = {}
        if context.precise is not None and context.precise.stored:
            candidates, loads = add_loads(context, candidates, self._fleet.figures, now)
        alone = _alone(layout, candidates, prompt, settings) if may_split else None
        figures = RequestFigures(
            prompt,
            self.expected_output(request),
            now,
            self._fleet.overheads.handoff(now),
            alone is not None,
            self._fleet.objective(model),
        )
        # Without a pair, the few pods that cache enough would get all requests.
        allowed = alone if candidates.groups or not can_fall_back else None
        choice = choose(
            figures, candidates, self._random, count=settings.max_endpoints, alone=allowed
        )
        if not choice.decodes:
            raise NoBackend
        pods = self._fleet.figures.pods
        decode, prefill = [pods[i] for i in choice.decodes], [pods[i] for i in choice.prefills]
        if not self._fleet.is_disaggregated(decode[0]):
            refusal = "not_disaggregated"
        elif not can_split:
            refusal = "split_off"
        cached = min(figures.prompt, tokens.cached[choice.decodes[0]])
        load = loads.get((choice.prefills or choice.decodes)[0], NO_LOAD) if loads else NO_LOAD
        if alone is not None and choice.decodes[0] not in alone and refusal is None:
            decision = _prescribed(choice, settings)
        else:
            decision = self._decide(layout, candidates, figures, choice, cached, load, refusal)
        if decision is _NO_PREFILL and not can_fall_back:
            raise SplitImpossible("no prefill backend is healthy")
        record = CostRecord(
            figures, self._fleet.figures.names, tuple(candidates.pods.pods), candidates.cached,
            candidates.cached_if_computing, layout.decodes, layout.prefills if may_split else (),
            choice.decodes[0], choice.prefills[0] if choice.prefills else None,
            choice.fabric, layout.fabrics, layout.grouped, choice.ready,
        )  # fmt: skip
        size = _size(request, record) if request is not None else PlacedPrompt()
        alternate = self._alternate(layout, choice) if settings.max_endpoints == 1 else None
        return SchedulingResult(
            decision, decode, prefill, cached, record, size, load.tokens, alternate
        )

    def _alternate(self, layout: CandidateLayout, choice: Choice) -> Pod | None:
        """Another pod for the request if the chosen one takes nothing: any that can read the KV of
        the chosen prefill pods. None: there is none."""
        chosen = choice.decodes[0]
        rows: Sequence[int] = layout.decodes
        if choice.prefills:
            for group in layout.groups:
                if chosen in group.decodes:
                    rows = group.decodes
        pods = self._fleet.figures.pods
        address = pods[chosen].address
        for _ in rows:
            self._alternates += 1
            row = rows[self._alternates % len(rows)]
            # Ranks of one backend share its address. No pod prefills for itself.
            if row != chosen and pods[row].address != address and row not in choice.prefills:
                return pods[row]
        return None

    def size(self, context: ChoiceContext, decode: Pod, prefill: Sequence[Pod]) -> PlacedPrompt:
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
        loaded = load_of(context, prefill[0] if prefill else decode, cached).tokens
        output = self.expected_output(request)
        return PlacedPrompt(
            prompt,
            cached + loaded,
            on_decode,
            output,
            is_stream=request.is_stream,
            loaded=loaded,
            limit=request.max_tokens or 0,
        )

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
        layout: CandidateLayout,
        request: InferenceRequest | None,
        *,
        may_split: bool,
    ) -> Candidates:
        cached = tokens.placed
        # What is placed on a decode pod may still have to be transferred there.
        if_computing = cached
        if tokens.cached is not cached:
            if_computing = [
                confirmed if is_decode else placed
                # Without `strict`, `zip` is compiled to a loop over an index.
                for confirmed, placed, is_decode in zip(  # noqa: B905
                    tokens.cached, cached, layout.is_decode
                )
            ]
        block_tokens = self._fleet.figures.pods[layout.decodes[0]].block_tokens
        return Candidates(
            table,
            cached,
            if_computing,
            layout.decodes,
            layout.groups if may_split else (),
            MAX_UNSPLIT_BLOCKS * max(block_tokens, request.last_block_tokens if request else 0),
        )

    def _decide(  # noqa: PLR0917 - the parts of one decision
        self,
        layout: CandidateLayout,
        candidates: Candidates,
        request: RequestFigures,
        choice: Choice,
        cached: int,
        load: Load,
        refusal: str | None,
    ) -> PathDecision:
        """The path and the reason of a choice; `cached`: tokens on the chosen decode pod, `load`:
        what the computing pod loads, `refusal`: why a split was out of the question."""
        if choice.prefills:
            return _WORTH_IT
        if refusal is not None:
            return PathDecision(_UNIFIED, refusal)
        # Only what is confirmed makes a prefill superfluous; what is placed may still be computed.
        if cached and request.prompt - cached <= candidates.max_unsplit_tokens:
            return _CACHED
        if load.tokens and is_served_from_storage(request.prompt, cached, load):
            return _STORED
        row = choice.decodes[0]
        if not layout.has_prefill_pod(row) and would_split(
            request,
            candidates.pods.pods[row],
            candidates.cached_if_computing[row],
            self._partner_fabrics(self._fleet.figures.pods[row]),
            candidates.cached[row],
        ):
            return _NO_PREFILL
        return _TOO_LONG if choice.is_transfer_too_long else _CHEAPER_HERE

    def _partner_fabrics(self, decode: Pod) -> frozenset[FabricClass]:
        if (fabrics := self._fabrics.get(decode)) is None:
            fabrics = self._fabrics[decode] = partner_fabrics(self._fleet, decode)
        return fabrics

    def _layout(
        self, ready: tuple[Pod, ...], model: str | None, settings: CostSettings
    ) -> CandidateLayout:
        version = (self._fleet.members_version, settings)
        if version != self._version:
            self._layouts.clear()
            self._narrowed.clear()
            self._fabrics.clear()
            self._version = version
        # Names that no backend lists share one layout: clients cannot grow the table.
        key = self._fleet.model_key(model)
        if (layout := self._layouts.get(key)) is None:
            whole = self._fleet.ready_pods(model)
            self._apply_settings(whole, settings)
            layout = self._layouts[key] = make_layout(self._fleet, whole, model)
        if len(ready) == len(layout.rows):
            return layout
        rows = self._fleet.figures.rows
        return self._narrowed.get(
            (key, ready), lambda: layout.within(frozenset([rows[pod] for pod in ready]))
        )

    def _apply_settings(self, pods: Sequence[Pod], settings: CostSettings) -> None:
        # A pod that lists no models serves any: the only entry is then meant for it.
        only = next(iter(settings.kv.values())) if len(settings.kv) == 1 else None
        for pod in pods:
            estimates, models = pod.estimates, pod.backend.models
            # A unified pod is spared too where other pods are there to prefill for it.
            serves_decode = pod.backend.role.serves(Role.DECODE)
            estimates.serves_decode = serves_decode
            estimates.is_decode = serves_decode and self._fleet.is_disaggregated(pod)
            serves_prefill = pod.backend.role.serves(Role.PREFILL)
            estimates.is_unified = serves_decode and serves_prefill and not estimates.is_decode
            known = (settings.kv[model] for model in models if model in settings.kv)
            estimates.kv = next(known, None) if models else only
            estimates.learned()


def _alone(
    layout: CandidateLayout, candidates: Candidates, prompt: int, settings: CostSettings
) -> Sequence[int] | None:
    """The pods that may serve a request of `prompt` tokens alone while there are pairs; None: all
    that may decode."""
    if settings.split == "always":
        # Without a prefill pod, unified pods split among each other only what is faster that way.
        is_unified = layout.prefills and all(row in layout.unified for row in layout.prefills)
        return None if is_unified else ()
    limit, cached = settings.max_prefill_on_decode, candidates.cached_if_computing
    if limit is None:
        return None
    alone = [
        row
        for row in layout.decodes
        if row in layout.unified or max(1, prompt - cached[row]) <= limit
    ]
    return None if len(alone) == len(layout.decodes) else alone


def _prescribed(choice: Choice, settings: CostSettings) -> PathDecision:
    """The path and the reason where the configuration prescribes a split, whatever it costs."""
    if not choice.prefills:
        return _NO_PREFILL
    return _ALWAYS if settings.split == "always" else _LIMIT


def _with_adapter(
    table: FigureTable, pods: Sequence[Pod], rows: Sequence[int], adapter: str
) -> FigureTable:
    """`table` with what a request for `adapter` costs in addition where it is not loaded."""
    changed = table.copy()
    for row in rows:
        if seconds := pods[row].adapters.load_seconds(adapter):
            figures = table.pods[row]
            changed.write(row, figures._replace(standing=figures.standing + seconds))
    return changed


def _size(request: InferenceRequest, record: CostRecord) -> PlacedPrompt:
    """What the request is predicted to take on the chosen pods."""
    prompt, output = record.request.prompt, record.request.output
    computing = record.decode if record.prefill is None else record.prefill
    cached = min(prompt, record.cached_if_computing[computing])
    on_decode = min(prompt, record.cached[record.decode])
    loaded = record.pods[computing].loaded
    return PlacedPrompt(
        prompt,
        cached,
        on_decode,
        output,
        is_stream=request.is_stream,
        loaded=loaded,
        limit=request.max_tokens or 0,
    )


def _single_engine_reason(context: ChoiceContext) -> str | None:
    return context.request.single_engine_reason if context.request else "passthrough"
