"""`EndpointPickerConfig` under llm-d's names (llm-d-router), read from the router's YAML file.

    plugins: [{type, name (default: the type), parameters}]
    schedulingProfiles: [{name, plugins: [{pluginRef, weight (default 1)}]}]
    featureGates: [flowControl], flowControl: how requests wait (`flow_control`)
    dataLayer, requestHandler: checked, without effect (`notices`)

Without a plugin that takes part in the choice (scorer, filter, picker, decider, handler), and with
`predicted-cost`, which stands alone, the predicted cost chooses. Otherwise every profile filters by
the role of its phase, listed or not. Without `schedulingProfiles`, both phases use every plugin
listed, with weight 1, and with one profile both use that one; prefill-filter and decode-filter
apply to their own phase only.

A disagg-profile-handler that names no decider, or no listed prefill profile, turns splitting off.
Without a handler, the decider that is listed applies, or the default one.

Errors: `documents.DocumentError`, with file and line. An unknown plugin type comes with the most
similar known one.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from tandem_contract.api_paths import ApiPaths
from tandem_contract.config import DisaggregatedServing, FlowControl
from tandem_contract.documents import Document, steps
from tandem_contract.paths import Role
from tandem_contract.plan import ResumeLimits
from tandem_contract.slo import SECTION as SLO
from tandem_contract.slo import Slo, read_slos
from tandem_planner.kv_size import KvSize, kv_size
from tandem_planner.model_config import UnknownModelConfig, model_config

from ...backends.scrape_settings import ScrapeSettings
from ...choice.cost_choice import CostSettings
from ...choice.routing import AddedHeader, Notice, PrefixIndexSettings, Routing, Scheduling
from ...flow.settings import FlowSettings, flow_settings
from ...prefix.kv_events.settings import EventSettings
from ...prefix.tokenization.models import several_tokenizers_mistake
from ...prefix.tokenization.tokenizer import TokenizerSettings
from .decider import DeciderSettings
from .flow_control import FlowControlReader, flow_notices, is_gate_open
from .listed_plugins import ListedPlugins
from .notices import difference_notices, section_notices
from .parameters import CostParameters, DeciderNames, HandlerParameters
from .picker_config import PickerConfig, read_picker_config, unknown_name
from .plugin_types import CHOOSING, Kind, PlacementLearner
from .prefix_affinity import PrefixAffinityFilter
from .profile_builder import ProfileBuilder
from .registry import PLUGINS, PREFIX_DECIDER, REGISTRY
from .score_choice import ScoreChoice, Summary
from .sessions import SessionFilter, SessionScorer, TokenSession

_SCORES: Final = "the listed plugins choose by scores: list predicted-cost alone, which weighs it"
_NO_SIZES: Final[Mapping[str, KvSize]] = MappingProxyType({})
_NO_SLOS: Final[Mapping[str, Slo]] = MappingProxyType({})
_NO_GATES: Final[Mapping[str, bool]] = MappingProxyType({})
_NO_FLOW: Final = FlowControl()


def load_routing(
    document: Document,
    fields: Mapping[str, Any],
    serving: DisaggregatedServing,
    resume: ResumeLimits | None = None,
    slos: Mapping[str, Slo] = _NO_SLOS,
    *,
    flow: FlowControl = _NO_FLOW,
    gates: Mapping[str, bool] = _NO_GATES,
) -> Routing:
    """The routing that `document` configures; the others are parts of it, all but `resume` as
    `load_scheduling` takes them. Raises DocumentError."""
    scheduling = load_scheduling(document, fields, serving, slos, flow=flow, gates=gates)
    is_silent = document.part("disaggregated_serving.enabled").data is None
    chooser = scheduling.chooser
    if isinstance(chooser, ScoreChoice):
        is_split_by_plugin = chooser.is_split_by_handler
    else:
        is_split_by_plugin = scheduling.cost.is_split_by_plugin
    if is_silent and is_split_by_plugin:
        serving = msgspec.structs.replace(serving, enabled=True)
    return Routing(serving, scheduling, ApiPaths(serving.api_paths), resume)


def load_scheduling(
    document: Document,
    fields: Mapping[str, Any],
    serving: DisaggregatedServing,
    slos: Mapping[str, Slo] = _NO_SLOS,
    *,
    flow: FlowControl = _NO_FLOW,
    gates: Mapping[str, bool] = _NO_GATES,
) -> Scheduling:
    """The scheduling that `fields` of `document` configure: all top-level fields but those of
    `tandem_contract.config`, of which `serving`, `slos` and `flow` are three. `gates`: llm-d's
    feature gates that the command line sets. Raises DocumentError."""
    config = read_picker_config(document, dict(fields))
    builder = _Builder(document, config, serving, slos)
    builder.own_flow, builder.gates = flow_settings(flow), gates
    builder.propagates_priority = flow.enabled and flow.propagate_priority
    return builder.build()


class _Builder:
    own_flow: FlowSettings | None = None
    propagates_priority = False
    gates: Mapping[str, bool] = _NO_GATES

    def __init__(
        self,
        document: Document,
        config: PickerConfig,
        serving: DisaggregatedServing,
        slos: Mapping[str, Slo],
    ) -> None:
        self._document, self._config, self._serving = document, config, serving
        self._slos = slos
        self._plugins = ListedPlugins(document, config.plugins)

    def build(self) -> Scheduling:
        # The handler names the profiles and the decider, so it comes first.
        handler = self._handler()
        self._plugins.prefill_profile = handler.prefill
        cost, chooser = self._cost(), self._score_choice(handler)
        # First: unknown gates and references are refused here.
        notices = self._notices((handler.decode, handler.prefill), by_scores=cost is None)
        return Scheduling(
            cost=cost or self._cost_settings(CostParameters()),
            chooser=chooser if cost is None else None,
            index=self._index(),
            events=self._events(),
            tokenizers=self._tokenizers(),
            added_headers=self._added_headers(),
            scraping=self._scraping(),
            flow=self._flow(),
            propagates_priority=self.propagates_priority or self._is_priority_asked,
            notices=notices,
        )

    def _score_choice(self, handler: HandlerParameters) -> ScoreChoice:
        profiles = ProfileBuilder(self._document, self._config.schedulingProfiles, self._plugins)
        decode, of_decode = profiles.build(handler.decode, Role.DECODE)
        prefill, of_prefill = profiles.build(handler.prefill, Role.PREFILL)
        decider = self._decider(handler.decider)
        listed = self._plugins.first(Kind.HANDLER)
        if listed is not None and not self._has_prefill_profile(handler.prefill):
            decider = replace(decider, split=False)
        name = listed.name if listed is not None else ""
        return ScoreChoice(
            decode=decode,
            prefill=prefill,
            decider=decider,
            learners=self._learners(),
            is_split_by_handler=listed is not None and decider.split,
            summary=Summary(of_decode, of_prefill, name, handler.decider or ""),
        )

    def _notices(self, used: tuple[str, str], *, by_scores: bool) -> tuple[Notice, ...]:
        unmet = by_scores and self._slos
        notices = (
            *((Notice(self._document.where([SLO]), SLO, _SCORES),) if unmet else ()),
            *section_notices(self._document, self._config, self._plugins.names),
            *difference_notices(self._document, self._config, self._plugins, used),
            *flow_notices(
                self._document,
                self._config,
                is_open=is_gate_open(self._config, self.gates),
                has_own=self.own_flow is not None,
            ),
        )
        return tuple(sorted(notices, key=lambda notice: notice.line))

    def _handler(self) -> HandlerParameters:
        # Of several handlers the first one listed counts.
        if (plugin := self._plugins.first(Kind.HANDLER)) is not None:
            handler: HandlerParameters = self._plugins.made(plugin)
            return handler
        decider = self._plugins.first(Kind.DECIDER)
        name = decider.name if decider is not None else PREFIX_DECIDER
        return HandlerParameters(deciders=DeciderNames(prefill=name))

    def _has_prefill_profile(self, name: str) -> bool:
        profiles = self._config.schedulingProfiles
        return not profiles or any(profile.name == name for profile in profiles)

    def _cost(self) -> CostSettings | None:
        choosing = [p.name for p in self._plugins if p.entry.kind in CHOOSING]
        plugin = self._plugins.first(Kind.COST)
        if plugin is None:
            return None if choosing else self._cost_settings(CostParameters())
        if choosing:
            message = f"predicted-cost stands alone: remove it, or {', '.join(choosing)}"
            raise self._document.error(plugin.path, message)
        parameters: CostParameters = self._plugins.made(plugin)
        sizes = load_kv_sizes(self._document, plugin.path, parameters)
        where = [*steps(plugin.path), "parameters", SLO]
        slos = read_slos(self._document, where, parameters.slo)
        return self._cost_settings(parameters, sizes, slos)

    def _cost_settings(
        self,
        parameters: CostParameters,
        sizes: Mapping[str, KvSize] = _NO_SIZES,
        slos: Mapping[str, Slo] = _NO_SLOS,
    ) -> CostSettings:
        serving = self._serving
        limit = serving.max_prefill_on_decode
        return CostSettings(
            sizes,
            parameters.maxNumOfEndpoints,
            split=serving.split or parameters.split or "auto",
            max_prefill_on_decode=parameters.maxPrefillOnDecode if limit is None else limit,
            # Of a model that has objectives in both places, those of the section count.
            slos={**slos, **self._slos},
            is_split_by_plugin=(parameters.split or parameters.maxPrefillOnDecode) is not None,
        )

    def _index(self) -> PrefixIndexSettings:
        # Of several index configurations the first one listed counts.
        if (plugin := self._plugins.first(Kind.PREFIX_INDEX)) is None:
            return PrefixIndexSettings()
        index: PrefixIndexSettings = self._plugins.made(plugin)
        return index

    def _events(self) -> EventSettings | None:
        for plugin in self._plugins:
            if plugin.entry.events is not None:
                return plugin.entry.events(plugin.parameters)
        return None

    def _tokenizers(self) -> tuple[TokenizerSettings, ...]:
        listed = self._plugins.of(Kind.TOKENIZER)
        tokenizers: tuple[TokenizerSettings, ...] = tuple(map(self._plugins.made, listed))
        for number, plugin in enumerate(listed if len(listed) > 1 else ()):
            mistake = several_tokenizers_mistake(tokenizers[: number + 1])
            if mistake is not None:
                raise self._document.error(plugin.path, mistake)
        return tokenizers

    def _decider(self, name: str | None) -> DeciderSettings:
        if name is None:
            return DeciderSettings(
                split=False, fallback_to_unified=self._serving.fallback_to_unified
            )
        plugin = self._plugins.find(name)
        # A decider may be named without being listed: then it has its default parameters.
        entry = plugin.entry if plugin is not None else REGISTRY.get(name)
        if entry is None or entry.kind is not Kind.DECIDER:
            deciders = [entry.type_name for entry in PLUGINS if entry.kind is Kind.DECIDER]
            raise self._document.error("plugins", unknown_name("decider", name, deciders))
        parameters = plugin.parameters if plugin is not None else entry.parameters()
        settings: DeciderSettings = entry.make(parameters, self._plugins)
        serving = self._serving
        return replace(
            settings,
            fallback_to_unified=serving.fallback_to_unified,
            always=settings.always or serving.split == "always",
            max_prefill_on_decode=serving.max_prefill_on_decode,
        )

    def _learners(self) -> tuple[PlacementLearner, ...]:
        learners: dict[int, PlacementLearner] = {}
        for part in self._plugins.parts:
            for each in (part.filter, part.scorer):
                inner: object = each
                if isinstance(each, SessionFilter | SessionScorer):
                    inner = each.session
                elif isinstance(each, PrefixAffinityFilter):
                    inner = each.shares
                if isinstance(inner, PlacementLearner):
                    # Two scorers may use one producer, which sees each request once.
                    learners[id(inner)] = inner
        return tuple(learners.values())

    def _added_headers(self) -> tuple[AddedHeader, ...]:
        headers: dict[AddedHeader, None] = {}
        for part in self._plugins.parts:
            for each in (part.filter, part.scorer):
                if isinstance(each, SessionFilter | SessionScorer) and isinstance(
                    each.session, TokenSession
                ):
                    headers[each.session] = None
        if (plugin := self._plugins.first(Kind.RESPONSE)) is not None:
            headers[self._plugins.made(plugin)] = None
        return tuple(headers)

    @property
    def _is_priority_asked(self) -> bool:
        handler = self._config.requestHandler
        return handler is not None and handler.propagatePriority

    def _flow(self) -> FlowSettings | None:
        if self.own_flow is not None or not is_gate_open(self._config, self.gates):
            return self.own_flow
        return FlowControlReader(self._document, self._config, self._plugins).read()

    def _scraping(self) -> ScrapeSettings:
        if (plugin := self._plugins.first(Kind.METRICS)) is None:
            return ScrapeSettings()
        try:
            settings: ScrapeSettings = self._plugins.made(plugin)
            return settings
        except ValueError as err:
            raise self._document.error(f"{plugin.path}.parameters", str(err)) from err


def load_kv_sizes(document: Document, path: str, parameters: CostParameters) -> dict[str, KvSize]:
    """Model → size of its KV; `path`: where the plugin stands in `document`. Raises DocumentError.

    A directory stands for the config.json in it.
    """
    sizes = {}
    for model, name in parameters.modelConfigs.items():
        file = Path(name)
        file = file / "config.json" if file.is_dir() else file
        try:
            fields = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
            sizes[model] = kv_size(model_config(fields), parameters.kvCacheDtype)
        except (OSError, msgspec.MsgspecError, UnknownModelConfig) as err:
            where = f"{path}.parameters.modelConfigs"
            raise document.error(where, f"{model}: {file}: {err}") from err
    return sizes
