"""The router's static configuration (seed 000), for pods whose addresses are known. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from tandem_contract import ports

from ..pods.manifests import pod_names
from ..resources.pools import DecodePool, PoolSet, PrefillPool
from .router_wants import disaggregated_serving


def router_config(sets: Sequence[PoolSet], addresses: Mapping[str, str]) -> dict[str, Any]:
    """The router's YAML (seed 000) for pods that run at `addresses`: pod name → IP.

    Raises KeyError when a pod has no address.
    """
    backends = [
        {
            "name": name,
            "url": f"http://{addresses[name]}:{_serving_port(pool)}",
            "role": pool.role.value,
            "models": list(pool.spec.model.names),
        }
        for pool_set in sets
        for pool in pool_set.pools
        for name in pod_names(pool)
    ]
    decodes = (pool for pool_set in sets for pool in pool_set.decodes)
    return {"disaggregated_serving": disaggregated_serving(decodes), "backends": backends}


def _serving_port(pool: PrefillPool | DecodePool) -> int:
    return ports.ENGINE_PREFILL if isinstance(pool, PrefillPool) else ports.SIDECAR
