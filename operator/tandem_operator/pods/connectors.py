"""vLLM's KV connectors: `--kv-transfer-config` and the variables and ports that belong to it.

`resources.vllm_versions` holds the differences between versions; docs/run/vllm.md explains the
fields of each connector.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

from tandem_contract import environment as variables
from tandem_contract import ports
from tandem_contract.connectors import BACKENDS, LEASE_DURATION, ConnectorName
from tandem_contract.durations import Seconds
from tandem_contract.paths import Role

from ..resources import vllm_versions
from ..resources.pools import DecodePool, Pool
from ..resources.spec import PoolSpec
from ..resources.spec_parts import ChainedConnector, PortRange, Transfer
from . import external_storage
from .container_needs import ContainerNeeds, read_only_mount

POD_IP: Final = "$(POD_IP)"
TRANSFER_FLAG: Final = "--kv-transfer-config"
"""The engine flag whose value is `transfer_config` or `offloading_config`."""
SIDE_CHANNEL: Final = "side-channel"
"""Name of the container port that only engines with a peer have."""
ENGINE_ID: Final = "$(POD_NAME)-$(POD_UID)"
"""Unique for each incarnation of a pod: the UID changes when a pod is replaced."""
OFFLOAD_BYTES: Final = 10 * 1024**3
"""Bytes of host memory for offloaded KV where no extraConfig sets cpu_bytes_to_use."""

_KV_ROLES: Final = {
    Role.PREFILL: "kv_producer",
    # It still hands off the KV of streams that move as it drains. If vLLM preempts such a prompt,
    # its answer names no blocks, and the reader computes the prompt.
    Role.DECODE: "kv_consumer",
    # vLLM deprecates it for engines that have one role. Only a producer recomputes a prompt that is
    # preempted before its KV is read; otherwise the reader could get freed blocks.
    Role.UNIFIED: "kv_both",
}

_NIXL: Final = frozenset({ConnectorName.NIXL, ConnectorName.NIXL_PUSH})
_OVER_UCX: Final = _NIXL | {ConnectorName.OFFLOADING}
_UCX: Final = "UCX"
"""NIXL's backend, and the one that vLLM chooses unless it is told another."""
_HASH_SEED: Final = "PYTHONHASHSEED"
_NODE_IP: Final = "NODE_IP"
_TRANSFER_KEY_FLAG: Final = "--transfer-key-dir"
_TRANSFER_KEYS: Final = "/var/run/tandem/transfer-keys"


@dataclass(frozen=True)
class HandoffPorts:
    """Ports at which an engine takes connections of the engines that it hands off with."""

    side_channel: int | None
    """The first one; those of further ranks follow. None: KV moves through a store alone."""
    data: PortRange | None
    """None for engines without UCX."""

    @property
    def label(self) -> str:
        """The value of `labels.HANDOFF_PORTS`."""
        if self.side_channel is None:
            return "none"
        data = f"_{self.data.first}-{self.data.last}" if self.data else ""
        return f"{self.side_channel}{data}"


def transfer_config(pool: Pool) -> dict[str, Any] | None:
    """The value of `--kv-transfer-config` of an engine with a peer; None for a torch engine whose
    KV moves through storage only.

    The torch engine reads the same, without the storage connector.
    """
    transfer = pool.spec.transfer
    links = [
        _connector_config(pool, link, handoff=True)
        for link in transfer.links
        if link.connector != ConnectorName.STORAGE
    ]
    return _chain(pool, links, is_chain=bool(transfer.connectors))


def offloading_config(pool: Pool) -> dict[str, Any] | None:
    """The value of `--kv-transfer-config` of an engine without a peer; None without offloading and
    storage, the only connectors that are of use then."""
    link = pool.spec.transfer.offloading
    links = [_connector_config(pool, link, handoff=False)] if link is not None else []
    return _chain(pool, links, is_chain=False)


def offloaded_bytes(spec: PoolSpec) -> int:
    """Bytes of /dev/shm that offloaded KV takes; 0 without the offloading connector."""
    link = spec.transfer.offloading
    if link is None:
        return 0
    size: int = link.extra_config.get("cpu_bytes_to_use", OFFLOAD_BYTES)
    return size


