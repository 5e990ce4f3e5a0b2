"""`tandem-operator`: its flags, and one replica from start to end.

listen on --health and --metrics → check CRDs → acquire the Lease → Controller.run → release
"""

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from tandem_contract import ports
from tandem_contract.commandline import (
    DURATION,
    HOST_PORT,
    HostPort,
    command,
    fail,
    format_duration,
    settings_of,
)
from tandem_contract.documents import DocumentError
from tandem_kube.client import Api, connect
from tandem_kube.errors import ApiError, NotConfigured
from tandem_kube.pages import health_app, listening, metrics_app

from .resources.resolve import DEFAULTS, Defaults
from .routing.endpoint.settings import RouterSettings, load_router_settings
from .runtime.controller import Controller, Scope
from .runtime.crd_check import CrdsMissing, check_crds
from .runtime.leader import Leadership, LeaseTimes
from .runtime.metrics import Metrics

T = TypeVar("T")

log = logging.getLogger(__name__)

_HEALTH: Final = HostPort("0.0.0.0", ports.OPERATOR_HEALTH)
_METRICS: Final = HostPort("0.0.0.0", ports.OPERATOR_METRICS)

_RETRY_PERIOD: Final = 5.0
"""Seconds between attempts at the start, while the API server or the CRDs are missing."""
MIN_LEASE_DURATION: Final = 3.0
"""Seconds. Renewing a shorter Lease would leave no time for a single slow call to the API
server."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of one replica of the operator; times in seconds."""

    scope: Scope = field(default_factory=Scope)
    """Which pools the leader reconciles, and with which defaults."""
    health: HostPort = _HEALTH
    """Address of /healthz and /readyz. All interfaces, because the kubelet calls the pod's address.
    On another port than the Deployment's probes use, the kubelet restarts the container again and
    again."""
    metrics: HostPort = _METRICS
    """Address of /metrics. All interfaces, because Prometheus scrapes the pod's address. On another
    port than the PodMonitor's, the alert TandemOperatorNotLeading fires."""
    leader_elect: bool = True
    """Whether the replica reconciles only while it holds the Lease. False: the user makes sure that
    no other replica runs; two replicas would write at the same time."""
    lease_namespace: str | None = None
    """Namespace of the Lease; None: the namespace of the pod, or of the kubeconfig's context.
    Replicas with different namespaces do not exclude each other."""
    lease_times: LeaseTimes = field(default_factory=LeaseTimes)
    log_level: str = "info"
    """debug, info, warning or error."""


_DEFAULTS: Final = Settings()


class LeaseLost(Exception):
    """Another replica may lead by now, so this one has stopped writing and exits."""


