"""What the pools of one endpoint ask of it together, and where they disagree. Pure.

The objects of an endpoint know one value of each setting, the pools one each. A part is there when
any pool asks for it; the most patient pool decides on timeouts; one pool without fallback keeps the
others from it. A configuration is the first pool's by name.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem_contract.durations import format_duration

from ..resources.pools import DecodePool
from ..resources.spec import GatewayRef, Routing
from .router_observed import EndpointPool


@dataclass(frozen=True)
class Wants:
    """The one value of each setting."""

    epp: bool
    epp_replicas: int | None
    """None: no pool says."""
    epp_config: Mapping[str, Any]
    """EndpointPickerConfig, as written; empty: no pool says."""
    envoy: bool
    inference_pool: bool
    gateways: tuple[GatewayRef, ...]
    serving: Mapping[str, Any]
    """The router configuration's `disaggregated_serving`."""
    drain: float
    """Seconds that an answer under way may still take."""


def wants(pools: Sequence[EndpointPool]) -> Wants:
    """What `pools`, at least one, ask for."""
    decodes = [one.pool for one in _by_name(pools)]
    routings = [pool.spec.routing for pool in decodes]
    replicas = [r.epp.replicas for r in routings if r.epp.replicas is not None]
    gateways = {_gateway_key(r.gateway_ref): r.gateway_ref for r in routings if r.gateway_ref}
    return Wants(
        epp=any(r.epp.enabled for r in routings),
        epp_replicas=max(replicas, default=None),
        epp_config=next((r.epp.config for r in routings if r.epp.config), {}),
        envoy=any(r.envoy.enabled for r in routings),
        inference_pool=any(r.inference_pool.enabled for r in routings),
        gateways=tuple(gateways[key] for key in sorted(gateways)),
        serving=disaggregated_serving(decodes),
        drain=max(pool.spec.drain.timeout for pool in decodes),
    )


def disaggregated_serving(decodes: Iterable[DecodePool]) -> dict[str, Any]:
    """The router configuration's section (seed 000) for all `decodes` together."""
    specs = [pool.spec for pool in decodes]
    split = any(spec.prefill_ref and spec.routing.split == "auto" for spec in specs)
    if not specs:
        return {"enabled": split}
    sidecars = [spec.sidecar for spec in specs]
    return {
        "enabled": split,
        "prefill_timeout": format_duration(max(s.prefill_timeout for s in sidecars)),
        "kv_transfer_timeout": format_duration(max(s.kv_transfer_timeout for s in sidecars)),
        "fallback_to_unified": all(s.fallback_to_unified for s in sidecars),
    }


_COMPARED: Mapping[str, Callable[[Routing], Any]] = {
    "epp.enabled": lambda routing: routing.epp.enabled,
    "epp.config": lambda routing: routing.epp.config or None,
    "envoy.enabled": lambda routing: routing.envoy.enabled,
}
"""Field of spec.routing → its value; None says nothing."""


def conflicts(pools: Sequence[EndpointPool]) -> tuple[str, ...]:
    """One line for each setting that pools of one endpoint want differently.

    Who wants what, what is done, and the way out; empty when they agree.
    """
    ordered = _by_name(pools)
    found = [
        line
        for name, value in _COMPARED.items()
        if (line := _conflict(name, [(p.pool.name, value(p.pool.spec.routing)) for p in ordered]))
    ]
    splitting = [p for p in ordered if p.pool.spec.prefill_ref is not None]
    split = _conflict("split", [(p.pool.name, p.pool.spec.routing.split) for p in splitting])
    return (*found, *([split] if split else []))


def _conflict(name: str, said: Sequence[tuple[str, Any]]) -> str | None:
    """The line for one field, from the pools' names and values in the order of names."""
    given = [(pool, value) for pool, value in said if value is not None]
    values = [value for _, value in given]
    if all(value == values[0] for value in values):
        return None
    if isinstance(values[0], Mapping):
        first, others = given[0][0], [pool for pool, value in given if value != values[0]]
        return (
            f"routing.{name} of {', '.join(others)} is not that of {first}, which is used:"
            f" give it in one pool, or the same in all"
        )
    done = "auto" if "auto" in values else True
    told = ", ".join(f"{json.dumps(value)} in {pool}" for pool, value in given)
    return (
        f"routing.{name} is {told}: {json.dumps(done)} is done;"
        f" pools of one endpoint need the same value"
    )


def _by_name(pools: Sequence[EndpointPool]) -> list[EndpointPool]:
    return sorted(pools, key=lambda one: one.pool.name)


def _gateway_key(ref: GatewayRef) -> tuple[str, str, str]:
    return ref.namespace or "", ref.name, ref.section_name or ""
