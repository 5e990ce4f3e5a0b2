"""llm-d's flow control: what its feature gate, its section and the listed policies ask for.

It is on with the feature gate, in `featureGates` or `--feature-gates`; the section alone has no
effect. Defaults are llm-d's: 60 s, 5,000 requests and 1 GB of each priority, no fairness between
tenants, first come first served, and the utilization-detector. Tandem's own `flow_control`, where
it is on, counts instead.

Source: llm-d/llm-d-router, pkg/epp/config/loader/flowcontrol.go and pkg/epp/flowcontrol.

Errors: `documents.DocumentError`, with file and line.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from tandem_contract.config import MAX_TTL
from tandem_contract.documents import Document
from tandem_contract.durations import format_duration
from tandem_contract.go_flags import parse_duration
from tandem_contract.quantities import quantity

from ...choice.routing import Notice
from ...flow.detectors import Detector
from ...flow.settings import UNLIMITED, BandSettings, FlowSettings
from .flow_plugins import (
    FCFS,
    GLOBAL_STRICT,
    STATIC_LIMIT,
    UTILIZATION_DETECTOR,
    PredictedDetector,
)
from .listed_plugins import ListedPlugins
from .picker_config import FlowControl, PickerConfig, PriorityBand
from .plugin_types import Kind
from .registry import REGISTRY
from .unsupported import FLOW_CONTROL, last_entries

_TTL: Final = "60s"
_MAX_REQUESTS: Final = 5000
_MAX_BYTES: Final = 1_000_000_000
_NO_SECTION: Final = FlowControl()
_NO_GATE: Final = "it counts with featureGates: [flowControl] only"
_OWN: Final = "flow_control, which is on, counts instead"
_WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "enableEviction": "requests that a backend has are not ended for others",
    "bandSelectionPolicyPluginRef": "a higher priority always goes first",
    "endpointGatePluginRef": "the saturation detector alone says when requests wait",
}
"""Field of the section → why."""


def is_gate_open(config: PickerConfig, gates: Mapping[str, bool]) -> bool:
    """Whether llm-d's flow control is on; `gates`: those of the command line, which count first."""
    if FLOW_CONTROL in gates:
        return gates[FLOW_CONTROL]
    gate = last_entries(config.featureGates).get(FLOW_CONTROL)
    return gate is not None and gate.is_on


def flow_notices(
    document: Document, config: PickerConfig, *, is_open: bool, has_own: bool
) -> Iterator[Notice]:
    """What of the flow control in `config` has no effect. `is_open`: see `is_gate_open`; `has_own`:
    whether Tandem's own section is on."""
    if not is_open or has_own:
        for part in (FLOW_CONTROL, "saturationDetector"):
            if getattr(config, part) is not None:
                yield Notice(document.where(part), part, _OWN if has_own else _NO_GATE)
        return
    for name, reason in _WITHOUT_EFFECT.items():
        if config.flowControl is not None and getattr(config.flowControl, name):
            path = f"{FLOW_CONTROL}.{name}"
            yield Notice(document.where(path), path, reason)