def _networks(
    _ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    try:
        return tuple(str(ipaddress.ip_network(value)) for value in values)
    except ValueError as err:
        raise click.BadParameter(str(err)) from err


@command("tandem-operator")
@click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    help="Serve the pools of this namespace; repeatable.",
)
@click.option(
    "--all-namespaces", is_flag=True, help="Serve the pools of all namespaces; needs a ClusterRole."
)
@click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the API server's address and credentials.  [default: the service account of the"
    " pod, else KUBECONFIG or ~/.kube/config]",
)
@click.option(
    "--tandem-image", help="Image of sidecar and EPP.  [default: tandem, of this version]"
)
@click.option(
    "--engine-image", help="Image of the torch engine.  [default: tandem-engine, of this version]"
)
@click.option("--vllm-storage-image", help="Image that brings the storage connector to vLLM.")
@click.option("--vllm-repository", help="Repository of vLLM's images.  [default: vllm/vllm-openai]")
@click.option(
    "--image-pull-policy",
    type=click.Choice(["Always", "IfNotPresent", "Never"]),
    help="Of Tandem's images and Envoy's.  [default: Kubernetes chooses by the tag]",
)
@click.option(
    "--pod-network",
    "pod_networks",
    multiple=True,
    callback=_networks,
    metavar="CIDR",
    help="Network of the pods, repeatable. Behind an EPP other than Tandem's, whose plans are not"
    " signed, sidecars contact only prefill pods in these.  [default: the private networks]",
)
@click.option(
    "--pool-pull-secret",
    "pool_pull_secrets",
    multiple=True,
    metavar="NAME",
    help="Pull secret of all pools' pods, repeatable; it must exist in the pools' namespaces.",
)
@click.option(
    "--assigned-users",
    is_flag=True,
    help="The platform assigns user ids to pods, as OpenShift does: pods name none.",
)
@click.option("--envoy-image", default=_DEFAULTS.scope.router.envoy_image, help="Image of Envoy.")
@click.option(
    "--router-settings",
    "router_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML: replicas, resources and placement of every Envoy and EPP; see docs/run/routing.md.",
)
@click.option(
    "--health",
    type=HOST_PORT,
    default=str(_DEFAULTS.health),
    help="HTTP: /healthz and /readyz.",
)
@click.option("--metrics", type=HOST_PORT, default=str(_DEFAULTS.metrics), help="HTTP: /metrics.")
@click.option(
    "--leader-elect/--no-leader-elect",
    default=_DEFAULTS.leader_elect,
    help="Reconcile only while holding the Lease. Off: run no other replica.",
)
@click.option("--lease-namespace", help="Namespace of the Lease.  [default: the pod's]")
@click.option(
    "--lease-duration",
    type=DURATION,
    default=format_duration(_DEFAULTS.lease_times.duration),
    help="Time after which another replica takes over from a leader that died; at least"
    f" {format_duration(MIN_LEASE_DURATION)}.",
)
@click.option(
    "--resync",
    type=DURATION,
    default=format_duration(_DEFAULTS.scope.resync),
    help="Time between full reconciliations of all pools, which need no change.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default=_DEFAULTS.log_level,
)
def main(*, kubeconfig: Path | None, **flags: Any) -> None:
    """Run the pods and routers that PrefillPools and DecodePools describe; write their status."""
    try:
        settings = settings_from(flags)
    except DocumentError as err:
        fail(str(err), status=2)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if settings.log_level != "debug":
        # It logs each attempt of each call in an outage; the feeds say what matters of it.
        logging.getLogger("kopf").setLevel(logging.CRITICAL)
    try:
        asyncio.run(_connect_and_run(settings, kubeconfig))
    except NotConfigured as err:
        fail(str(err), status=2)
    # These may pass, so status 1 and not 2; the kubelet restarts the container.
    except (LeaseLost, OSError) as err:
        fail(str(err))


def settings_from(flags: Mapping[str, Any]) -> Settings:
    """Make settings of parsed flags.

    Raises UsageError for flags that contradict each other or are out of range, and DocumentError
    for an invalid --router-settings file.
    """
    if bool(flags["namespaces"]) == flags["all_namespaces"]:
        raise click.UsageError("give either --namespace NAME, repeatable, or --all-namespaces")
    if flags["lease_duration"] < MIN_LEASE_DURATION:
        raise click.UsageError(
            f"--lease-duration must be at least {format_duration(MIN_LEASE_DURATION)}: renewing"
            " the Lease takes time"
        )
    if flags["resync"] <= 0:
        default = format_duration(_DEFAULTS.scope.resync)
        raise click.UsageError(f"--resync must be longer than 0s; the default is {default}")
    defaults = Defaults(
        flags["tandem_image"] or DEFAULTS.tandem_image,
        flags["engine_image"] or DEFAULTS.torch_image,
        flags["vllm_repository"] or DEFAULTS.vllm_repository,
        vllm_storage_image=flags["vllm_storage_image"] or DEFAULTS.vllm_storage_image,
        pull_policy=flags["image_pull_policy"],
        image_pull_secrets=flags["pool_pull_secrets"],
        assigned_users=flags["assigned_users"],
        pod_networks=flags["pod_networks"] or DEFAULTS.pod_networks,
    )
    router = RouterSettings(
        tandem_image=defaults.tandem_image,
        envoy_image=flags["envoy_image"],
        image_pull_policy=flags["image_pull_policy"],
        assigned_users=flags["assigned_users"],
    )
    if flags["router_file"]:
        router = load_router_settings(flags["router_file"], router)
    return settings_of(
        Settings,
        flags,
        scope=Scope(flags["namespaces"], flags["resync"], defaults, router),
        lease_times=LeaseTimes.for_duration(flags["lease_duration"]),
    )


