"""`tandem-operator`: the flags, and what they may not say."""

import asyncio
import ipaddress
import logging
from pathlib import Path

import click

from tandem_contract.commandline import DURATION, HOST_PORT, HostPort, command, fail
from tandem_contract.documents import DocumentError
from tandem_kube.client import connect
from tandem_kube.errors import ApiError, NotConfigured

from .resources.resolve import DEFAULTS, Defaults
from .routing.router_observed import RouterSettings
from .routing.router_settings import router_settings
from .runtime.acting import Scope
from .runtime.installed import CrdsMissing
from .runtime.leader import LeaseTimes
from .runtime.metrics import Metrics
from .runtime.service import LostLease, Service, Settings

_SHORTEST_LEASE = 3.0


def _networks(
    _ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    try:
        return tuple(str(ipaddress.ip_network(value)) for value in values)
    except ValueError as err:
        raise click.BadParameter(str(err)) from err


@command("tandem-operator")
@click.option("--namespace", "namespaces", multiple=True, help="Act in this one; repeatable.")
@click.option("--all-namespaces", is_flag=True, help="Act in all; needs a ClusterRole.")
@click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Default: the cluster this pod runs in, else KUBECONFIG or ~/.kube/config.",
)
@click.option("--tandem-image", help="Of sidecar and EPP.  [default: tandem, of this version]")
@click.option("--engine-image", help="Of the torch engine.  [default: tandem-engine, likewise]")
@click.option("--vllm-repository", help="Of vLLM's images.  [default: vllm/vllm-openai]")
@click.option(
    "--image-pull-policy",
    type=click.Choice(["Always", "IfNotPresent", "Never"]),
    help="Of sidecar, EPP and Envoy.  [default: Kubernetes' own choice by the tag]",
)
@click.option(
    "--pod-network",
    "pod_networks",
    multiple=True,
    callback=_networks,
    metavar="CIDR",
    help="Where prefill pods are, repeatable; read by sidecars behind a picker that is not ours."
    "  [default: the private networks]",
)
@click.option("--envoy-image", default=RouterSettings().envoy_image, help="Of Envoy.")
@click.option(
    "--router-settings",
    "router_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML: replicas, resources and placement of every Envoy and EPP; see docs/routing.md.",
)
@click.option(
    "--health", type=HOST_PORT, default="0.0.0.0:8081", help="HTTP: /healthz and /readyz."
)
@click.option("--metrics", type=HOST_PORT, default="0.0.0.0:9090", help="HTTP: /metrics.")
@click.option(
    "--leader-elect/--no-leader-elect",
    default=True,
    help="Act only while holding the Lease; off: nobody else may run.",
)
@click.option("--lease-namespace", help="Of the Lease.  [default: the pod's own]")
@click.option(
    "--lease-duration",
    type=DURATION,
    default="15s",
    help="How long a leader that died keeps the others waiting; at least 3s.",
)
@click.option(
    "--resync", type=DURATION, default="10m", help="How often everything is looked at anew."
)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info"
)
def main(
    *,
    namespaces: tuple[str, ...],
    all_namespaces: bool,
    kubeconfig: Path | None,
    tandem_image: str | None,
    engine_image: str | None,
    vllm_repository: str | None,
    image_pull_policy: str | None,
    pod_networks: tuple[str, ...],
    envoy_image: str,
    router_file: Path | None,
    health: HostPort,
    metrics: HostPort,
    leader_elect: bool,
    lease_namespace: str | None,
    lease_duration: float,
    resync: float,
    log_level: str,
) -> None:
    """Turn PrefillPools and DecodePools into pods, routers and status."""
    if bool(namespaces) == all_namespaces:
        raise click.UsageError("give either --namespace NAME, repeatable, or --all-namespaces")
    if lease_duration < _SHORTEST_LEASE:
        raise click.UsageError("--lease-duration is at least 3s: renewing takes a moment")
    if resync <= 0:
        raise click.UsageError("--resync is longer than nothing: 10m")
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    defaults = Defaults(
        tandem_image or DEFAULTS.tandem_image,
        engine_image or DEFAULTS.torch_image,
        vllm_repository or DEFAULTS.vllm_repository,
        pull_policy=image_pull_policy,
        pod_networks=pod_networks or DEFAULTS.pod_networks,
    )
    router = RouterSettings(
        tandem_image=defaults.tandem_image,
        envoy_image=envoy_image,
        image_pull_policy=image_pull_policy,
    )
    try:
        router = router_settings(router_file, router) if router_file else router
    except DocumentError as err:
        fail(str(err), status=2)
    settings = Settings(
        Scope(namespaces, resync, defaults, router),
        health,
        metrics,
        leader_elect,
        lease_namespace,
        LeaseTimes.lasting(lease_duration),
    )
    try:
        asyncio.run(_run(settings, kubeconfig))
    except NotConfigured as err:
        fail(str(err), status=2)
    except (CrdsMissing, ApiError, LostLease, OSError) as err:
        fail(str(err))


async def _run(settings: Settings, kubeconfig: Path | None) -> None:
    metrics = Metrics()
    async with await connect(kubeconfig, observer=metrics.called) as api:
        await Service(settings, api, metrics).run()


if __name__ == "__main__":
    main()
