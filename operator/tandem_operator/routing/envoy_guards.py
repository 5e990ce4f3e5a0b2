"""What keeps Envoy up: probes that tell the truth, and limits it says no at."""

from typing import Final

from .envoy_clusters import ADMIN
from .envoy_parts import MANAGER, ROUTER, TYPE, Json, named, socket

READY: Final = "/ready"
"""On the health port: 503 once Envoy was told to fail its checks, which is how it leaves."""
LIVE: Final = "/live"
"""On the health port: 200 as long as Envoy answers at all."""
STATS: Final = "/stats/prometheus"


def health_listener(address: str, port: int) -> Json:
    """READY, LIVE and STATS, and nothing that changes Envoy."""
    check = {
        "@type": TYPE + "extensions.filters.http.health_check.v3.HealthCheck",
        "pass_through_mode": False,
        "headers": [{"name": ":path", "string_match": {"exact": READY}}],
    }
    routes = [
        {"match": {"path": LIVE}, "direct_response": {"status": 200}},
        {"match": {"path": STATS}, "route": {"cluster": ADMIN}},
    ]
    manager = {
        "@type": MANAGER,
        "stat_prefix": "health",
        "route_config": {
            "name": "health",
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}],
        },
        "http_filters": [named("http.health_check", check), ROUTER],
    }
    return {
        "name": "health",
        "address": socket(address, port),
        # A full house is healthy: probes must not fail because clients are many.
        "ignore_global_conn_limit": True,
        "bypass_overload_manager": True,
        "filter_chains": [{"filters": [named("network.http_connection_manager", manager)]}],
    }


def overload(max_connections: int, max_heap: int | None) -> Json:
    """Say no before there is no memory or descriptor left: being killed cuts every stream."""
    monitors = [
        _monitor(
            "global_downstream_max_connections",
            "downstream_connections.v3.DownstreamConnectionsConfig",
            {"max_active_downstream_connections": max_connections},
        )
    ]
    if max_heap is None:
        return {"resource_monitors": monitors}
    monitors.append(
        _monitor(
            "fixed_heap",
            "fixed_heap.v3.FixedHeapConfig",
            {"max_heap_size_bytes": max_heap},
        )
    )
    actions = {"shrink_heap": 0.85, "stop_accepting_requests": 0.95}
    return {
        "refresh_interval": "0.25s",
        "resource_monitors": monitors,
        "actions": [
            {
                "name": f"envoy.overload_actions.{action}",
                "triggers": [
                    {
                        "name": "envoy.resource_monitors.fixed_heap",
                        "threshold": {"value": share},
                    }
                ],
            }
            for action, share in actions.items()
        ],
    }


def _monitor(name: str, kind: str, config: Json) -> Json:
    typed = {"@type": f"{TYPE}extensions.resource_monitors.{kind}", **config}
    return {"name": f"envoy.resource_monitors.{name}", "typed_config": typed}
