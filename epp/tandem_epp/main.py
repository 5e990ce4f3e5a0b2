"""`tandem-epp`: the flags, and what they may not say."""

import logging
import os
import re
from pathlib import Path
from typing import Final

import click
import uvloop

from tandem_contract import labels, ports
from tandem_contract.commandline import HOST_PORT, HostPort, command, fail
from tandem_contract.documents import DocumentError
from tandem_contract.otlp import traces_url
from tandem_contract.plan import load_keys
from tandem_kube.errors import NotConfigured

from .backends.pod_backend import PodSelection
from .configuration import load
from .service import Settings, serve

_NAME: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY: Final = rf"(?:[a-z0-9][-a-z0-9.]*/)?{_NAME}"
_REQUIREMENT: Final = (
    rf"(?:!?{_KEY}|{_KEY}\s*(?:=|==|!=)\s*(?:{_NAME})?|{_KEY}\s+(?:not)?in\s*\([^()]*\))"
)
_SELECTOR: Final = re.compile(rf"\s*{_REQUIREMENT}\s*(?:,\s*{_REQUIREMENT}\s*)*")
_LABEL: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")


def _collector(url: str) -> str:
    """`url`, when it is one. Raises BadParameter."""
    try:
        return traces_url(url) if url else url
    except ValueError as err:
        raise click.BadParameter(str(err)) from err


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
    help="Router configuration, YAML: disaggregated_serving, EndpointPickerConfig, and with "
    "--discovery static the backends. Read anew when it changes.",
)
@click.option(
    "--discovery",
    type=click.Choice(["static", "kubernetes"]),
    default="static",
    help="Where backends come from: the file's list, or a cluster's pods, kept current: of the "
    "cluster this runs in, else of the one in KUBECONFIG or ~/.kube/config.",
)
@click.option("--namespace", help="With --discovery kubernetes: whose pods.")
@click.option("--endpoint", help="With --discovery kubernetes: the pods of this routing endpoint.")
@click.option(
    "--selector",
    help="With --discovery kubernetes, instead of --endpoint: a label selector, for pods that the "
    "operator did not make.",
)
@click.option(
    "--target-port",
    type=click.IntRange(1, 65535),
    default=ports.SIDECAR,
    help=f"Serving port of pods without the annotation {labels.TARGET_PORT}.",
)
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
    "--history",
    type=click.IntRange(min=0),
    default=4096,
    help="Decisions kept for tandem trace; about 1 KB each.",
)
@click.option(
    "--otlp-endpoint",
    default="",
    metavar="URL",
    callback=lambda _ctx, _param, url: _collector(url),
    help="Where OpenTelemetry spans go, over HTTP; without it OTEL_EXPORTER_OTLP_ENDPOINT says.",
)
@click.option(
    "--warm-up/--no-warm-up",
    default=True,
    help="Have each pair of prefill and decode pods make a tiny hand-off when they first meet: the "
    "handshake is not a client's to wait for.",
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
    selector: str | None,
    target_port: int,
    peers: tuple[HostPort, ...],
    transport: str,
    workers: int,
    plan_key_dir: Path | None,
    max_body: int,
    history: int,
    otlp_endpoint: str,
    warm_up: bool,
    log_level: str,
) -> None:
    """Pick endpoints: answers Envoy's ext_proc with the pods that serve each request."""
    _refuse_what_is_to_come(transport, peers)
    static = discovery == "static"
    if static and (namespace or endpoint or selector):
        raise click.UsageError(
            "--namespace, --endpoint and --selector go with --discovery kubernetes"
        )
    pods = None if static else _selection(namespace, endpoint, selector, target_port)
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    settings = Settings(
        listen=listen,
        health=health,
        metrics=metrics,
        config=config,
        plan_key_dir=plan_key_dir,
        max_body=max_body,
        history=history,
        otlp_endpoint=otlp_endpoint,
        warm_up=warm_up,
        pods=pods,
    )
    try:
        loaded = load(config, os.environ, listed=static)
        keys = load_keys(plan_key_dir) if plan_key_dir else {}
    except (DocumentError, ValueError, OSError) as err:
        fail(str(err), status=2)
    try:
        uvloop.run(serve(settings, loaded, keys))
    except NotConfigured as err:
        fail(str(err), status=2)
    except OSError as err:
        fail(str(err))


def _selection(
    namespace: str | None, endpoint: str | None, selector: str | None, target_port: int
) -> PodSelection:
    """Which pods the flags mean. Raises UsageError."""
    if not namespace:
        raise click.UsageError("--discovery kubernetes needs --namespace")
    if bool(endpoint) == bool(selector):
        raise click.UsageError("--discovery kubernetes needs --endpoint or --selector, one of them")
    for flag, value in (("--namespace", namespace), ("--endpoint", endpoint)):
        if value and not _LABEL.fullmatch(value):
            raise click.UsageError(
                f"{flag}: {value!r} is no name: lower-case letters, digits and '-', at most 63"
            )
    if selector and not _SELECTOR.fullmatch(selector):
        raise click.UsageError(
            f"--selector: {selector!r} is no label selector: write app=vllm,tier in (a, b)"
        )
    wanted = labels.endpoint_label(endpoint) if endpoint else selector
    return PodSelection(namespace, wanted or "", target_port)


def _refuse_what_is_to_come(transport: str, peers: tuple[HostPort, ...]) -> None:
    if transport != "grpcio":
        raise click.UsageError("--transport h2 is to come: use grpcio")
    if peers:
        raise click.UsageError("--peers is to come: every replica serves for itself")
