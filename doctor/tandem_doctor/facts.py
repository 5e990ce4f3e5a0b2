"""Facts about a running set, the input of `checks`. None: the fact could not be read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem_contract.paths import Role
from tandem_contract.pod_reports import PodReport
from tandem_planner.fabrics import Fabric


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """How an engine was started."""

    flags: Mapping[str, str]
    """Long flags without dashes → value; the last one given counts. A switch has `true`."""
    kv_transfer_config: Mapping[str, Any] = field(default_factory=dict)
    """`--kv-transfer-config`; empty without one."""
    environment: Mapping[str, str] = field(default_factory=dict)
    is_reference: bool = False
    """Whether it is the reference engine, `tandem-engine`."""

    @property
    def connectors(self) -> tuple[str, ...]:
        """vLLM's connector names; for a MultiConnector, those of its members."""
        return tuple(str(link.get("kv_connector")) for link in self._links)

    def settings(self, connector: str) -> Mapping[str, Any]:
        """The `kv_connector_extra_config` of a connector; empty without one."""
        links = (link for link in self._links if link.get("kv_connector") == connector)
        extra = next(links, {}).get("kv_connector_extra_config")
        return extra if isinstance(extra, dict) else {}

    @property
    def _links(self) -> Sequence[Mapping[str, Any]]:
        extra = self.kv_transfer_config.get("kv_connector_extra_config")
        chain = extra.get("connectors") if isinstance(extra, dict) else None
        links = [self.kv_transfer_config, *(chain if isinstance(chain, list) else ())]
        links = [link for link in links if isinstance(link, dict)]
        # The first link is the MultiConnector itself, unless there is only one connector.
        return links[1:] or links

    def uses(self, prefix: str) -> bool:
        """Whether a connector's name begins with `prefix`."""
        return any(name.startswith(prefix) for name in self.connectors)


@dataclass(frozen=True, slots=True)
class SideChannel:
    """The answer of the port at which a reader's KV handshake begins."""

    address: str
    error: str | None = None
    """Why it cannot be reached; None if it answered."""
    compatibility_hash: str | None = None
    """vLLM's own hash of what two NIXL engines must have in common."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's NixlAgentMetadata."""


@dataclass(frozen=True, slots=True)
class StorageUse:
    """What an engine reports of its external store for KV."""

    is_used: bool
    """Whether its circuit breaker is closed: it asks the store."""
    failure: str = ""
    """The store's newest failure in its own words; empty without one."""
    full_chunks: float = 0.0
    """Chunks that it could not write since it started because the store was full."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine."""

    pod: str
    role: Role
    group: str
    """Engines hand off to each other only within a group."""
    address: str
    compat: str = ""
    """Label `tandem.dev/kv-compat`: engines with the same value are paired; empty without it."""
    error: str | None = None
    """Why its HTTP port does not answer; None if it does."""
    version: str | None = None
    model: str | None = None
    """The model that it loaded, as `/v1/models` names it."""
    adapters: frozenset[str] = frozenset()
    max_model_len: int | None = None
    cache: Mapping[str, str] = field(default_factory=dict)
    """Labels of `vllm:cache_config_info`."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """Metric name → sum of its samples."""
    storage: StorageUse | None = None
    """None if it has no external store, or has not used it yet."""
    command: EngineCommand | None = None
    side_channel: SideChannel | None = None
    """None if it was not asked from here."""
    fabrics: frozenset[Fabric] | None = None
    """Fabrics that connect its processes with other engines; None if not visible from here."""
    has_gpu: bool = False
    """Whether its container asks for GPUs."""
    listening: frozenset[int] | None = None
    """TCP ports at which its processes with UCX listen; None if not visible from here."""
    data_port_error: str | None = None
    """Why no answer came from UCX's range of ports; None if one came, or was not asked for."""


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The sidecar of one decode pod."""

    pod: str
    error: str | None = None
    """Why its admin port does not answer; None if it does."""
    not_ready: str | None = None
    """The answer of `/readyz` if it is not ready."""
    has_plan_keys: bool | None = None
    """Whether it follows signed plans only; None if its flags are not visible from here."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """Metric name → sum of its samples; errors as `name{phase}`, requests as `name{path}`, loopback
    side channels as `name{address}`."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this machine."""

    index: int
    name: str
    nearness: Mapping[int, str] = field(default_factory=dict)
    """Other GPU → `nvlink`, or the level of the PCIe topology that connects the two."""


@dataclass(frozen=True, slots=True)
class MachinePorts:
    """TCP ports of this machine."""

    ephemeral: tuple[int, int]
    """First and last of those that outgoing connections take."""
    in_use: frozenset[int]
    """Those that a socket of any process is bound to."""


@dataclass(frozen=True, slots=True)
class EppReport:
    """What one EPP reports of its pods."""

    epp: str
    pods: tuple[PodReport, ...] = ()
    asked_seconds: float = 0.0
    """What gateways in mode BUFFERED were asked to wait for; 0: none was."""
    error: str | None = None
    """Why it does not answer; None if it does."""
    is_behind_envoy: bool = False
    """Whether Tandem's own Envoy asks it."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A running set."""

    engines: tuple[Engine, ...]
    sidecars: tuple[Sidecar, ...] = ()
    gpus: tuple[Gpu, ...] | None = None
    """None if this machine has no NVML, or the engines run on other machines."""
    gpus_error: str = ""
    """Why `gpus` is None."""
    epps: tuple[EppReport, ...] = ()
    """What each EPP estimates of its pods."""
    network_devices: frozenset[str] | None = None
    """Devices of this machine as UCX names them; None if the engines run on other machines."""
    machine_ports: MachinePorts | None = None
    """None if the engines run on other machines."""
