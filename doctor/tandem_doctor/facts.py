"""What was seen of a running set, as the rules read it. None is always: it could not be had."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem_contract.paths import Role
from tandem_planner.fabrics import Fabric


@dataclass(frozen=True, slots=True)
class Declared:
    """How an engine was started."""

    flags: Mapping[str, str]
    """Long flags without dashes → value, the last given; a switch has `true`."""
    transfer: Mapping[str, Any] = field(default_factory=dict)
    """`--kv-transfer-config`; empty without one."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def connectors(self) -> tuple[str, ...]:
        """By vLLM's names; of a MultiConnector those in it."""
        extra = self.transfer.get("kv_connector_extra_config")
        chain = extra.get("connectors") if isinstance(extra, dict) else None
        links = [self.transfer, *(chain if isinstance(chain, list) else ())]
        names = [str(link.get("kv_connector")) for link in links if isinstance(link, dict)]
        return tuple(names[1:] or names)

    def uses(self, kind: str) -> bool:
        """Whether a connector's name begins with `kind`."""
        return any(name.startswith(kind) for name in self.connectors)


@dataclass(frozen=True, slots=True)
class SideChannel:
    """What the port said at which a reader's handshake begins."""

    address: str
    trouble: str | None = None
    """Why it cannot be reached; None: it answered."""
    fingerprint: str | None = None
    """vLLM's own hash of what two NIXL engines must share."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's NixlAgentMetadata."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine."""

    pod: str
    role: Role
    group: str
    """Engines hand off to each other within a group only."""
    address: str
    compat: str = ""
    """Those with an equal one are paired; empty where nothing says."""
    trouble: str | None = None
    """Why its HTTP port does not answer; None: it does."""
    version: str | None = None
    model: str | None = None
    """What it loaded, as it says itself."""
    adapters: frozenset[str] = frozenset()
    max_model_len: int | None = None
    cache: Mapping[str, str] = field(default_factory=dict)
    """Labels of `vllm:cache_config_info`."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """Sums by metric name."""
    declared: Declared | None = None
    side_channel: SideChannel | None = None
    """None: not asked from here."""
    fabrics: frozenset[Fabric] | None = None
    """What joins its processes with other engines'; None: not seen from here."""


@dataclass(frozen=True, slots=True)
class Sidecar:
    """One decode pod's sidecar."""

    pod: str
    trouble: str | None = None
    not_ready: str | None = None
    """What `/readyz` said, when it is not."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """Sums by metric name; errors by `name{phase}`, paths by `name{path}`."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this machine."""

    index: int
    name: str
    nearness: Mapping[int, str] = field(default_factory=dict)
    """Other GPU → `nvlink`, or the level of PCIe topology they meet at."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A running set."""

    engines: tuple[Engine, ...]
    sidecars: tuple[Sidecar, ...] = ()
    gpus: tuple[Gpu, ...] | None = None
    """None: NVML is not on this machine, or the engines are not."""
    gpus_unseen: str = ""
    """Why there are none."""
