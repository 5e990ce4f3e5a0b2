"""`tandem-epp`: the flags, and what they may not say."""

import logging
import os
from pathlib import Path

import click
import uvloop

from tandem_contract import ports
from tandem_contract.commandline import HOST_PORT, HostPort, command, fail
from tandem_contract.documents import DocumentError
from tandem_contract.plan import load_keys

from .discovery import load
from .service import Settings, serve


@command("tandem-epp", flags_file=False)
@click.option("--listen", type=HOST_PORT, default=f"0.0.0.0:{ports.EPP_GRPC}", help="gRPC.")
@click.option(
    "--health",
    type=HOST_PORT,
    default=f"0.0.0.0:{ports.EPP_HEALTH}",
    help="HTTP: /healthz and /readyz.",
)
@click.option(
    "--metrics", type=HOST_PORT, default=f"0.0.0.0:{ports.EPP_METRICS}", help="HTTP: /metrics."
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="Router configuration, YAML: backends, disaggregated_serving, EndpointPickerConfig. "
    "Read anew when it changes.",
)
@click.option(
    "--discovery",
    type=click.Choice(["static", "kubernetes"]),
    default="static",
    help="Where backends come from: static is the file's list; kubernetes is to come.",
)
@click.option("--namespace", help="With --discovery kubernetes: where to look.")
@click.option("--endpoint", help="With --discovery kubernetes: which pools to serve.")
@click.option("--peers", multiple=True, type=HOST_PORT, help="Other replicas; to come.")
@click.option(
    "--transport",
    type=click.Choice(["grpcio", "h2"]),
    default="grpcio",
    help="Which gRPC server; h2, our own, is to come.",
)
@click.option("--workers", type=click.IntRange(1, 1), default=1, help="Processes; more to come.")
@click.option(
    "--plan-key-dir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Keys to sign plans with, one file each; read anew when they change. Without it sidecars "
    "get prefill candidates and no plan.",
)
@click.option(
    "--max-body",
    type=click.IntRange(min=1),
    default=16 << 20,
    help="Bytes; a larger request body is answered with 413.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="debug has one line per decision; no level has prompts.",
)
def main(
    *,
    listen: HostPort,
    health: HostPort,
    metrics: HostPort,
    config: Path,
    discovery: str,
    namespace: str | None,
    endpoint: str | None,
    peers: tuple[HostPort, ...],
    transport: str,
    workers: int,
    plan_key_dir: Path | None,
    max_body: int,
    log_level: str,
) -> None:
    """Pick endpoints: answers Envoy's ext_proc with the pods that serve each request."""
    _refuse_what_is_to_come(discovery, transport, namespace or endpoint or peers)
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    settings = Settings(listen, health, metrics, config, plan_key_dir, max_body)
    try:
        loaded = load(config, os.environ)
        keys = load_keys(plan_key_dir) if plan_key_dir else {}
    except (DocumentError, ValueError, OSError) as err:
        fail(str(err), status=2)
    try:
        uvloop.run(serve(settings, loaded, keys))
    except OSError as err:
        fail(str(err))


def _refuse_what_is_to_come(discovery: str, transport: str, cluster_flags: object) -> None:
    if discovery != "static":
        raise click.UsageError("--discovery kubernetes is to come: use static with --config FILE")
    if transport != "grpcio":
        raise click.UsageError("--transport h2 is to come: use grpcio")
    if cluster_flags:
        raise click.UsageError("--namespace, --endpoint and --peers are for kubernetes, to come")
