"""The plugins that a configuration lists, by name, and one instance of each.

A plugin that two profiles use is one instance, so that it remembers the requests of both.

Errors: `documents.DocumentError` for an unknown or refused type, a name that is taken, and
parameters that do not fit.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from tandem_contract.documents import Document

from .burst_prefix import BurstPrefix
from .filters import DetectorFilter
from .flow_plugins import PredictedDetector
from .parameters import HandlerParameters, PrefixIndexParameters
from .picker_config import PluginEntry, convert, unknown_name
from .plugin_types import Kind, Plugin
from .profile import Filter, Picker, Scorer
from .registry import REGISTRY
from .unsupported import REFUSED

P = TypeVar("P", bound=msgspec.Struct)


@dataclass(frozen=True)
class ListedPlugin:
    """An entry of `plugins`, checked."""

    name: str
    path: str
    """Where it stands in the document."""
    entry: Plugin[Any]
    parameters: Any
    given: frozenset[str]
    """The parameters that are written there; the others have their defaults."""


@dataclass
class ProfilePart:
    """What a plugin does in a profile; None: not that."""

    filter: Filter | None = None
    scorer: Scorer | None = None
    picker: Picker | None = None


class ListedPlugins:
    """All plugins of a configuration."""

    def __init__(self, document: Document, entries: Iterable[PluginEntry]) -> None:
        self._document = document
        self.prefill_profile = HandlerParameters().prefill
        """Replaced when the handler is known."""
        self._plugins: dict[str, ListedPlugin] = {}
        self._parts: dict[str, ProfilePart] = {}
        self._bursts: dict[str, BurstPrefix] = {}
        paths = {f"plugins[{i}]": entry for i, entry in enumerate(entries)}
        self._refuse(paths)
        for path, entry in paths.items():
            self._add(path, entry)

    def __iter__(self) -> Iterator[ListedPlugin]:
        return iter(self._plugins.values())

    @property
    def names(self) -> list[str]:
        """In the order of the configuration."""
        return list(self._plugins)

    def find(self, name: str) -> ListedPlugin | None:
        """The plugin of this name."""
        return self._plugins.get(name)

    def of(self, kind: Kind) -> list[ListedPlugin]:
        """The plugins of a kind."""
        return [plugin for plugin in self if plugin.entry.kind is kind]

    def first(self, kind: Kind) -> ListedPlugin | None:
        """The first plugin of a kind."""
        return next(iter(self.of(kind)), None)

    def made(self, plugin: ListedPlugin) -> Any:
        """What the plugin's kind says. Raises ValueError."""
        return plugin.entry.make(plugin.parameters, self)

    def part(self, plugin: ListedPlugin) -> ProfilePart:
        """What `plugin` does in a profile; the same object each time. Raises DocumentError."""
        if (part := self._parts.get(plugin.name)) is None:
            try:
                part = self._parts[plugin.name] = self._make(plugin)
            except ValueError as err:
                raise self._document.error(f"{plugin.path}.parameters", str(err)) from err
        return part

    @property
    def parts(self) -> Iterable[ProfilePart]:
        """Of the plugins that a profile uses."""
        return self._parts.values()

    # As `plugin_types.Listed`.

    def parameters(self, of: type[P]) -> P | None:
        return next((p.parameters for p in self if isinstance(p.parameters, of)), None)

    def burst(self, name: str) -> BurstPrefix | None:
        plugin = self._plugins.get(name)
        if plugin is None or plugin.entry.kind is not Kind.BURST:
            return None
        if name not in self._bursts:
            self._bursts[name] = self.made(plugin)
        return self._bursts[name]

    @property
    def prefix_tokens(self) -> int:
        parameters = self.parameters(PrefixIndexParameters)
        return parameters.maxPrefixTokensToMatch if parameters is not None else 0

    def _make(self, plugin: ListedPlugin) -> ProfilePart:
        match plugin.entry.kind:
            case Kind.PICKER:
                return ProfilePart(picker=self.made(plugin))
            case Kind.SCORER:
                own_filter = plugin.entry.filter(plugin.parameters)
                return ProfilePart(filter=own_filter, scorer=self.made(plugin))
            case Kind.FILTER:
                return ProfilePart(filter=self.made(plugin))
            case Kind.DETECTOR:
                detector = self.made(plugin)
                if not isinstance(detector, PredictedDetector):
                    return ProfilePart(filter=DetectorFilter(detector))
        return ProfilePart()

    def _refuse(self, paths: Mapping[str, PluginEntry]) -> None:
        """Raises DocumentError for plugins that are not supported. Before anything else is read:
        it is of no use to correct the rest of such a file."""
        refused = [(path, entry.type) for path, entry in paths.items() if entry.type in REFUSED]
        if not refused:
            return
        (path, name), *others = refused
        reason, nearest = REFUSED[name].reason, REFUSED[name].nearest
        message = f"{name!r} is not supported: {reason}; nearest: {nearest!r}"
        lines = (f"{n!r} in line {self._document.where(p).rpartition(':')[2]}" for p, n in others)
        more = f"; nor {', '.join(lines)}" if others else ""
        raise self._document.error(f"{path}.type", message + more)

    def _add(self, path: str, entry: PluginEntry) -> None:
        name = entry.name or entry.type
        if (plugin_type := REGISTRY.get(entry.type)) is None:
            message = unknown_name("plugin", entry.type, REGISTRY.keys())
            raise self._document.error(f"{path}.type", message)
        if name in self._plugins:
            message = f"the plugin name {name!r} is taken: names are unique"
            raise self._document.error(path, message)
        given = entry.parameters or {}
        parameters = convert(self._document, f"{path}.parameters", given, plugin_type.parameters)
        self._plugins[name] = ListedPlugin(name, path, plugin_type, parameters, frozenset(given))
