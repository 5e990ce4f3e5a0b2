"""Checks the sections of an `EndpointPickerConfig` that are accepted without effect: feature gates,
data layer, request handler, flow control.

Errors: `documents.DocumentError` for an unknown gate and for a reference to no plugin.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from tandem_contract.documents import Document

from .names import unknown_name
from .notices import Notice
from .picker_config import DataLayer, FlowControl, PickerConfig
from .registry import REGISTRY
from .unsupported import NOT_BUILT

FLOW_CONTROL: Final = "flowControl"
GATES: Final[Mapping[str, str]] = {
    FLOW_CONTROL: NOT_BUILT,
    "haPopulateNonLeaderDatastore": "every replica follows discovery",
    "dataLayer": "the EPP always reads the engines' load metrics",
    "prepareDataPlugins": "the EPP always prepares what scorers need",
}
"""llm-d's feature gates, older ones included, and why each has no effect."""
_TRUE: Final = ("1", "t", "true")
_FALSE: Final = ("0", "f", "false")


def section_notices(
    document: Document, config: PickerConfig, names: Collection[str]
) -> Iterator[Notice]:
    """What the sections of `config` say; `names` are those of the listed plugins. Raises
    DocumentError."""
    for path, name in _references(config):
        # llm-d adds policies and parsers that are named by their type.
        if name not in names and name not in REGISTRY:
            message = unknown_name("plugin reference", name, (*names, *REGISTRY))
            raise document.error(path, message)
    yield from _gate_notices(document, config.featureGates)
    for section in (FLOW_CONTROL, "saturationDetector"):
        if getattr(config, section) is not None:
            yield Notice(document.where(section), section, NOT_BUILT)
    if (layer := config.dataLayer) is not None:
        yield from _layer_notices(document, layer)
    for section in ("requestHandler", "parser"):
        if getattr(config, section) is not None:
            reason = "the EPP always reads bodies of the APIs it knows"
            yield Notice(document.where(section), section, reason, is_lost=False)


def _gate_notices(document: Document, gates: Collection[str]) -> Iterator[Notice]:
    for i, gate in enumerate(gates):
        path = f"featureGates[{i}]"
        name, _, value = gate.partition("=")
        if name not in GATES:
            raise document.error(path, unknown_name("feature gate", name, GATES.keys()))
        value = value.strip().lower() or "true"
        if value not in (*_TRUE, *_FALSE):
            raise document.error(path, f"{gate!r}: write {name}=true or {name}=false")
        is_lost = name == FLOW_CONTROL and value in _TRUE
        yield Notice(document.where(path), f"feature gate {name}", GATES[name], is_lost)


def _layer_notices(document: Document, layer: DataLayer) -> Iterator[Notice]:
    reason = "the EPP always scrapes its backends and follows discovery"
    yield Notice(document.where("dataLayer"), "dataLayer", reason, is_lost=False)
    for name, reason in (
        ("peerDiscovery", "replicas of the EPP find each other by --peers"),
        ("crossReplicaSyncerPluginRef", "replicas of the EPP share their state by --peers"),
    ):
        if getattr(layer, name):
            path = f"dataLayer.{name}"
            yield Notice(document.where(path), path, reason)


def _references(config: PickerConfig) -> Iterator[tuple[str, str]]:
    """The plugins that the sections name, each with its path."""
    if (layer := config.dataLayer) is not None:
        for i, source in enumerate(layer.sources):
            path = f"dataLayer.sources[{i}]"
            yield f"{path}.pluginRef", source.pluginRef
            for j, extractor in enumerate(source.extractors):
                yield f"{path}.extractors[{j}].pluginRef", extractor.pluginRef
        if layer.discovery is not None:
            yield "dataLayer.discovery.pluginRef", layer.discovery.pluginRef
    for i, parser in enumerate(config.requestHandler.parsers if config.requestHandler else ()):
        yield f"requestHandler.parsers[{i}].pluginRef", parser.pluginRef
    if config.parser is not None:
        yield "parser.pluginRef", config.parser.pluginRef
    if config.saturationDetector is not None and config.saturationDetector.pluginRef:
        yield "saturationDetector.pluginRef", config.saturationDetector.pluginRef
    if config.flowControl is not None:
        yield from _flow_references(config.flowControl)


def _flow_references(flow: FlowControl) -> Iterator[tuple[str, str]]:
    bands = [
        ("defaultPriorityBand", flow.defaultPriorityBand),
        ("defaultNegativePriorityBand", flow.defaultNegativePriorityBand),
        *((f"priorityBands[{i}]", band) for i, band in enumerate(flow.priorityBands)),
    ]
    for path, band in bands:
        if band is None:
            continue
        for field, name in (
            ("fairnessPolicyRef", band.fairnessPolicyRef),
            ("orderingPolicyRef", band.orderingPolicyRef),
        ):
            if name:
                yield f"{FLOW_CONTROL}.{path}.{field}", name
    if flow.usageLimitPolicyPluginRef:
        yield f"{FLOW_CONTROL}.usageLimitPolicyPluginRef", flow.usageLimitPolicyPluginRef
    if flow.saturationDetector is not None and flow.saturationDetector.pluginRef:
        yield f"{FLOW_CONTROL}.saturationDetector.pluginRef", flow.saturationDetector.pluginRef
