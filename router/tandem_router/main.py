"""`tandem-router`: its flags. Those of the data path are the sidecar's own, with its defaults."""

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
import uvloop

from tandem_contract import ports
from tandem_contract.api_keys import ApiKeys
from tandem_contract.commandline import DIRECTORY, DURATION, HOST_PORT, HostPort, command, fail
from tandem_contract.connections import raise_descriptor_limit
from tandem_contract.documents import DocumentError
from tandem_contract.memory import collect_seldom
from tandem_contract.plan import load_keys
from tandem_contract.server_tls import mutual_client
from tandem_epp.backends.pod_backend import PodSelection
from tandem_epp.backends.selection import selected_pods
from tandem_epp.flags import deciding_flags
from tandem_epp.llmd.plugins.explain import explain
from tandem_epp.process.configuration import log_notices
from tandem_epp.settings import Settings as EppSettings
from tandem_kube.errors import NotConfigured
from tandem_sidecar.main import main as sidecar_command
from tandem_sidecar.main import settings_from
from tandem_sidecar.observability import logs
from tandem_sidecar.process.listen import CannotListen, WorkerSockets
from tandem_sidecar.process.supervisor import WorkerFailed
from tandem_sidecar.settings import Settings

from .configuration import load, log_ignored_storage
from .peers import WorkerPeers
from .run import Worker, run
from .workers import supervise

SHARED_FLAGS: Final = (
    *("connector", "peer_port", "retries", "prefill_grace", "push_timeout", "silence_timeout"),
    *("drain_timeout", "max_body", "held_bytes", "max_connections"),
    *("breaker_failures", "breaker_cooldown"),
    *("tokenize_once", "stream_kv", "tls_ca", "tls_cert", "tls_key"),
    *("resume", "resume_max_regeneration"),
    *("workers", "history", "log_format", "log_level", "otlp_endpoint"),
)
"""Flags of `tandem-sidecar` that mean the same here. The others name its one engine and what other
processes decide for it, or the router's file has them."""
_PREFIX: Final = "TANDEM_ROUTER"
_LISTEN: Final = HostPort("0.0.0.0", ports.ROUTER)
_ADMIN: Final = HostPort("0.0.0.0", ports.ROUTER_ADMIN)


def _check_config(context: click.Context, _param: click.Parameter, file: Path | None) -> None:
    """Print what `file` would run, and exit: 2 if it cannot be used."""
    if file is None:
        return
    try:
        configuration = load(file, os.environ)
    except DocumentError as err:
        fail(str(err), status=2)
    for backend in configuration.router.backends:
        click.echo(f"backend {backend.name}: {backend.role}, {backend.url}")
    click.echo(explain(configuration.routing, configuration.router.health_checks))
    context.exit()


