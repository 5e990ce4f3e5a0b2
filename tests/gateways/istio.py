"""Istio on this machine: its control plane (istiod), and Envoys as gateways.

istiod watches the API server and sends the gateway's configuration over xDS. In a cluster Istio
runs the gateway's Envoy in pods, with Istio's own build of Envoy; here upstream Envoy connects to
istiod by itself, as a process or in a pod. So istiod is told to leave out the filters that only
Istio's build has.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from tandem_local.ports import free_port
from tandem_local.router import find_envoy
from tests.cluster import tools

GATEWAY_LABEL: Final = "gateway.networking.k8s.io/gateway-name"
"""Label of a gateway's pods: Istio selects them by it."""
_HOST: Final = "127.0.0.1"
_START_SECONDS: Final = 120.0
_VERSION: Final = "1.31.0"
_ENVIRONMENT: Final = {
    "ENABLE_GATEWAY_API_INFERENCE_EXTENSION": "true",
    "POD_NAMESPACE": "istio-system",
    # Filters of Istio's build of Envoy.
    "PILOT_ENABLE_METADATA_EXCHANGE": "false",
    "PILOT_ENABLE_ALPN_FILTER": "false",
    # The gateway connects without a certificate, and no pod is injected.
    "ENABLE_CA_SERVER": "false",
    "PILOT_CERT_PROVIDER": "none",
    "INJECT_ENABLED": "false",
    # It would make the gateway's pods.
    "PILOT_ENABLE_GATEWAY_API_DEPLOYMENT_CONTROLLER": "false",
    "VALIDATION_WEBHOOK_CONFIG_NAME": "",
}
_MESH: Final = {"enableAutoMtls": False, "enablePrometheusMerge": False}


@dataclass
class Istiod:
    """A running istiod."""

    host: str
    xds_port: int
    log: Path


@asynccontextmanager
async def istiod(kubeconfig: Path, folder: Path, host: str = _HOST) -> AsyncIterator[Istiod]:
    """istiod for the cluster of `kubeconfig`, once it is ready; its files are in `folder`.

    Gateways connect to it at the address `host`.
    """
    http, monitoring, xds = free_port(_HOST), free_port(_HOST), free_port(host)
    mesh, log = folder / "mesh.json", folder / "istiod.log"
    mesh.write_text(json.dumps(_MESH))
    flags = {
        "kubeconfig": kubeconfig,
        "meshConfig": mesh,
        "networksConfig": folder / "none",
        "httpAddr": f"{_HOST}:{http}",
        "grpcAddr": f"{host}:{xds}",
        "monitoringAddr": f"{_HOST}:{monitoring}",
        "httpsAddr": "",
        "secureGRPCAddr": "",
        "ctrlz_port": 0,
        "shutdownDuration": "0s",
    }
    command = [str(tools.path("pilot-discovery")), "discovery"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    async with _process(command, log, _ENVIRONMENT) as process:
        await _until_ready(process, f"http://{_HOST}:{http}/ready", log)
        yield Istiod(host, xds, log)


@dataclass
class GatewayEnvoy:
    """The gateway's Envoy."""

    process: asyncio.subprocess.Process
    admin: str
    """URL of its admin interface."""
    log: Path

    async def config_dump(self) -> Any:
        """The configuration that istiod sent."""
        async with aiohttp.ClientSession() as http, http.get(self.admin + "/config_dump") as page:
            return await page.json()


@asynccontextmanager
async def gateway_envoy(
    control: Istiod, namespace: str, gateway: str, folder: Path
) -> AsyncIterator[GatewayEnvoy]:
    """Envoy as the only pod of the Gateway `gateway`, once it has its configuration."""
    admin, file, log = free_port(_HOST), folder / "envoy.json", folder / "envoy.log"
    file.write_text(json.dumps(bootstrap(control, namespace, gateway, address(_HOST, admin))))
    command = [str(find_envoy()), "-c", str(file), "--use-dynamic-base-id", "--concurrency", "1"]
    command += ["--service-node", node_id(_HOST, namespace, gateway)]
    async with _process(command, log, {}) as process:
        url = f"http://{_HOST}:{admin}"
        await _until_ready(process, url + "/ready", log)
        yield GatewayEnvoy(process, url, log)


def node_id(ip: str, namespace: str, gateway: str) -> str:
    """The name by which istiod knows the Envoy with the address `ip`."""
    return f"router~{ip}~{gateway}-0.{namespace}~{namespace}.svc.cluster.local"


def bootstrap(control: Istiod, namespace: str, gateway: str, admin: Any) -> Any:
    """What Istio's agent writes for a gateway, without certificates and statistics.

    The node's name is left to Envoy's flag --service-node; `admin` is the address of the admin
    interface.
    """
    labels = {GATEWAY_LABEL: gateway}
    endpoint = {"endpoint": {"address": address(control.host, control.xds_port)}}
    http2 = {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    source = {"ads": {}, "resource_api_version": "V3", "initial_fetch_timeout": "0s"}
    return {
        "node": {
            "cluster": f"{gateway}.{namespace}",
            "metadata": {
                "NAMESPACE": namespace,
                "LABELS": labels,
                "CLUSTER_ID": "Kubernetes",
                "ISTIO_VERSION": _VERSION,
            },
        },
        "admin": {"address": admin},
        "dynamic_resources": {
            "ads_config": {
                "api_type": "GRPC",
                "transport_api_version": "V3",
                "grpc_services": [{"envoy_grpc": {"cluster_name": "xds-grpc"}}],
            },
            "lds_config": source,
            "cds_config": source,
        },
        "static_resources": {
            "clusters": [
                {
                    "name": "xds-grpc",
                    "type": "STATIC",
                    "typed_extension_protocol_options": {http2["@type"].split("/")[1]: http2},
                    "load_assignment": {
                        "cluster_name": "xds-grpc",
                        "endpoints": [{"lb_endpoints": [endpoint]}],
                    },
                }
            ]
        },
    }


def address(host: str, port: int) -> Any:
    return {"socket_address": {"address": host, "port_value": port}}


@asynccontextmanager
async def _process(
    command: list[str], log: Path, environment: dict[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that writes to `log` and is killed at the end, also if this process is."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *("setpriv", "--pdeathsig=KILL", *command),
            env={**os.environ, **environment},
            cwd=log.parent,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _until_ready(process: asyncio.subprocess.Process, url: str, log: Path) -> None:
    async with asyncio.timeout(_START_SECONDS), aiohttp.ClientSession() as http:
        while True:
            assert process.returncode is None, log.read_text()[-4000:]
            try:
                async with http.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
