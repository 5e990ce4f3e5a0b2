"""`EndpointPickerConfig` under llm-d's names (llm-d-router 0.8), read from the router's YAML file.

    plugins: [{type, name (default: the type), parameters}]
    schedulingProfiles: [{name, plugins: [{pluginRef, weight (default 1)}]}]

Without a plugin that takes part in the choice (scorer, filter, picker, decider, handler), and with
`predicted-cost`, which stands alone, the predicted cost chooses. Otherwise every profile filters by
the role of its phase, listed or not. Without `schedulingProfiles`, both phases use every plugin
listed, with weight 1; prefill-filter and decode-filter apply to their own phase only.

A disagg-profile-handler that names no decider turns splitting off. Without a handler, the decider
that is listed applies, or the default one.

Errors: `documents.DocumentError`, with file and line. An unknown plugin type comes with the most
similar known one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import msgspec

from tandem_contract.config import DisaggregatedServing
from tandem_contract.documents import Document, steps
from tandem_contract.paths import Role

from ..kv_events.settings import EventSettings
from ..tokenization.tokenizer import TokenizerSettings
from .cost_choice import CostSettings
from .decider import DeciderSettings
from .model_configs import load_kv_sizes
from .parameters import CostParameters, DeciderNames, HandlerParameters, Strict
from .pickers import MaxScorePicker
from .profile import Picker, Profile, Scorer
from .registry import (
    PLUGINS,
    PREFIX_DECIDER,
    REGISTRY,
    CostType,
    DeciderType,
    FilterType,
    HandlerType,
    PickerType,
    PluginType,
    PreciseIndexType,
    PreciseScorerType,
    PrefixIndexSettings,
    PrefixIndexType,
    ScorerType,
    TokenizerType,
    unknown_name,
)
from .scorers import RoleFilter

KIND: Final = "EndpointPickerConfig"
API_VERSIONS: Final = ("llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1")
S = TypeVar("S", bound=msgspec.Struct)
_CHOOSING: Final = (ScorerType, FilterType, PickerType, DeciderType, HandlerType)
"""Plugins that take part in a choice by scores."""


class PluginEntry(Strict, frozen=True):
    """An entry of `plugins`."""

    type: str
    name: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)


class PluginRef(Strict, frozen=True):
    """An entry of a profile."""

    pluginRef: str  # noqa: N815 - llm-d's name
    weight: float = 1.0


class SchedulingProfile(Strict, frozen=True):
    """An entry of `schedulingProfiles`."""

    name: str
    plugins: tuple[PluginRef, ...] = ()


class PickerConfig(Strict, frozen=True):
    """The document without `disaggregated_serving` and `backends`."""

    apiVersion: str = API_VERSIONS[0]  # noqa: N815 - Kubernetes' name
    kind: str = KIND
    plugins: tuple[PluginEntry, ...] = ()
    schedulingProfiles: tuple[SchedulingProfile, ...] = ()  # noqa: N815 - llm-d's name


@dataclass(frozen=True)
class Scheduling:
    """The profiles, the decider and the index settings that a configuration results in."""

    cost: CostSettings | None
    """The choice by cost; None: profiles and decider choose."""
    decode: Profile
    prefill: Profile
    decider: DeciderSettings
    index: PrefixIndexSettings
    events: EventSettings | None
    """KV events to follow; None: the approximate index alone answers."""
    tokenizer: TokenizerSettings
    """How prompts are tokenized, where events are followed."""


@dataclass(frozen=True)
class Routing:
    """The part of the configuration that decides where requests go; a reload replaces it."""

    serving: DisaggregatedServing
    scheduling: Scheduling


def load_scheduling(
    document: Document, fields: Mapping[str, Any], serving: DisaggregatedServing
) -> Scheduling:
    """The scheduling that `fields` of `document` configure: all top-level fields but
    `disaggregated_serving` and `backends`. Raises DocumentError."""
    config = _convert(document, "", dict(fields), PickerConfig)
    if config.kind != KIND:
        raise document.error("kind", f"{config.kind!r} is not {KIND}")
    if config.apiVersion not in API_VERSIONS:
        raise document.error("apiVersion", f"{config.apiVersion!r} is not {API_VERSIONS[0]}")
    return _Builder(document, config, serving.fallback_to_unified).build()


@dataclass(frozen=True)
class _Plugin:
    """A configured plugin: its registry entry and its parameters."""

    entry: PluginType[Any]
    parameters: msgspec.Struct


class _Builder:
    def __init__(self, document: Document, config: PickerConfig, fallback: bool) -> None:
        self._document, self._config, self._fallback = document, config, fallback
        self._plugins: dict[str, _Plugin] = {}
        """Name → plugin."""
        for i, entry in enumerate(config.plugins):
            self._add(f"plugins[{i}]", entry)

    def build(self) -> Scheduling:
        # The handler names the profiles and the decider, so it comes first.
        handler = self._handler()
        return Scheduling(
            cost=self._cost(),
            decode=self._profile(handler.profiles.decode, Role.DECODE),
            prefill=self._profile(handler.profiles.prefill, Role.PREFILL),
            decider=self._decider(handler.deciders.prefill or handler.deciderPluginName),
            index=self._index(),
            events=self._events(),
            tokenizer=self._tokenizer(),
        )

    def _add(self, path: str, entry: PluginEntry) -> None:
        name = entry.name or entry.type
        if (plugin_type := REGISTRY.get(entry.type)) is None:
            message = unknown_name("plugin", entry.type, REGISTRY.keys())
            raise self._document.error(f"{path}.type", message)
        if name in self._plugins:
            message = f"the plugin name {name!r} is taken: names are unique"
            raise self._document.error(path, message)
        parameters = _convert(
            self._document, f"{path}.parameters", entry.parameters, plugin_type.parameters
        )
        self._plugins[name] = _Plugin(plugin_type, parameters)

    def _handler(self) -> HandlerParameters:
        # Of several handlers the first one listed counts.
        for plugin in self._plugins.values():
            if isinstance(plugin.entry, HandlerType):
                return plugin.entry.factory(plugin.parameters)
        deciders = (n for n, p in self._plugins.items() if isinstance(p.entry, DeciderType))
        return HandlerParameters(deciders=DeciderNames(prefill=next(deciders, PREFIX_DECIDER)))

    def _cost(self) -> CostSettings | None:
        choosing = [n for n, p in self._plugins.items() if isinstance(p.entry, _CHOOSING)]
        for i, plugin in enumerate(self._plugins.values()):
            if not isinstance(plugin.entry, CostType):
                continue
            if choosing:
                message = f"predicted-cost stands alone: remove it, or {', '.join(choosing)}"
                raise self._document.error(f"plugins[{i}]", message)
            parameters: CostParameters = plugin.entry.factory(plugin.parameters)
            sizes = load_kv_sizes(self._document, f"plugins[{i}]", parameters)
            return CostSettings(sizes, parameters.maxNumOfEndpoints)
        return None if choosing else CostSettings()

    def _index(self) -> PrefixIndexSettings:
        # Of several index configurations the first one listed counts.
        for plugin in self._plugins.values():
            if isinstance(plugin.entry, PrefixIndexType):
                return plugin.entry.factory(plugin.parameters)
        return PrefixIndexSettings()

    def _events(self) -> EventSettings | None:
        for plugin in self._plugins.values():
            match plugin.entry:
                case PreciseIndexType(factory=factory) | PreciseScorerType(index=factory):
                    return factory(plugin.parameters)
        return None

    def _tokenizer(self) -> TokenizerSettings:
        for plugin in self._plugins.values():
            if isinstance(plugin.entry, TokenizerType):
                return plugin.entry.factory(plugin.parameters)
        return TokenizerSettings()

    def _decider(self, name: str | None) -> DeciderSettings:
        if name is None:
            return DeciderSettings(split=False, fallback_to_unified=self._fallback)
        plugin = self._plugins.get(name)
        # A decider may be named without being listed: then it has its default parameters.
        entry = plugin.entry if plugin is not None else REGISTRY.get(name)
        if not isinstance(entry, DeciderType):
            deciders = [entry.type_name for entry in PLUGINS if isinstance(entry, DeciderType)]
            raise self._document.error("plugins", unknown_name("decider", name, deciders))
        settings = entry.factory(plugin.parameters if plugin is not None else entry.parameters())
        return replace(settings, fallback_to_unified=self._fallback)

    def _profile(self, name: str, phase: Role) -> Profile:
        # Always there, listed or not: a pod must not run a phase that its role excludes.
        scorers: list[tuple[Scorer, float]] = [(RoleFilter(phase), 1.0)]
        picker: Picker = MaxScorePicker()
        for path, ref in self._references(name, phase):
            if ref.weight < 0:
                raise self._document.error(f"{path}.weight", f"{ref.weight} is below 0")
            if (plugin := self._plugins.get(ref.pluginRef)) is None:
                message = unknown_name("plugin reference", ref.pluginRef, self._plugins.keys())
                raise self._document.error(f"{path}.pluginRef", message)
            match plugin.entry:
                case PickerType(factory=factory):
                    # The last picker of a profile counts: it needs exactly one.
                    picker = factory(plugin.parameters)
                case ScorerType(factory=factory):
                    scorers.append((factory(plugin.parameters), ref.weight))
                case FilterType(factory=factory):
                    # A filter's −∞ times a weight of 0 would not be a number.
                    scorers.append((factory(plugin.parameters), 1.0))
        return Profile(scorers, picker)

    def _references(self, name: str, phase: Role) -> list[tuple[str, PluginRef]]:
        """The plugins of the profile `name`, each with its path in the document.

        A single profile serves both phases, whatever its name. Without profiles every plugin is
        used, except a filter for the other phase.
        """
        profiles = self._config.schedulingProfiles
        if not profiles:
            return [
                ("plugins", PluginRef(name))
                for name, plugin in self._plugins.items()
                if not isinstance(plugin.entry, FilterType) or plugin.entry.phase in (None, phase)
            ]
        for i, profile in enumerate(profiles):
            if profile.name == name or len(profiles) == 1:
                path = f"schedulingProfiles[{i}].plugins"
                return [(f"{path}[{j}]", ref) for j, ref in enumerate(profile.plugins)]
        names = tuple(profile.name for profile in profiles)
        raise self._document.error("schedulingProfiles", unknown_name("profile", name, names))


def _convert(document: Document, path: str, value: Any, to: type[S]) -> S:
    """`value`, from `path` of the document, as a `to`. Raises DocumentError with the line."""
    try:
        return msgspec.convert(value, type=to)
    except msgspec.ValidationError as err:
        message, _, inner = str(err).partition(" - at `$")
        # msgspec ends its message with the path inside `value`, from which the document finds the
        # line.
        where = [*steps(path), *steps(inner.rstrip("`").removeprefix("."))]
        raise document.error(where, message) from err
