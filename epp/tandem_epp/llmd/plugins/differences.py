"""What the plugins of a configuration do less, or in another way, than in llm-d."""

from collections.abc import Iterator

from tandem_contract.documents import Document

from ...choice.routing import Notice
from .listed_plugins import ListedPlugin, ListedPlugins
from .picker_config import PickerConfig
from .plugin_types import (
    AcceptedType,
    DeciderType,
    HandlerType,
    PreciseIndexType,
    PreciseScorerType,
    TokenizerType,
)
from .precise_parameters import PreciseIndexParameters
from .registry import PREFIX_DECIDER


def difference_notices(
    document: Document, config: PickerConfig, plugins: ListedPlugins, used: tuple[str, str]
) -> Iterator[Notice]:
    """The notices about listed plugins; `used`: the profiles of decode and prefill."""
    for plugin in plugins:
        where = document.where(plugin.path)
        match plugin.entry:
            case AcceptedType(type_name=name, help=reason, is_lost=is_lost):
                yield Notice(where, name, reason, is_lost)
            case PreciseIndexType() | PreciseScorerType():
                yield from _event_notices(where, plugin, plugins)
            case TokenizerType() if not plugins.first(PreciseIndexType, PreciseScorerType):
                reason = "prompts are tokenized for the precise index only, and it is not listed"
                yield Notice(where, plugin.name, reason, is_lost=False)
            case DeciderType(type_name=name) if name == PREFIX_DECIDER:
                yield from _decider_notices(where, plugin, plugins)
    handlers = [plugin for plugin in plugins if isinstance(plugin.entry, HandlerType)]
    for plugin in handlers[1:]:
        where, first = document.where(plugin.path), handlers[0].name
        yield Notice(where, plugin.name, f"{first} comes first, and one handler counts")
    yield from _profile_notices(document, config, used, is_handled=bool(handlers))


def _event_notices(where: str, plugin: ListedPlugin, plugins: ListedPlugins) -> Iterator[Notice]:
    if plugins.first(TokenizerType) is None:
        yield Notice(
            where,
            f"{plugin.name} for prompts of text",
            "nothing tokenizes them, and the approximate index answers; list token-producer",
        )
    parameters = plugin.parameters
    if isinstance(parameters, PreciseIndexParameters) and parameters.kvEventsConfig.zmqEndpoint:
        port = parameters.kvEventsConfig.podDiscoveryConfig.socketPort
        yield Notice(
            where,
            "zmqEndpoint",
            f"the EPP connects to port {port} of every pod: let the engines publish there, with "
            f"--kv-events-config endpoint tcp://*:{port}",
        )


def _decider_notices(where: str, plugin: ListedPlugin, plugins: ListedPlugins) -> Iterator[Notice]:
    if plugins.first(HandlerType) is not None and "nonCachedTokens" not in plugin.given:
        tokens = plugin.parameters.nonCachedTokens
        yield Notice(
            where,
            "llm-d's default nonCachedTokens: 0, which never splits,",
            f"without the parameter requests are split from {tokens} uncached tokens on",
        )


def _profile_notices(
    document: Document, config: PickerConfig, used: tuple[str, str], *, is_handled: bool
) -> Iterator[Notice]:
    profiles = config.schedulingProfiles
    if len(profiles) > 1:
        for i, profile in enumerate(profiles):
            if profile.name not in used:
                where = document.where(f"schedulingProfiles[{i}]")
                yield Notice(where, f"profile {profile.name}", "no phase uses it")
    elif profiles and is_handled and profiles[0].name != used[1]:
        where = document.where("schedulingProfiles")
        yield Notice(where, "the decider", "there is no prefill profile: no request is split")