class FlowControlReader:
    """Reads the flow control of one configuration."""

    def __init__(self, document: Document, config: PickerConfig, plugins: ListedPlugins) -> None:
        self._document, self._config, self._plugins = document, config, plugins

    def read(self) -> FlowSettings:
        """How requests wait. Raises DocumentError."""
        section = self._config.flowControl or _NO_SECTION
        default, negative = section.defaultPriorityBand, section.defaultNegativePriorityBand
        ttl, no_endpoint = section.defaultRequestTTL or _TTL, section.noEndpointRequestTTL
        path = f"{FLOW_CONTROL}.defaultPriorityBand"
        return FlowSettings(
            default=self._band(path, default or PriorityBand(), section),
            negative=None
            if negative is None
            else self._band(f"{FLOW_CONTROL}.defaultNegativePriorityBand", negative, section),
            bands=self._bands(section),
            no_endpoint_ttl=self._ttl(f"{FLOW_CONTROL}.noEndpointRequestTTL", no_endpoint or ttl),
            max_requests=self._amount(f"{FLOW_CONTROL}.maxRequests", section.maxRequests),
            max_bytes=self._amount(f"{FLOW_CONTROL}.maxBytes", section.maxBytes),
            is_shedding=False,
            detector=self._detector(section),
            ceilings=self._policy(
                Kind.USAGE_LIMIT,
                f"{FLOW_CONTROL}.usageLimitPolicyPluginRef",
                section.usageLimitPolicyPluginRef or STATIC_LIMIT,
            ),
        )

    def _bands(self, section: FlowControl) -> dict[int, BandSettings]:
        bands: dict[int, BandSettings] = {}
        for i, band in enumerate(section.priorityBands):
            path = f"{FLOW_CONTROL}.priorityBands[{i}]"
            if band.priority in bands:
                message = f"{band.priority} is in the list already: write one entry for each"
                raise self._document.error(f"{path}.priority", message)
            bands[band.priority] = self._band(path, band, section)
        return bands

    def _band(self, path: str, band: PriorityBand, section: FlowControl) -> BandSettings:
        ttl = band.defaultRequestTTL or section.defaultRequestTTL or _TTL
        ttl_path = path if band.defaultRequestTTL else FLOW_CONTROL
        fairness = band.fairnessPolicyRef or GLOBAL_STRICT
        ordering = band.orderingPolicyRef or FCFS
        return BandSettings(
            ttl=self._ttl(f"{ttl_path}.defaultRequestTTL", ttl),
            max_requests=self._amount(f"{path}.maxRequests", band.maxRequests, _MAX_REQUESTS),
            max_bytes=self._amount(f"{path}.maxBytes", band.maxBytes, _MAX_BYTES),
            fairness=self._policy(Kind.FAIRNESS, f"{path}.fairnessPolicyRef", fairness),
            order=self._policy(Kind.ORDERING, f"{path}.orderingPolicyRef", ordering),
        )

    def _ttl(self, path: str, text: str) -> float:
        """Seconds; 0 in the configuration: as long as the EPP holds any request."""
        try:
            seconds = parse_duration(text)
        except ValueError as err:
            raise self._document.error(path, str(err)) from err
        if not 0 <= seconds <= MAX_TTL:
            message = f"{text} is not from 0s to {format_duration(MAX_TTL)}"
            raise self._document.error(path, message)
        return seconds or MAX_TTL

    def _amount(self, path: str, value: int | str, default: int = UNLIMITED) -> int:
        number = quantity(value)
        if number is None or number < 0:
            message = f"{value!r} is not an amount: write 100, 1k or 1Gi"
            raise self._document.error(path, message)
        return int(number) or default

    def _detector(self, section: FlowControl) -> Detector | None:
        path = f"{FLOW_CONTROL}.saturationDetector"
        reference = section.saturationDetector
        if reference is None and (reference := self._config.saturationDetector) is not None:
            path = "saturationDetector"
        name = reference.pluginRef if reference is not None else ""
        made = self._policy(Kind.DETECTOR, f"{path}.pluginRef", name or UTILIZATION_DETECTOR)
        return None if isinstance(made, PredictedDetector) else made

    def _policy(self, kind: Kind, path: str, name: str) -> Any:
        """What the plugin `name` makes, which may be unlisted under the name of its type."""
        listed = self._plugins.find(name)
        plugin = listed.entry if listed is not None else REGISTRY.get(name)
        if plugin is None or plugin.kind is not kind:
            known = ", ".join(each for each, row in REGISTRY.items() if row.kind is kind)
            raise self._document.error(path, f"{name!r} is no {kind} plugin: {known}")
        where = f"{listed.path}.parameters" if listed is not None else path
        try:
            given = listed.parameters if listed is not None else plugin.parameters()
            return plugin.make(given, self._plugins)
        except (TypeError, ValueError, msgspec.ValidationError) as err:
            message = f"{name}: {err}"
            raise self._document.error(where, message) from err
