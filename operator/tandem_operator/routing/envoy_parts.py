"""What every part of Envoy's configuration is written with."""

from typing import Any, Final

Json = dict[str, Any]

TYPE: Final = "type.googleapis.com/envoy."
MANAGER: Final = (
    TYPE + "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
)


def named(name: str, typed_config: Json) -> Json:
    """A filter."""
    return {"name": f"envoy.filters.{name}", "typed_config": typed_config}


def socket(host: str, port: int) -> Json:
    """An address."""
    return {"socket_address": {"address": host, "port_value": port}}


ROUTER: Final = named("http.router", {"@type": TYPE + "extensions.filters.http.router.v3.Router"})
