"""Envoy in front of an HTTP server of a test, so that it speaks HTTP/2 without TLS only."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tandem_local.ports import free_port
from tandem_local.router import find_envoy

from .real import process, until

_TYPES = "type.googleapis.com/envoy.extensions"
_HTTP = f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ROUTER = f"{_TYPES}.filters.http.router.v3.Router"


@asynccontextmanager
async def speaking_http2(folder: Path, server: int, port: int | None = None) -> AsyncIterator[int]:
    """A port of loopback that speaks HTTP/2 with the server at port `server` behind it."""
    port = port or free_port("127.0.0.1")
    admin = free_port("127.0.0.1")
    file = folder / f"h2c-{port}.json"
    file.write_text(json.dumps(_bootstrap(port, admin, server)))
    command = (find_envoy(), "-c", file, "--use-dynamic-base-id", "--concurrency", "1", "-l", "off")
    async with process(*command) as started, aiohttp.ClientSession() as session:

        async def ready() -> bool:
            assert started.returncode is None, "Envoy ended at its start"
            try:
                async with session.get(f"http://127.0.0.1:{admin}/ready") as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        await until(ready)
        yield port


def _bootstrap(port: int, admin: int, server: int) -> dict[str, Any]:
    route = {"match": {"prefix": "/"}, "route": {"cluster": "server", "timeout": "0s"}}
    manager = {
        "@type": _HTTP,
        "stat_prefix": "h2c",
        "codec_type": "HTTP2",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [{"name": "router", "typed_config": {"@type": _ROUTER}}],
    }
    filters = [{"name": "http", "typed_config": manager}]
    endpoint = {"endpoint": {"address": _address(server)}}
    cluster = {
        "name": "server",
        "load_assignment": {
            "cluster_name": "server",
            "endpoints": [{"lb_endpoints": [endpoint]}],
        },
    }
    return {
        "admin": {"address": _address(admin)},
        "static_resources": {
            "listeners": [{"address": _address(port), "filter_chains": [{"filters": filters}]}],
            "clusters": [cluster],
        },
    }


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