def connector_variables(pool: Pool) -> dict[str, Any]:
    """Environment variables that the connectors read: each a value or a `valueFrom`."""
    spec = pool.spec
    transfer, names = spec.transfer, spec.transfer.connector_names
    env: dict[str, Any] = {
        variables.SIDE_CHANNEL_HOST: POD_IP,
        variables.SIDE_CHANNEL_PORT: str(transfer.side_channel_port),
    }
    if spec.engine.type == "torch":
        return env
    # ^tcp: every transport but TCP, so that a missing RDMA device is an error and not a fallback.
    env |= {"UCX_TLS": "^tcp" if transfer.require_rdma else "all", "UCX_NET_DEVICES": "all"}
    if (data := transfer.data_ports) is not None:
        env[variables.DATA_PORTS] = f"{data.first}-{data.last}"
    seconds = str(math.ceil(transfer.lease_duration))
    release = vllm_versions.parse_release(spec.engine.version)
    if _NIXL & set(names) and not vllm_versions.LEASE.includes(release):
        env["VLLM_NIXL_ABORT_REQUEST_TIMEOUT"] = seconds
    if ConnectorName.MOONCAKE in names:
        env["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(ports.MOONCAKE_BOOTSTRAP)
        env["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] = seconds
    if ConnectorName.LMCACHE in names:
        # LMCache's hashes begin with it, and its keys name the model without its revision: a seed
        # of their own keeps pods from KV of other weights, dtypes or versions in the same store.
        env[_HASH_SEED] = str(int(pool.compat, 16))
    if ConnectorName.LMCACHE_MP in names:
        env[_NODE_IP] = {"fieldRef": {"fieldPath": "status.hostIP"}}
    return env


def connector_ports(pool: Pool) -> dict[str, int]:
    """Name → port of every port on which the connectors listen."""
    spec = pool.spec
    if _moves_through_store_only(spec.transfer):
        return {}
    port_by_name = rank_ports(SIDE_CHANNEL, spec.transfer.side_channel_port, spec.parallelism.data)
    is_producer = pool.role is not Role.DECODE
    if ConnectorName.MOONCAKE in spec.transfer.connector_names and is_producer:
        # One bootstrap server per pod: the first rank keeps the list of all ranks.
        port_by_name["bootstrap"] = ports.MOONCAKE_BOOTSTRAP
    return port_by_name


def handoff_ports(pool: Pool) -> HandoffPorts | None:
    """None for a pool without a peer, and where the ports are not known.

    They are known for the reference engine, which has its side channel only, for connectors that
    move KV with UCX, which is told a range, and for storage, which has none. The others listen
    where the kernel lets them.
    """
    if isinstance(pool, DecodePool) and pool.spec.prefill_ref is None:
        return None
    transfer = pool.spec.transfer
    if _moves_through_store_only(transfer):
        return HandoffPorts(None, None)
    if pool.spec.engine.type == "torch":
        return HandoffPorts(transfer.side_channel_port, None)
    if not _uses_ucx_only(transfer) or transfer.data_ports is None:
        return None
    # The user's value of the variable replaces ours, and is not read here.
    if any(entry["name"] == variables.DATA_PORTS for entry in pool.spec.engine.env):
        return None
    return HandoffPorts(transfer.side_channel_port, transfer.data_ports)


def earlier_handoff_ports(pool: Pool) -> HandoffPorts | None:
    """The ports that an earlier operator labelled pods of the pool with, which may still run."""
    transfer = pool.spec.transfer
    if pool.spec.engine.type == "torch" and _moves_through_store_only(transfer):
        return HandoffPorts(transfer.side_channel_port, None)
    return None


def _moves_through_store_only(transfer: Transfer) -> bool:
    return transfer.connector_names == (ConnectorName.STORAGE,)


def peer_port_flag(pool: Pool) -> list[str]:
    """The sidecar's `--peer-port`, for a connector that does not listen at vLLM's default port."""
    transfer = pool.spec.transfer
    if transfer.handoff_connector != ConnectorName.OFFLOADING:
        return []
    return ["--peer-port", str(transfer.side_channel_port)]


def rank_ports(name: str, first: int, ranks: int) -> dict[str, int]:
    """A port for each data-parallel rank: the first port plus the rank, as vLLM counts."""
    return {f"{name}-{rank}" if rank else name: first + rank for rank in range(ranks)}


def _chain(pool: Pool, links: list[dict[str, Any]], *, is_chain: bool) -> dict[str, Any] | None:
    """One connector, or vLLM's MultiConnector for several; None for none.

    The storage connector comes last: it loads nothing that another one does. `is_chain`: a single
    connector of `links` is a chain, too.
    """
    if (stored := external_storage.vllm_link(pool)) is not None:
        links = [*links, stored]
    if not links:
        return None
    if len(links) == 1 and not is_chain:
        return {**links[0], "engine_id": ENGINE_ID}
    config = _connector_config(pool, ChainedConnector(connector=ConnectorName.MULTI), handoff=True)
    config["engine_id"] = ENGINE_ID
    config["kv_connector_extra_config"] = {"connectors": links}
    return config


def _connector_config(pool: Pool, link: ChainedConnector, *, handoff: bool) -> dict[str, Any]:
    """The configuration of one connector.

    Each connector of a chain reads its own configuration only, so role and failure policy are
    repeated in each.
    """
    transfer = pool.spec.transfer
    config: dict[str, Any] = {
        "kv_connector": vllm_versions.CONNECTORS[link.connector][0],
        "kv_role": _KV_ROLES[pool.role],
        # Always explicit: vLLM has changed its default before.
        "kv_load_failure_policy": transfer.load_failure_policy,
    }
    if transfer.buffer_device is not None and link.connector in _NIXL:
        config["kv_buffer_device"] = transfer.buffer_device
    # The user's extraConfig wins over what is derived from other fields.
    extra = {**_extra_config(pool.spec, link.connector, handoff=handoff), **link.extra_config}
    return {**config, "kv_connector_extra_config": extra} if extra else config


def _extra_config(spec: PoolSpec, connector: str, *, handoff: bool) -> dict[str, Any]:
    transfer = spec.transfer
    if connector in _NIXL:
        return _nixl_config(spec)
    if connector == ConnectorName.OFFLOADING:
        size = {"cpu_bytes_to_use": OFFLOAD_BYTES}
        # The p2p tier is for peers; without it vLLM keeps KV in host memory only.
        if not handoff or transfer.handoff_connector != ConnectorName.OFFLOADING:
            return size
        tier = {"type": "p2p", "host": POD_IP, "port": transfer.side_channel_port}
        return {"spec_name": "TieringOffloadingSpec", **size, "secondary_tiers": [tier]}
    configs: dict[str, dict[str, Any]] = {
        ConnectorName.MOONCAKE: {"mooncake_protocol": "rdma" if transfer.rdma else "tcp"},
        # LMCache's default is Python's hash of tuples, for which collisions are easy to construct.
        ConnectorName.LMCACHE: {"lmcache.pre_caching_hash_algorithm": "sha256_cbor"},
        ConnectorName.LMCACHE_MP: {
            "lmcache.mp.host": f"tcp://$({_NODE_IP})",
            "lmcache.mp.port": ports.LMCACHE_MP,
        },
    }
    return configs.get(connector, {})


def _nixl_config(spec: PoolSpec) -> dict[str, Any]:
    transfer, engine = spec.transfer, spec.engine
    extra: dict[str, Any] = {}
    if engine.type == "torch" or vllm_versions.LEASE.includes(
        vllm_versions.parse_release(engine.version)
    ):
        extra[LEASE_DURATION] = _number(transfer.lease_duration)
    if transfer.backends:
        extra[BACKENDS] = list(transfer.backends)
    return extra


def _number(seconds: Seconds) -> int | float:
    return int(seconds) if seconds.is_integer() else float(seconds)


def _uses_ucx_only(transfer: Transfer) -> bool:
    backends = [*transfer.backends]
    for link in transfer.links:
        stated = link.extra_config.get("backends", [])
        backends += stated if isinstance(stated, list) else [stated]
    moving = {*transfer.connector_names} - {ConnectorName.STORAGE}
    return moving <= _OVER_UCX and all(b == _UCX for b in backends)


def uses_transfer_keys(pool: Pool) -> bool:
    """Whether the pool's engines move KV at the reference engine's transfer port."""
    handoff = handoff_ports(pool)
    has_port = handoff is not None and handoff.side_channel is not None
    return has_port and pool.spec.engine.type == "torch"


def transfer_key_secret(set_name: str) -> str:
    """Name of the Secret with which the reference engines of a set prove themselves to each other.

    It has the PrefillPool's name: a prefill pod may serve the DecodePools of several endpoints.
    """
    return f"{set_name}-transfer-keys"


def transfer_key_secret_of(pool: Pool) -> str | None:
    """Name of the Secret that the pool's engines mount; None: they need none."""
    if not uses_transfer_keys(pool):
        return None
    if not isinstance(pool, DecodePool):
        return transfer_key_secret(pool.name)
    return transfer_key_secret(pool.spec.prefill_ref.name) if pool.spec.prefill_ref else None


def transfer_key_flags(pool: Pool) -> list[str]:
    """The flag that names the keys' directory."""
    return [_TRANSFER_KEY_FLAG, _TRANSFER_KEYS] if uses_transfer_keys(pool) else []


def transfer_key_needs(pool: Pool) -> ContainerNeeds:
    """The Secret's volume and mount."""
    secret = transfer_key_secret_of(pool)
    if secret is None:
        return ContainerNeeds()
    volume = {"name": "transfer-keys", "secret": {"secretName": secret}}
    return read_only_mount(volume, _TRANSFER_KEYS)
