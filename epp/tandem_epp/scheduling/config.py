"""`EndpointPickerConfig` under llm-d's names (llm-d-router 0.8), read from the router's YAML file.

    plugins: [{type, name (default: the type), parameters}]
    schedulingProfiles: [{name, plugins: [{pluginRef, weight (default 1)}]}]

Without `plugins`: prefix hit 3, in flight 2, queue 1, the highest score, and the prefix-based
decider with its default threshold. Every profile filters by its phase's role, listed or not.
Without a disagg-profile-handler the decider that is listed decides, or the default one; a handler
that names no decider means that nothing is split.

Errors: `documents.DocumentError`, with file and line; an unknown plugin names the nearest known.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from tandem_contract.config import DisaggregatedServing
from tandem_contract.documents import Document, steps
from tandem_contract.paths import Role

from .decider import Rules
from .pickers import MaxScorePicker
from .profile import Picker, Profile, Scorer
from .registry import (
    ALWAYS_DECIDER,
    BUILT_IN,
    DEFAULT_WEIGHTS,
    KNOWN,
    LEAST,
    PARAMETERS,
    PICKERS,
    PREFIX_DECIDER,
    SCORERS,
    DeciderNames,
    DeciderParameters,
    HandlerParameters,
    NoParameters,
    PickerParameters,
    ProducerParameters,
    Strict,
    unknown,
)
from .scorers import RoleFilter

KIND: Final = "EndpointPickerConfig"
API_VERSIONS: Final = ("llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1")
P = TypeVar("P", bound=Strict)


class Plugin(Strict, frozen=True):
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
    """The document, but for the seed's fields."""

    apiVersion: str = API_VERSIONS[0]  # noqa: N815
    kind: str = KIND
    plugins: tuple[Plugin, ...] = ()
    schedulingProfiles: tuple[SchedulingProfile, ...] = ()  # noqa: N815


@dataclass(frozen=True)
class Scheduling:
    """The configuration as things to run."""

    decode: Profile
    prefill: Profile
    rules: Rules
    endpoints: int
    """Addresses in the destination header."""
    index: ProducerParameters


def load_scheduling(
    document: Document, extra: Mapping[str, Any], serving: DisaggregatedServing
) -> Scheduling:
    """The scheduling that `extra`, the fields beside the seed's, ask for. Raises DocumentError."""
    config = _convert(document, "", dict(extra), PickerConfig)
    if config.kind != KIND:
        raise document.error("kind", f"{config.kind!r} is not {KIND}")
    if config.apiVersion not in API_VERSIONS:
        raise document.error("apiVersion", f"{config.apiVersion!r} is not {API_VERSIONS[0]}")
    return _Builder(document, config, serving.fallback_to_unified).build()


