"""Builds the profile of each phase from the plugins that a configuration lists.

Errors: `documents.DocumentError` for a missing profile, an unknown reference and a weight below 0.
"""

from collections.abc import Sequence
from typing import Final

from tandem_contract.documents import Document
from tandem_contract.paths import Role

from .burst_prefix import BurstPrefix
from .filters import RoleFilter
from .listed_plugins import ListedPlugin, ListedPlugins
from .picker_config import SchedulingProfile, WeightedRef, unknown_name
from .pickers import MaxScorePicker
from .plugin_types import Kind
from .profile import Filter, Picker, Profile, Scorer
from .score_choice import ProfileSummary

_DEFAULT_PICKER: Final = "max-score-picker"


class ProfileBuilder:
    """Builds the profiles of one configuration."""

    def __init__(
        self, document: Document, profiles: Sequence[SchedulingProfile], plugins: ListedPlugins
    ) -> None:
        self._document, self._profiles, self._plugins = document, profiles, plugins

    def build(self, name: str, phase: Role) -> tuple[Profile, ProfileSummary]:
        """The profile `name`, which chooses pods for `phase`. Raises DocumentError."""
        listed_as, references = self._references(name, phase)
        # Always there, listed or not: a pod must not run a phase that its role excludes.
        filters: list[tuple[str, Filter]] = [(f"{phase}-filter", RoleFilter(phase))]
        scorers: list[tuple[str, Scorer, float]] = []
        picker_name, picker = self._default_picker()
        for path, ref in references:
            plugin, weight = self._resolve(path, ref)
            part = self._plugins.part(plugin)
            if part.filter is not None and part.filter != filters[0][1]:
                filters.append((plugin.name, part.filter))
            if part.scorer is not None:
                is_burst = isinstance(part.scorer, BurstPrefix)
                label = f"{plugin.name} of bursts" if is_burst else plugin.name
                scorers.append((label, part.scorer, weight))
            if part.picker is not None:
                # The last picker of a profile counts: it needs exactly one.
                picker_name, picker = plugin.name, part.picker
        summary = ProfileSummary(
            listed_as,
            tuple(name for name, _ in filters),
            tuple((name, weight) for name, _, weight in scorers),
            picker_name,
        )
        weighted = [(scorer, weight) for _, scorer, weight in scorers]
        return Profile([each for _, each in filters], weighted, picker), summary

    def _default_picker(self) -> tuple[str, Picker]:
        """The picker of a profile that names none: as in llm-d, the one that is listed."""
        plugin = self._plugins.first(Kind.PICKER)
        if plugin is not None and (picker := self._plugins.part(plugin).picker) is not None:
            return plugin.name, picker
        return _DEFAULT_PICKER, MaxScorePicker()

    def _resolve(self, path: str, ref: WeightedRef) -> tuple[ListedPlugin, float]:
        weight = 1.0 if ref.weight is None else ref.weight
        if weight < 0:
            raise self._document.error(f"{path}.weight", f"{weight} is below 0")
        if (plugin := self._plugins.find(ref.pluginRef)) is None:
            message = unknown_name("plugin reference", ref.pluginRef, self._plugins.names)
            raise self._document.error(f"{path}.pluginRef", message)
        return plugin, weight

    def _references(self, name: str, phase: Role) -> tuple[str, list[tuple[str, WeightedRef]]]:
        """The name of the profile that the phase uses, and its plugins, each with its path in the
        document.

        A single profile serves both phases, whatever its name. Without profiles every plugin is
        used. In both cases a filter for the other phase is left out.
        """
        profiles = self._profiles
        if not profiles:
            # A detector is listed for flow control, unless a profile names it.
            every = [
                ("plugins", WeightedRef(plugin.name))
                for plugin in self._plugins
                if plugin.entry.kind is not Kind.DETECTOR
            ]
            return "all plugins", self._of_phase(every, phase)
        for i, profile in enumerate(profiles):
            if profile.name == name or len(profiles) == 1:
                path = f"schedulingProfiles[{i}].plugins"
                listed = [(f"{path}[{j}]", ref) for j, ref in enumerate(profile.plugins)]
                is_shared = len(profiles) == 1
                return profile.name, self._of_phase(listed, phase) if is_shared else listed
        names = tuple(profile.name for profile in profiles)
        raise self._document.error("schedulingProfiles", unknown_name("profile", name, names))

    def _of_phase(
        self, references: list[tuple[str, WeightedRef]], phase: Role
    ) -> list[tuple[str, WeightedRef]]:
        """`references` without filters for the other phase."""

        def is_used(name: str) -> bool:
            plugin = self._plugins.find(name)
            return plugin is None or plugin.entry.phase in (None, phase)

        return [(path, ref) for path, ref in references if is_used(ref.pluginRef)]
