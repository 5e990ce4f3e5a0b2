"""`tandem-epp`: the flags, and which of them exclude each other."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click
import uvloop

from tandem_contract import labels, ports
from tandem_contract.api_paths import ApiPaths
from tandem_contract.commandline import DIRECTORY, HOST_PORT, api_paths, command, fail, settings_of
from tandem_contract.documents import DocumentError
from tandem_contract.memory import collect_seldom, reuse_large_blocks
from tandem_contract.memory_limit import least_held_bytes
from tandem_contract.otlp import traces_url
from tandem_contract.plan import load_keys
from tandem_kube.errors import NotConfigured

from .backends.selection import checked_subdomain, selected_pods
from .flags import deciding_flags
from .llmd.options import EppCommand, given, llmd_options, log_treatments
from .llmd.plugins.explain import explain
from .llmd.plugins.explain_flow import gateway_line
from .llmd.values import selects_pods, with_values
from .process import logs
from .process.compiled import is_compiled
from .process.configuration import load, load_text, log_notices, log_unsent_settings
from .process.service import serve
from .server.ext_proc.interface import REPLY_SECONDS
from .server.http2.tls import TlsSettings
from .settings import Settings

_log: Final = logging.getLogger(__name__)


def _collector(url: str) -> str:
    """`url` if it can be a collector's. Raises BadParameter."""
    try:
        return traces_url(url) if url else url
    except ValueError as err:
        raise click.BadParameter(str(err)) from err


def _check_config(context: click.Context, _param: click.Parameter, file: Path | None) -> None:
    """Print what `file` would run, and exit: 2 if it cannot be used."""
    if file is None:
        return
    try:
        configuration = load(file, os.environ, lists_backends=None)
    except DocumentError as err:
        fail(str(err), status=2)
    click.echo(explain(configuration.routing, configuration.router.health_checks))
    if line := gateway_line(configuration.routing.scheduling.flow, REPLY_SECONDS):
        click.echo(line)
    context.exit()


@command("tandem-epp", flags_file=False, cls=EppCommand)
@click.option(
    "--listen",
    type=HOST_PORT,
    default=str(Settings.listen),
    help="Address of the gRPC server that Envoy connects to.",
)
@click.option(
    "--ext-proc-server",
    type=click.Choice(["http2", "grpcio"]),
    default=Settings.ext_proc_server,
    help="Implementation of that server: this project's own on HTTP/2, which takes less CPU and "
    "also answers probes (gRPC health, /healthz, /readyz), or grpcio.",
)
@click.option(
    "--tls-dir",
    type=DIRECTORY,
    help="With --ext-proc-server http2: directory of tls.crt and tls.key, as Kubernetes mounts a "
    "TLS secret; reloaded when it changes. Default: clear text.",
)
@click.option(
    "--accept-tls",
    is_flag=True,
    help="Accept TLS beside clear text on --listen, by the certificate of --tls-dir or a "
    "self-signed one: for gateways that call an EPP by TLS only, beside others.",
)
@click.option(
    "--health",
    type=HOST_PORT,
    default=str(Settings.health),
    help="HTTP address of /healthz and /readyz.",
)
@click.option(
    "--metrics",
    type=HOST_PORT,
    default=str(Settings.metrics),
    help="HTTP address of /metrics, /requests/ID, /debug/decisions and /debug/pods.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Required. Router configuration in YAML: disaggregated_serving, EndpointPickerConfig, and "
    "with --discovery static the backends. Reloaded when it changes.",
)
@click.option(
    "--check-config",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    expose_value=False,
    is_eager=True,
    callback=_check_config,
    help="Check a configuration, such as llm-d's, and exit: print its profiles, decider and index, "
    "and what of it has no effect and why; 2 with file and line if it cannot be used.",
)
@deciding_flags
@click.option(
    "--selector",
    help="With --discovery kubernetes, instead of --endpoint: select pods by label, for pods that "
    "the operator did not create.",
)
@click.option(
    "--inference-pool",
    default=Settings.inference_pool,
    metavar="NAME",
    help="With --endpoint or --selector: the InferencePool of the namespace whose "
    "InferenceModelRewrite and InferenceObjective objects apply to the requests.",
)
@click.option(
    "--target-port",
    type=click.IntRange(1, 65535),
    default=ports.SIDECAR,
    help=f"Serving port of pods without the annotation {labels.TARGET_PORT}.",
)
@click.option(
    "--api-path",
    callback=api_paths,
    multiple=True,
    default=Settings.api_path,
    metavar="PATH",
    help="A path of the engines that clients may request, beside the inference API's and the "
    "api_paths in --config; repeatable. * stands for one segment, /** at the end for everything "
    "below.",
)
@click.option(
    "--max-body",
    type=click.IntRange(min=1),
    default=Settings.max_body,
    help="Bytes; a larger request body is answered with 413.",
)
@click.option(
    "--held-bytes",
    type=click.IntRange(min=1),
    default=Settings.held_bytes,
    help="Bytes held for all clients together, mostly request bodies; beyond it they are answered "
    "with 503. At least twice --max-body. Default: a quarter of the container's memory, at most "
    "512 MiB.",
)
@click.option(
    "--body-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=Settings.body_timeout,
    help="Seconds for a request's body to arrive; then it is answered with 408.",
)
@click.option(
    "--history",
    type=click.IntRange(min=0),
    default=Settings.history,
    help="Number of decisions kept for tandem trace, about 1 KB each.",
)
@click.option(
    "--otlp-endpoint",
    default=Settings.otlp_endpoint,
    metavar="URL",
    callback=lambda _ctx, _param, url: _collector(url),
    help="OpenTelemetry collector that spans are sent to: by gRPC on port 4317, else over HTTP. "
    "Default: OTEL_EXPORTER_OTLP_ENDPOINT.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default=Settings.log_level,
    help="debug logs one line per decision; no level logs prompts.",
)
@llmd_options
@click.pass_context
def main(context: click.Context, /, **flags: Any) -> None:
    """Pick endpoints: answers Envoy's ext_proc with the pods that serve each request.

    The flags of llm-d-router's EPP are accepted, too: docs/reference/llm-d.md lists them.
    With --pool-name or --endpoint-selector its defaults hold, such as TLS.
    """
    llmd = given(context)
    settings = _as_llmd(context, settings_from(flags), llmd)
    logs.configure(settings.log_level, as_json=settings.log_json)
    log_treatments(context)
    for word in context.args:
        _log.warning("%r is ignored, as llm-d's EPP does: write --flag=value", word)
    _serve(settings)


