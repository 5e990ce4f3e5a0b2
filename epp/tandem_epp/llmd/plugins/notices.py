"""What of an `EndpointPickerConfig` has no effect, or another one than in llm-d.

    section_notices      feature gates, data layer, request handler
    difference_notices   what the listed plugins do less, or in another way

Errors: `documents.DocumentError` for an unknown gate and a reference to no plugin.
"""

from collections.abc import Collection, Iterator
from typing import Final

from msgspec import Struct

from tandem_contract.documents import Document

from ...choice.routing import Notice
from .listed_plugins import ListedPlugin, ListedPlugins
from .parameters import PreciseIndexParameters
from .picker_config import DataLayer, PickerConfig, unknown_name
from .plugin_types import Kind
from .registry import PREFIX_DECIDER, REGISTRY
from .unsupported import FLOW_CONTROL, read_gate

_SECTIONS: Final = ("dataLayer", "requestHandler", "parser", "saturationDetector", FLOW_CONTROL)
"""Those whose references are only checked."""
_PEERS: Final = (
    "dataLayer.discovery.peers",
    "dataLayer.peerDiscovery",
    "dataLayer.crossReplica",
    "dataLayer.crossReplicaSyncerPluginRef",
)
"""Parts that name plugins for replicas, which `--peers` takes the place of: not checked."""


def section_notices(
    document: Document, config: PickerConfig, names: Collection[str]
) -> Iterator[Notice]:
    """What the sections of `config` say; `names` are those of the listed plugins. Raises
    DocumentError."""
    for section in _SECTIONS:
        for path, name in _references(getattr(config, section), section):
            # llm-d adds policies and parsers that are named by their type.
            if name not in names and name not in REGISTRY:
                message = unknown_name("plugin reference", name, (*names, *REGISTRY))
                raise document.error(path, message)
    yield from _gate_notices(document, config.featureGates)
    if (layer := config.dataLayer) is not None:
        yield from _layer_notices(document, layer)
    reason = "the EPP always reads bodies of the APIs it knows"
    handler = config.requestHandler
    if handler is not None and (handler.parsers or not handler.propagatePriority):
        yield Notice(document.where("requestHandler"), "requestHandler", reason, is_lost=False)
    if config.parser is not None:
        yield Notice(document.where("parser"), "parser", reason, is_lost=False)


def _gate_notices(document: Document, gates: Collection[str]) -> Iterator[Notice]:
    last: dict[str, Notice] = {}
    for i, text in enumerate(gates):
        path = f"featureGates[{i}]"
        try:
            gate = read_gate(text)
        except ValueError as err:
            raise document.error(path, str(err)) from err
        if gate.reason:
            part = f"feature gate {gate.name}"
            last[gate.name] = Notice(document.where(path), part, gate.reason, is_lost=False)
    yield from last.values()


def _layer_notices(document: Document, layer: DataLayer) -> Iterator[Notice]:
    reason = "the EPP always scrapes its backends and follows discovery"
    yield Notice(document.where("dataLayer"), "dataLayer", reason, is_lost=False)
    find, share = "replicas of the EPP find each other", "replicas of the EPP share their state"
    for name, value, purpose in (
        ("discovery.peers", layer.discovery and layer.discovery.peers, find),
        ("peerDiscovery", layer.peerDiscovery, find),
        ("crossReplica", layer.crossReplica, share),
        ("crossReplicaSyncerPluginRef", layer.crossReplicaSyncerPluginRef, share),
        ("crossReplicaSyncInterval", layer.crossReplicaSyncInterval, share),
        ("crossReplicaPublishTimeout", layer.crossReplicaPublishTimeout, share),
    ):
        if value:
            path = f"dataLayer.{name}"
            yield Notice(document.where(path), path, f"{purpose} by --peers")


def _references(part: object, path: str) -> Iterator[tuple[str, str]]:
    """The plugins that a section names, in fields that end with Ref, each with its path."""
    if isinstance(part, tuple):
        for i, item in enumerate(part):
            yield from _references(item, f"{path}[{i}]")
    elif isinstance(part, Struct):
        for field in part.__struct_fields__:
            value, at = getattr(part, field), f"{path}.{field}"
            if at in _PEERS or not value:
                continue
            yield from [(at, value)] if field.endswith("Ref") else _references(value, at)


def difference_notices(
    document: Document, config: PickerConfig, plugins: ListedPlugins, used: tuple[str, str]
) -> Iterator[Notice]:
    """The notices about listed plugins; `used`: the profiles of decode and prefill."""
    for plugin in plugins:
        where, entry = document.where(plugin.path), plugin.entry
        if entry.kind in (Kind.NOT_NEEDED, Kind.NO_EFFECT):
            yield Notice(where, entry.type_name, entry.help, entry.kind is Kind.NO_EFFECT)
        elif entry.events is not None:
            yield from _event_notices(where, plugin, plugins)
        elif entry.kind is Kind.TOKENIZER and not any(each.entry.events for each in plugins):
            reason = "prompts are tokenized for the precise index only, and it is not listed"
            yield Notice(where, plugin.name, reason, is_lost=False)
        elif entry.type_name == PREFIX_DECIDER:
            yield from _decider_notices(where, plugin, plugins)
    handlers = plugins.of(Kind.HANDLER)
    for plugin in handlers[1:]:
        where, first = document.where(plugin.path), handlers[0].name
        yield Notice(where, plugin.name, f"{first} comes first, and one handler counts")
    yield from _profile_notices(document, config, used, is_handled=bool(handlers))


def _event_notices(where: str, plugin: ListedPlugin, plugins: ListedPlugins) -> Iterator[Notice]:
    if plugins.first(Kind.TOKENIZER) is None:
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
    if plugins.first(Kind.HANDLER) is not None and "nonCachedTokens" not in plugin.given:
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
