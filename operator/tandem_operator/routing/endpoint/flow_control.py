"""Flow control as the pools of an endpoint state it. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tandem_contract.durations import format_duration

from ...resources.compatibility import takes_priorities
from ...resources.pools import DecodePool
from ...resources.spec import FlowClient, FlowControl


def flow_control(decodes: Sequence[DecodePool]) -> Mapping[str, Any]:
    """The router configuration's section `flow_control` for all `decodes` together, in order of
    their names; empty when it is off: an EPP of an earlier version refuses a file with it."""
    stated = stated_flow(decodes)
    if stated is None or not stated.enabled:
        return {}
    return {
        "enabled": True,
        "ttl": format_duration(stated.ttl),
        "no_endpoint_ttl": format_duration(stated.no_endpoint_ttl),
        "max_requests": stated.max_requests,
        "max_bytes": stated.max_bytes,
        "fairness": stated.fairness,
        "order": stated.order,
        "displace": stated.displace,
        **(
            {"propagate_priority": True}
            if stated.propagate_priority and not priority_obstacles(decodes)
            else {}
        ),
        "bands": [
            {
                "priority": band.priority,
                **({} if band.ttl is None else {"ttl": format_duration(band.ttl)}),
                **({} if band.max_requests is None else {"max_requests": band.max_requests}),
            }
            for band in stated.bands
        ],
        # Of a pool without pods no backend lists the models.
        **({"models": _models(decodes)} if stated.no_endpoint_ttl else {}),
        **({"clients": clients} if (clients := [_client(each) for each in stated.clients]) else {}),
    }


def _models(decodes: Iterable[DecodePool]) -> list[str]:
    return sorted({name for decode in decodes for name in decode.spec.model.names})


def _client(client: FlowClient) -> dict[str, Any]:
    tenant = {"tenant": client.tenant} if client.tenant else {}
    return {"name": client.name, "priority": client.priority, **tenant}


def priority_obstacles(decodes: Iterable[DecodePool]) -> tuple[str, ...]:
    """What keeps `routing.flowControl.propagatePriority` off, one line for each of `decodes` whose
    engines refuse requests with a priority; empty: nothing, or no pool asks for it."""
    decodes = tuple(decodes)
    stated = stated_flow(decodes)
    if stated is None or not (stated.enabled and stated.propagate_priority):
        return ()
    lines = ((decode.name, _priority_obstacle(decode)) for decode in decodes)
    return tuple(f"{name} {obstacle}" for name, obstacle in lines if obstacle)


def _priority_obstacle(decode: DecodePool) -> str:
    engine = decode.spec.engine
    if engine.type != "vllm":
        return f"has engine.type {engine.type}"
    if takes_priorities(engine.extra_args):
        return ""
    return "has no --scheduling-policy priority in engine.extraArgs"


def stated_flow(decodes: Iterable[DecodePool]) -> FlowControl | None:
    """The settings of the first pool that states them; None: none does."""
    return next(filter(None, (decode.spec.routing.flow_control for decode in decodes)), None)
