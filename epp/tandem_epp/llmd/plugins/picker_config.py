"""The document `EndpointPickerConfig` as typed values, without a meaning yet.

Its versions differ in `dataLayer` only. The fields of all of them are accepted in each.

Source: llm-d/llm-d-router v0.10.0, apix/config/v1alpha1, and its main branch after it as
red-hat-data-services/llm-d-router carries it (commit e0412de546de), apix/config/v1.

Errors: `documents.DocumentError`, with file and line.
"""

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any, Final, TypeVar

import msgspec

from tandem_contract.documents import Document, steps

from .parameters import Strict


def unknown_name(what: str, name: str, names: Collection[str]) -> str:
    """The message for a `name` that is not among `names`, with the most similar of them."""
    similar = get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {similar[0]!r}?" if similar else f"known: {', '.join(sorted(names))}"
    return f"unknown {what} {name!r}; {hint}"


KIND: Final = "EndpointPickerConfig"
API_VERSIONS: Final = (
    "llm-d.ai/v1",
    "llm-d.ai/v1alpha1",
    "inference.networking.x-k8s.io/v1alpha1",
)
"""The newest first."""
S = TypeVar("S", bound=msgspec.Struct)


class PluginEntry(Strict, frozen=True):
    """An entry of `plugins`."""

    type: str
    name: str = ""
    parameters: dict[str, Any] | None = None


class WeightedRef(Strict, frozen=True):
    """An entry of a profile."""

    pluginRef: str  # noqa: N815 - llm-d's name
    weight: float | None = None


class SchedulingProfile(Strict, frozen=True):
    """An entry of `schedulingProfiles`."""

    name: str
    plugins: tuple[WeightedRef, ...] = ()


class PluginRef(Strict, frozen=True):
    """A plugin by its name."""

    pluginRef: str = ""  # noqa: N815 - llm-d's name


class DataSource(Strict, frozen=True):
    """An entry of `dataLayer.sources`."""

    pluginRef: str  # noqa: N815 - llm-d's name
    extractors: tuple[PluginRef, ...] = ()


class Discovery(Strict, frozen=True):
    """`dataLayer.discovery`."""

    endpoints: PluginRef | None = None
    peers: PluginRef | None = None
    pluginRef: str = ""  # noqa: N815 - v1alpha1's form of `endpoints`


class CrossReplica(Strict, frozen=True):
    """`dataLayer.crossReplica`."""

    syncerPluginRef: str = ""  # noqa: N815 - llm-d's name
    syncInterval: str = ""  # noqa: N815
    publishTimeout: str = ""  # noqa: N815


class DataLayer(Strict, frozen=True):
    """`dataLayer`."""

    injectDefaults: bool = True  # noqa: N815 - llm-d's name
    sources: tuple[DataSource, ...] = ()
    discovery: Discovery | None = None
    crossReplica: CrossReplica | None = None  # noqa: N815
    # v1alpha1's forms of `discovery.peers` and of the fields of `crossReplica`.
    peerDiscovery: PluginRef | None = None  # noqa: N815
    crossReplicaSyncerPluginRef: str = ""  # noqa: N815
    crossReplicaSyncInterval: str = ""  # noqa: N815
    crossReplicaPublishTimeout: str = ""  # noqa: N815


class PriorityBand(Strict, frozen=True):
    """A band of `flowControl`."""

    priority: int = 0
    maxBytes: int | str = 0  # noqa: N815 - llm-d's name
    maxRequests: int | str = 0  # noqa: N815
    defaultRequestTTL: str = ""  # noqa: N815
    fairnessPolicyRef: str = ""  # noqa: N815
    orderingPolicyRef: str = ""  # noqa: N815


class FlowControl(Strict, frozen=True):
    """`flowControl`."""

    maxBytes: int | str = 0  # noqa: N815 - llm-d's name
    maxRequests: int | str = 0  # noqa: N815
    defaultRequestTTL: str = ""  # noqa: N815
    noEndpointRequestTTL: str = ""  # noqa: N815
    defaultPriorityBand: PriorityBand | None = None  # noqa: N815
    defaultNegativePriorityBand: PriorityBand | None = None  # noqa: N815
    priorityBands: tuple[PriorityBand, ...] = ()  # noqa: N815
    usageLimitPolicyPluginRef: str = ""  # noqa: N815
    bandSelectionPolicyPluginRef: str = ""  # noqa: N815
    endpointGatePluginRef: str = ""  # noqa: N815
    saturationDetector: PluginRef | None = None  # noqa: N815
    enableEviction: bool = False  # noqa: N815


class RequestHandler(Strict, frozen=True):
    """`requestHandler`."""

    parsers: tuple[PluginRef, ...] = ()
    propagatePriority: bool = False  # noqa: N815 - llm-d's name


class PickerConfig(Strict, frozen=True):
    """The document without `disaggregated_serving`, `health_checks` and `backends`."""

    apiVersion: str = API_VERSIONS[0]  # noqa: N815 - Kubernetes' name
    kind: str = KIND
    plugins: tuple[PluginEntry, ...] = ()
    schedulingProfiles: tuple[SchedulingProfile, ...] = ()  # noqa: N815 - llm-d's name
    featureGates: tuple[str, ...] = ()  # noqa: N815
    dataLayer: DataLayer | None = None  # noqa: N815
    flowControl: FlowControl | None = None  # noqa: N815
    requestHandler: RequestHandler | None = None  # noqa: N815
    saturationDetector: PluginRef | None = None  # noqa: N815
    parser: PluginRef | None = None


def read_picker_config(document: Document, fields: dict[str, Any]) -> PickerConfig:
    """The configuration in `fields` of `document`. Raises DocumentError."""
    config = convert(document, "", fields, PickerConfig)
    if config.kind != KIND:
        raise document.error("kind", f"{config.kind!r} is not {KIND}")
    if config.apiVersion not in API_VERSIONS:
        known = ", ".join(API_VERSIONS)
        raise document.error("apiVersion", f"{config.apiVersion!r} is none of {known}")
    return config


def convert(document: Document, path: str, value: Any, to: type[S]) -> S:
    """`value`, from `path` of the document, as a `to`. Raises DocumentError with the line."""
    try:
        return msgspec.convert(value, type=to)
    except msgspec.ValidationError as err:
        message, _, inner = str(err).partition(" - at `$")
        # msgspec ends its message with the path inside `value`, from which the document finds the
        # line.
        where = [*steps(path), *steps(inner.rstrip("`").removeprefix("."))]
        raise document.error(where, message) from err