class _Builder:
    def __init__(self, document: Document, config: PickerConfig, fallback: bool) -> None:
        self._document, self._config, self._fallback = document, config, fallback
        self._parameters: dict[str, Strict] = {}
        self._types: dict[str, str] = {}
        for i, plugin in enumerate(config.plugins):
            self._add(f"plugins[{i}]", plugin)

    def build(self) -> Scheduling:
        handler = self._only(HandlerParameters) or HandlerParameters(
            deciders=DeciderNames(prefill=self._decider_listed())
        )
        pickers = [p for p in self._parameters.values() if isinstance(p, PickerParameters)]
        return Scheduling(
            decode=self._profile(handler.profiles.decode, Role.DECODE),
            prefill=self._profile(handler.profiles.prefill, Role.PREFILL),
            rules=self._rules(handler.deciders.prefill or handler.deciderPluginName),
            endpoints=max((p.maxNumOfEndpoints for p in pickers), default=1),
            index=self._only(ProducerParameters) or ProducerParameters(),
        )

    def _add(self, at: str, plugin: Plugin) -> None:
        name = plugin.name or plugin.type
        if plugin.type not in KNOWN:
            raise self._document.error(f"{at}.type", unknown("plugin", plugin.type, KNOWN))
        if name in self._types:
            raise self._document.error(at, f"the plugin name {name!r} is taken: names are unique")
        self._types[name] = plugin.type
        if plugin.type not in BUILT_IN:
            kind = PARAMETERS.get(plugin.type, NoParameters)
            at = f"{at}.parameters"
            self._parameters[name] = _convert(self._document, at, plugin.parameters, kind)
            self._check_numbers(at, self._parameters[name])

    def _check_numbers(self, at: str, parameters: Strict) -> None:
        for name, value in msgspec.structs.asdict(parameters).items():
            if isinstance(value, int) and value < LEAST.get(name, 0):
                raise self._document.error(f"{at}.{name}", f"{value} is below {LEAST.get(name, 0)}")

    def _only(self, kind: type[P]) -> P | None:
        return next((p for p in self._parameters.values() if isinstance(p, kind)), None)

    def _decider_listed(self) -> str | None:
        """Without a handler, the decider that is listed; without one, the default decider."""
        listed = [n for n, t in self._types.items() if t in (PREFIX_DECIDER, ALWAYS_DECIDER)]
        return listed[0] if listed else PREFIX_DECIDER

    def _rules(self, decider: str | None) -> Rules:
        if decider is None:
            return Rules(split=False, fallback_to_unified=self._fallback)
        kind = self._types.get(decider, decider)
        if kind == ALWAYS_DECIDER:
            return Rules(always=True, fallback_to_unified=self._fallback)
        if kind != PREFIX_DECIDER:
            known = (PREFIX_DECIDER, ALWAYS_DECIDER)
            raise self._document.error("plugins", unknown("decider", decider, known))
        parameters = self._parameters.get(decider)
        if not isinstance(parameters, DeciderParameters):
            parameters = DeciderParameters()
        return Rules(
            non_cached_tokens=parameters.nonCachedTokens, fallback_to_unified=self._fallback
        )

    def _profile(self, name: str, phase: Role) -> Profile:
        scorers: list[tuple[Scorer, float]] = [(RoleFilter(phase), 1.0)]
        picker: Picker = MaxScorePicker()
        for at, ref in self._references(name):
            if ref.weight < 0:
                raise self._document.error(f"{at}.weight", f"{ref.weight} is below 0")
            if (kind := self._types.get(ref.pluginRef)) is None:
                message = unknown("plugin reference", ref.pluginRef, tuple(self._types))
                raise self._document.error(f"{at}.pluginRef", message)
            if kind in PICKERS:
                picker = PICKERS[kind]()
            elif kind in SCORERS:
                # A filter's −∞ times a weight of 0 is no number, and its weight means nothing.
                filters = kind.endswith("-filter")
                scorers.append((SCORERS[kind](), 1.0 if filters else ref.weight))
        if len(scorers) == 1 and not self._config.plugins:
            scorers += [(SCORERS[kind](), weight) for kind, weight in DEFAULT_WEIGHTS]
        return Profile(scorers, picker)

    def _references(self, name: str) -> list[tuple[str, PluginRef]]:
        """The profile of that name, the only one there is, or every plugin with weight 1."""
        profiles = self._config.schedulingProfiles
        if not profiles:
            filters = ("prefill-filter", "decode-filter")
            every = [n for n, kind in self._types.items() if kind not in filters]
            return [("plugins", PluginRef(n)) for n in every]
        for i, profile in enumerate(profiles):
            if profile.name == name or len(profiles) == 1:
                at = f"schedulingProfiles[{i}].plugins"
                return [(f"{at}[{j}]", ref) for j, ref in enumerate(profile.plugins)]
        names = tuple(profile.name for profile in profiles)
        raise self._document.error("schedulingProfiles", unknown("profile", name, names))


def _convert(document: Document, at: str, value: Any, kind: type[P]) -> P:
    """`value`, found at path `at`, as a `kind`. Raises DocumentError with its line."""
    try:
        return msgspec.convert(value, type=kind)
    except msgspec.ValidationError as err:
        message, _, path = str(err).partition(" - at `$")
        where = [*steps(at), *steps(path.rstrip("`").removeprefix("."))]
        raise document.error(where, message) from err