async def _connect_and_run(settings: Settings, kubeconfig: Path | None) -> None:
    metrics = Metrics()
    async with await connect(kubeconfig, observer=metrics.count_api_call) as api:
        await Replica(settings, api, metrics).run()


class Replica:
    """One replica of the operator."""

    def __init__(self, settings: Settings, api: Api, metrics: Metrics) -> None:
        self._settings = settings
        self._api = api
        self._metrics = metrics
        self._stopping = asyncio.Event()
        self._has_crds = False

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT.

        Raises OSError when a port is taken, and LeaseLost.
        """
        self._catch_signals()
        settings = self._settings
        async with AsyncExitStack() as stack:
            # Opened first and so closed last: probes and scrapes are answered until the end.
            health, metrics = health_app(self._is_ready), metrics_app(self._metrics.registry)
            await stack.enter_async_context(listening(health, settings.health, "--health"))
            await stack.enter_async_context(listening(metrics, settings.metrics, "--metrics"))
            for line in await self._retried(lambda: check_crds(self._api)) or ():
                log.warning("%s", line)
            self._has_crds = True
            # Stays unset without leader election: there is no Lease to lose.
            lost, api = asyncio.Event(), self._api
            if settings.leader_elect:
                leadership = _leadership(self._api, settings)
                await stack.enter_async_context(leadership)
                # A follower waits here. SIGTERM ends the wait, and the replica never leads.
                await _first_set(leadership.gained, leadership.lost, self._stopping)
                lost, api = leadership.lost, self._api.fenced(leadership.may_write)
            if not self._stopping.is_set():
                await self._lead(api, lost)

    async def _lead(self, api: Api, lost: asyncio.Event) -> None:
        # Never set back to 0: a replica that stops leading exits.
        self._metrics.leader.set(1)
        namespaces = ", ".join(self._settings.scope.namespaces) or "all namespaces"
        log.info("leading: reconciling the pools of %s", namespaces)
        controller = await self._retried(
            lambda: Controller.create(api, self._settings.scope, self._metrics)
        )
        if controller is None:
            return
        run = asyncio.create_task(controller.run(self._stopping))
        # The Lease is watched beside the work: it may be lost while a call to the API server hangs.
        lease_lost = asyncio.create_task(lost.wait())
        await asyncio.wait([run, lease_lost], return_when=asyncio.FIRST_COMPLETED)
        lease_lost.cancel()
        if lost.is_set():
            # Cancel instead of waiting for reconciliations: another replica writes soon.
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
            raise LeaseLost("the Lease could not be renewed in time: another replica may lead now")
        await run

    def _is_ready(self) -> bool:
        """A follower is ready too: it can take over."""
        return self._has_crds and not self._stopping.is_set()

    async def _retried(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """The result of `call`, once the API server answers and has the CRDs; None at SIGTERM."""
        # An exit would end in CrashLoopBackOff, whose pauses are of up to 5 minutes.
        while not self._stopping.is_set():
            try:
                return await call()
            except (ApiError, CrdsMissing) as err:
                log.warning("%s; trying again in %g s", err, _RETRY_PERIOD)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _RETRY_PERIOD)
        return None

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            # Not signal.signal, whose handlers do not wake the event loop.
            loop.add_signal_handler(number, self._stopping.set)


def _leadership(api: Api, settings: Settings) -> Leadership:
    # In a cluster the host name is the pod's name. The random part distinguishes a restarted
    # container from its predecessor, whose Lease it must not continue.
    identity = f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    namespace = settings.lease_namespace or api.namespace
    return Leadership(api, namespace, identity, settings.lease_times)


async def _first_set(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    main()