def settings_from(flags: Mapping[str, Any]) -> Settings:
    """Make settings of parsed flags. Raises UsageError for flags that contradict each other."""
    is_static = flags["discovery"] == "static"
    namespace, endpoint, selector = flags["namespace"], flags["endpoint"], flags["selector"]
    pool: str = flags["inference_pool"]
    if is_static and (namespace or endpoint or selector or pool):
        names = "--namespace, --endpoint, --selector and --inference-pool"
        raise click.UsageError(f"{names} need --discovery kubernetes")
    held, least = flags["held_bytes"], least_held_bytes(flags["max_body"])
    if held is not None and held < least:
        raise click.UsageError(f"--held-bytes must be at least twice --max-body: {least}")
    try:
        if pool:
            checked_subdomain("--inference-pool", pool)
        pods = None
        if not is_static:
            pods = selected_pods(namespace, endpoint, selector, flags["target_port"])
    except ValueError as err:
        raise click.UsageError(str(err)) from err
    tls = _tls(flags["tls_dir"], flags["mutual_tls"], clear=flags["accept_tls"])
    api: ApiPaths = flags["api_path"]
    return settings_of(Settings, flags, tls=tls, pods=pods, api_path=api.added)


def _tls(own: Path | None, mutual: Path | None, *, clear: bool) -> TlsSettings | None:
    if mutual and (own or clear):
        raise click.UsageError("--mutual-tls excludes --tls-dir and --accept-tls")
    if not (mutual or own or clear):
        return None
    return TlsSettings(directory=mutual or own, is_mutual=bool(mutual), allows_clear_text=clear)


def _as_llmd(context: click.Context, settings: Settings, llmd: Mapping[str, Any]) -> Settings:
    """`settings` as llm-d's flags change them. Raises UsageError."""
    try:
        is_llmd = selects_pods(llmd)
        changed = with_values(settings, llmd, os.environ)
    except ValueError as err:
        raise click.UsageError(str(err)) from err
    if is_llmd and settings.pods is not None:
        raise click.UsageError("--pool-name and --endpoint-selector exclude --discovery kubernetes")
    if context.args and not is_llmd:
        raise click.UsageError(f"Got unexpected extra argument ({context.args[0]})")
    if not (is_llmd or changed.config or changed.config_text):
        raise click.UsageError("Missing option '--config'.")
    if changed.tls is not None and changed.ext_proc_server != "http2":
        raise click.UsageError("TLS needs --ext-proc-server http2")
    return changed


def _serve(settings: Settings) -> None:
    """Run the EPP; exits with 1 or 2 and a reason if it cannot."""
    file, directory, lists = settings.config, settings.plan_key_dir, settings.lists_backends
    gates = settings.feature_gates
    try:
        configuration = (
            load(file, os.environ, lists_backends=lists, gates=gates)
            if file is not None
            else load_text(settings.config_text, os.environ, lists_backends=lists, gates=gates)
        )
        plan_keys = load_keys(directory) if directory else {}
    except (DocumentError, ValueError, OSError) as err:
        fail(str(err), status=2)
    log_notices(configuration)
    if directory is None:
        log_unsent_settings(configuration)
    _log.info("the request path is %s", "compiled" if is_compiled() else "not compiled")
    reuse_large_blocks()
    collect_seldom()
    try:
        uvloop.run(serve(settings, configuration, plan_keys))
    except NotConfigured as err:
        fail(str(err), status=2)
    except OSError as err:
        fail(str(err))