@command("tandem-router", flags_file=False)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The router's file in YAML: disaggregated_serving, backends, health_checks, and optionally"
    " an EndpointPickerConfig. Reloaded when it changes, and on SIGHUP.",
)
@deciding_flags
@click.option(
    "--api-key-dir",
    type=DIRECTORY,
    help="Directory of clients' API keys, one file each, named after the client; reloaded when it "
    "changes. A request without one of them, in x-api-key or after Bearer in Authorization, is "
    "answered with 401. Default: no client needs a key.",
)
@click.option(
    "--drain-delay",
    type=DURATION,
    default="0s",
    help="Time after SIGTERM for which new requests are still served, each as the last one of its "
    "connection: what sends clients here learns late that the router stops. Then it drains.",
)
@click.option(
    "--check-config",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    expose_value=False,
    is_eager=True,
    callback=_check_config,
    help="Check a router's file and exit: print what it would run; 2 with file and line if it"
    " cannot be used.",
)
@click.option(
    "--listen",
    type=HOST_PORT,
    default=str(_LISTEN),
    help="HOST:PORT that clients connect to.",
)
@click.option(
    "--admin",
    type=HOST_PORT,
    default=str(_ADMIN),
    help="HOST:PORT of the admin port: /metrics, /readyz, /state, /requests/ID, /debug.",
)
@click.option(
    "--tls-dir",
    type=DIRECTORY,
    help="Directory of tls.crt and tls.key, for clients; reloaded when it changes. Default: clear"
    " text.",
)
@click.option(
    "--worker-sockets",
    type=WorkerSockets.parse,
    hidden=True,
    help="Set by the supervisor for its workers: the sockets they inherit.",
)
@click.option(
    "--peer-sockets",
    type=lambda text: tuple(map(int, text.split(","))),
    hidden=True,
    help="Set by the supervisor for its workers: where each of them listens for the others.",
)
def main(
    *,
    config: Path,
    listen: HostPort,
    admin: HostPort,
    tls_dir: Path | None,
    warm_up: bool,
    discovery: str,
    namespace: str | None,
    endpoint: str | None,
    plan_key_dir: Path | None,
    mutual_tls: Path | None,
    peers: tuple[HostPort, ...],
    peer_listen: HostPort,
    api_key_dir: Path | None,
    drain_delay: float,
    worker_sockets: WorkerSockets | None,
    peer_sockets: tuple[int, ...] | None,
    **flags: Any,
) -> None:
    """Route requests to vLLM engines by plain URL: prefill on one, decode on another.

    The decision is that of tandem-epp, the hand-off that of tandem-sidecar, in one process.
    """
    worker = None
    if worker_sockets is not None:
        worker_peers = WorkerPeers.inherited(worker_sockets.number, peer_sockets or ())
        worker = Worker(worker_sockets, worker_peers)
    own = {"listen": listen, "admin": admin, "secure_serving": bool(tls_dir), "cert_path": tls_dir}
    settings = _settings({**flags, **own})
    logs.configure(settings.log_format, settings.log_level)
    pods = None
    if discovery == "kubernetes":
        pods = _pods(namespace, endpoint, plan_key_dir, settings)
        _check_files(plan_key_dir, mutual_tls)
    elif namespace or endpoint or plan_key_dir or mutual_tls or peers:
        names = "--namespace, --endpoint, --plan-key-dir, --mutual-tls and --peers"
        raise click.UsageError(f"{names} need --discovery kubernetes")
    api_keys = _api_keys(api_key_dir)
    try:
        configuration = load(config, os.environ, lists_backends=pods is None)
    except DocumentError as err:
        fail(str(err), status=2)
    if worker is None:
        log_notices(configuration)
        if pods is None:
            log_ignored_storage(configuration, settings.connector)
    raise_descriptor_limit()
    collect_seldom()
    try:
        if settings.workers > 1 and worker is None:
            asyncio.run(supervise(settings, config, configuration, sys.argv[1:]))
        else:
            epp = replace(
                epp_settings(config, settings, warm_up=warm_up),
                pods=pods,
                plan_key_dir=plan_key_dir,
                mutual_tls=mutual_tls,
                peers=peers,
                peer_listen=peer_listen,
            )
            serving = run(
                settings,
                epp,
                config,
                configuration,
                worker,
                drain_delay=drain_delay,
                api_keys=api_keys,
            )
            uvloop.run(serving)
    except NotConfigured as err:
        fail(str(err), status=2)
    except (CannotListen, WorkerFailed) as err:
        fail(str(err))


def _pods(
    namespace: str | None, endpoint: str | None, plan_key_dir: Path | None, settings: Settings
) -> PodSelection:
    """The pods of a cluster that are the backends. Raises UsageError."""
    if plan_key_dir is None or not (namespace and endpoint):
        names = "--namespace, --endpoint and --plan-key-dir"
        raise click.UsageError(f"--discovery kubernetes needs {names}")
    if settings.workers > 1:
        raise click.UsageError("--discovery kubernetes has one worker: run more replicas instead")
    try:
        return selected_pods(namespace, endpoint, None, ports.SIDECAR)
    except ValueError as err:
        raise click.UsageError(str(err)) from err


def _check_files(plan_key_dir: Path | None, mutual_tls: Path | None) -> None:
    """End the process with a reason if plan keys or certificates cannot be used."""
    try:
        if plan_key_dir is not None and not load_keys(plan_key_dir):
            raise ValueError(f"--plan-key-dir: {plan_key_dir} has no key")
        if mutual_tls is not None:
            mutual_client(mutual_tls)
    except (ValueError, OSError) as err:
        fail(str(err), status=2)


def _api_keys(directory: Path | None) -> ApiKeys | None:
    """The clients' API keys; ends the process with a reason if one cannot be read."""
    try:
        return None if directory is None else ApiKeys(directory)
    except OSError as err:
        problem = f"{err.filename} cannot be read ({err.strerror})"
        fail(f"--api-key-dir: {problem}: let user {os.getuid()} read it, or remove it", status=2)


def _settings(flags: dict[str, Any]) -> Settings:
    """The settings of the data path: the given flags, and the sidecar's defaults for its others."""
    # Another prefix: variables of a sidecar in the same environment are not the router's.
    context = sidecar_command.make_context("tandem-router", [], auto_envvar_prefix=_PREFIX)
    return settings_from({**context.params, **flags})


def epp_settings(file: Path, settings: Settings, *, warm_up: bool) -> EppSettings:
    """The settings of the decision."""
    return EppSettings(
        config=file,
        max_body=settings.limits.body,
        history=settings.history,
        otlp_endpoint=settings.otlp_endpoint,
        warm_up=warm_up,
        log_level=settings.log_level,
    )


main.params += [flag for flag in sidecar_command.params if flag.name in SHARED_FLAGS]


if __name__ == "__main__":
    main()
