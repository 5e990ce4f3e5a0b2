"""How vLLM hands KV off: `--kv-transfer-config` and the environment that goes with it.

The versions' differences are `versions`'; what the fields of a connector mean is docs/engines.md's.
"""

import math
from typing import Any, Final

from tandem_contract import environment as variables
from tandem_contract import ports

from ..resources import versions
from ..resources.pools import DecodePool, PrefillPool
from ..resources.spec import OFFLOADING, ChainedConnector, PoolSpec, Seconds

POD_IP: Final = "$(POD_IP)"
ENGINE_ID: Final = "$(POD_NAME)-$(POD_UID)"
"""Another for each incarnation: a pod whose engine ended is replaced, never restarted in place."""
OFFLOAD_BYTES: Final = 10 * 1024**3
"""Host memory for offloaded KV where no extraConfig says cpu_bytes_to_use."""

_NIXL: Final = frozenset({"nixl", "nixl-push"})
_MOONCAKE: Final = "mooncake"

Pool = PrefillPool | DecodePool


def transfer_config(pool: Pool) -> dict[str, Any]:
    """The value of `--kv-transfer-config` of the pool's engine, torch's included."""
    transfer = pool.spec.transfer
    config = _one(pool, ChainedConnector(connector=transfer.connector))
    config["engine_id"] = ENGINE_ID
    if transfer.connectors:
        chain = [_one(pool, link) for link in transfer.connectors]
        config["kv_connector_extra_config"] = {"connectors": chain}
    return config


def offloaded_bytes(spec: PoolSpec) -> int:
    """Host memory that KV is offloaded to, which lies in /dev/shm; 0 without offloading."""
    for link in spec.transfer.connectors:
        if link.connector == OFFLOADING:
            chosen: int = link.extra_config.get("cpu_bytes_to_use", OFFLOAD_BYTES)
            return chosen
    return OFFLOAD_BYTES if spec.transfer.connector == OFFLOADING else 0


def environment(pool: Pool) -> dict[str, str]:
    """Variables the connectors read."""
    spec = pool.spec
    transfer, names = spec.transfer, spec.transfer.used
    made = {
        variables.SIDE_CHANNEL_HOST: POD_IP,
        variables.SIDE_CHANNEL_PORT: str(transfer.side_channel_port),
    }
    if spec.engine.type == "torch":
        return made
    # ^tcp: every transport but TCP, so that without a working RDMA device there is an error.
    made |= {"UCX_TLS": "^tcp" if transfer.require_rdma else "all", "UCX_NET_DEVICES": "all"}
    seconds = str(math.ceil(transfer.lease_duration))
    if _NIXL & set(names) and not versions.LEASE.has(versions.release(spec.engine.version)):
        made["VLLM_NIXL_ABORT_REQUEST_TIMEOUT"] = seconds
    if _MOONCAKE in names:
        made["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(ports.MOONCAKE_BOOTSTRAP)
        made["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] = seconds
    return made


def listening(pool: Pool) -> dict[str, int]:
    """Name → port of what the connectors listen on."""
    spec = pool.spec
    named = per_rank("side-channel", spec.transfer.side_channel_port, spec.parallelism.data)
    if _MOONCAKE in spec.transfer.used and isinstance(pool, PrefillPool):
        # The first rank keeps the list of all.
        named["bootstrap"] = ports.MOONCAKE_BOOTSTRAP
    return named


def peer_port(pool: Pool) -> list[str]:
    """The sidecar's flag for where a connector is asked that does not listen where vLLM would."""
    transfer = pool.spec.transfer
    return (
        ["--peer-port", str(transfer.side_channel_port)] if transfer.hand_off == OFFLOADING else []
    )


def per_rank(name: str, first: int, ranks: int) -> dict[str, int]:
    """A port of each data-parallel rank: the first plus its number, as vLLM counts."""
    return {f"{name}-{rank}" if rank else name: first + rank for rank in range(ranks)}


def _one(pool: Pool, link: ChainedConnector) -> dict[str, Any]:
    """Of a chain, each connector reads its own; so each says everything."""
    transfer = pool.spec.transfer
    config: dict[str, Any] = {
        "kv_connector": versions.CONNECTORS[link.connector][0],
        "kv_role": "kv_producer" if isinstance(pool, PrefillPool) else "kv_consumer",
        # Said even where it is vLLM's own default: that has changed before.
        "kv_load_failure_policy": transfer.load_failure_policy,
    }
    if transfer.buffer_device is not None and link.connector in _NIXL:
        config["kv_buffer_device"] = transfer.buffer_device
    extra = {**_extra(pool.spec, link.connector), **link.extra_config}
    return {**config, "kv_connector_extra_config": extra} if extra else config


def _extra(spec: PoolSpec, connector: str) -> dict[str, Any]:
    transfer = spec.transfer
    if connector in _NIXL:
        return _nixl(spec)
    if connector == _MOONCAKE:
        return {"mooncake_protocol": "rdma" if transfer.rdma else "tcp"}
    if connector == OFFLOADING:
        bytes_ = {"cpu_bytes_to_use": OFFLOAD_BYTES}
        if transfer.hand_off != OFFLOADING:
            return bytes_
        tier = {"type": "p2p", "host": POD_IP, "port": transfer.side_channel_port}
        return {"spec_name": "TieringOffloadingSpec", **bytes_, "secondary_tiers": [tier]}
    return {}


def _nixl(spec: PoolSpec) -> dict[str, Any]:
    transfer, engine = spec.transfer, spec.engine
    extra: dict[str, Any] = {}
    if engine.type == "torch" or versions.LEASE.has(versions.release(engine.version)):
        extra["kv_lease_duration"] = _number(transfer.lease_duration)
    if transfer.backends:
        extra["backends"] = list(transfer.backends)
    return extra


def _number(seconds: Seconds) -> int | float:
    return int(seconds) if seconds.is_integer() else float(seconds)
