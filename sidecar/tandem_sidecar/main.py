"""The command `tandem-sidecar`: its flags, and the settings made of them."""

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any, Final

import click
import uvloop

from tandem_contract.commandline import (
    DIRECTORY,
    DURATION,
    HOST_PORT,
    api_paths,
    command,
    config_file,
    fail,
    settings_of,
)
from tandem_contract.connections import raise_descriptor_limit
from tandem_contract.memory import collect_seldom
from tandem_contract.plan_keys import PlanKeys

from . import connectors, llmd_command
from .flag_values import (
    Engine,
    allow_list,
    collector_url,
    connector,
    duration_text,
    engine_url,
    held_bytes,
    limits_from,
    size,
    size_text,
    url_path,
)
from .observability import logs
from .observability.logs import LogFormat
from .process.listen import CannotListen, WorkerSockets
from .process.reload import BadConfiguration, Flags, Source
from .process.run import run
from .process.supervisor import WorkerFailed, supervise
from .security.credentials import BadCertificates, EngineTls, ListenTls, Tls, listen_tls
from .settings import Breaker, HealthChecks, Policy, Settings

log = logging.getLogger(__name__)

_FILE: Final = click.Path(path_type=Path, dir_okay=False, exists=True)
_DEFAULTS: Final = Settings()


def _plan_keys(directory: Path | None) -> PlanKeys:
    try:
        return PlanKeys(directory)
    except ValueError as err:
        raise click.UsageError(f"--plan-key-dir: {err}") from err
    except OSError as err:
        raise click.UsageError(f"--plan-key-dir {directory}: {err.strerror}") from err


def settings_from(flags: Flags) -> Settings:
    """Make settings of parsed flags. Raises UsageError for flags that contradict each other."""
    engine: Engine = flags["engine"]
    if (flags["tls_cert"] is None) != (flags["tls_key"] is None):
        raise click.UsageError("--tls-cert and --tls-key belong together: give both or none")
    tls = Tls(
        engine=engine.tls,
        prefill=flags["prefill_tls"],
        ca=flags["tls_ca"],
        unverified_engine=flags["unverified_engine"],
        unverified_prefill=flags["unverified_prefill"],
        certificate=flags["tls_cert"],
        key=flags["tls_key"],
    )
    for_clients = None
    if flags["secure_serving"]:
        for_clients = ListenTls(
            flags["cert_path"], flags["tls_min_version"], flags["tls_cipher_suites"]
        )
    if flags["mutual_tls"] is not None:
        if for_clients is not None:
            raise click.UsageError("--mutual-tls and --secure-serving exclude each other")
        for_clients = ListenTls(flags["mutual_tls"], is_mutual=True)
    try:
        # Only to report unusable files as a usage error; every process reads them itself.
        EngineTls(tls, engine.address)
        listen_tls(for_clients)
    except BadCertificates as err:
        raise click.UsageError(str(err)) from err
    return settings_of(
        Settings,
        flags,
        engine=engine.address,
        policy=Policy(fallback_to_unified=flags["fallback_to_unified"]),
        limits=limits_from(flags),
        allow=flags["prefill_allow"],
        api=flags["api_path"],
        breaker=Breaker(flags["breaker_failures"], flags["breaker_cooldown"]),
        health=HealthChecks(
            flags["health_path"], flags["health_interval"], flags["health_timeout"]
        ),
        tls=tls,
        listen_tls=for_clients,
        log_format=LogFormat(flags["log_format"]),
    )


@command("tandem-sidecar", cls=llmd_command.SidecarCommand)
@click.option(
    "--listen",
    type=HOST_PORT,
    default=str(_DEFAULTS.listen),
    help="HOST:PORT that clients (Envoy) connect to.",
)
@click.option(
    "--mutual-tls",
    type=DIRECTORY,
    metavar="DIR",
    help="Directory of ca.crt, tls.crt and tls.key, read again when it changes: serve TLS, only to"
    " clients with a certificate of these authorities. [default: clear text]",
)
@click.option(
    "--admin",
    type=HOST_PORT,
    default=str(_DEFAULTS.admin),
    help="HOST:PORT of the admin port: /metrics, /readyz, /state, /requests/ID.",
)
@click.option(
    "--engine",
    callback=engine_url,
    default=f"http://{_DEFAULTS.engine}",
    help="URL of this pod's decode engine.",
)
@click.option(
    "--connector",
    callback=connector,
    default=_DEFAULTS.connector,
    help=f"How KV moves from the prefill to the decode engine: {', '.join(connectors.NAMES)}.",
)
@click.option(
    "--prefill-timeout",
    type=DURATION,
    default=duration_text(_DEFAULTS.prefill_timeout),
    help="Time limit of all prefill attempts of a request together, unless its signed plan states "
    "another.",
)
@click.option(
    "--prefill-grace",
    type=DURATION,
    default=duration_text(_DEFAULTS.prefill_grace),
    help="Time in which a prefill may finish after its client left; then it is aborted. Pull only.",
)
@click.option(
    "--kv-transfer-timeout",
    type=DURATION,
    default=duration_text(_DEFAULTS.kv_transfer_timeout),
    help="Time limit of a KV transfer, where the engine's metrics tell that it has not ended, and "
    "of a request that releases KV, unless the signed plan of the request states another.",
)
@click.option(
    "--push-timeout",
    type=DURATION,
    default=duration_text(_DEFAULTS.push_timeout),
    help="With nixl-push: a decode without output after this time is run without the KV.",
)
@click.option(
    "--fallback-to-unified/--no-fallback-to-unified",
    default=_DEFAULTS.policy.fallback_to_unified,
    help="Without a hand-off, serve the request on the decode engine, or answer with an error.",
)
@click.option(
    "--retries",
    type=click.IntRange(0, 16),
    default=_DEFAULTS.retries,
    help="Prefill pods tried after the first one failed.",
)
@click.option(
    "--prefill-allow",
    callback=allow_list,
    multiple=True,
    metavar="CIDR|HOST:PORT",
    help="Prefill pods that may be named without a signed plan; repeatable. Ignored with keys.",
)
@click.option(
    "--api-path",
    callback=api_paths,
    multiple=True,
    metavar="PATH",
    help="A path of the engine that clients may request, beside the inference API's; repeatable.",
)
@click.option(
    "--plan-key-dir",
    type=DIRECTORY,
    help="Directory of plan keys, reloaded when it changes; with keys only signed plans count.",
)
@click.option(
    "--pod-name",
    default=_DEFAULTS.pod_name,
    help="This pod's name in headers and metrics; empty: its address.",
)
@click.option(
    "--drain-timeout",
    type=DURATION,
    default=duration_text(_DEFAULTS.drain_timeout),
    help="Time that running requests get when a drain begins.",
)
@click.option(
    "--max-body",
    callback=size,
    default=size_text(_DEFAULTS.limits.body),
    help="Largest request body; a larger one is answered with 413.",
)
@held_bytes
@click.option(
    "--max-connections",
    type=click.IntRange(1),
    default=_DEFAULTS.limits.connections,
    help="Clients connected at once, per worker; more wait in the kernel's backlog.",
)
@click.option(
    "--silence-timeout",
    type=DURATION,
    default=duration_text(_DEFAULTS.silence_timeout),
    help="Silence of an engine after which /health is requested; after as long again it is hung.",
)
@click.option(
    "--health-path",
    callback=url_path,
    default=_DEFAULTS.health.path,
    help="Path of the engine that answers 200 while it is healthy; the pod is ready by it.",
)
@click.option(
    "--health-interval",
    type=DURATION,
    default=duration_text(_DEFAULTS.health.interval),
    help="Time between two checks of a healthy engine.",
)
@click.option(
    "--health-timeout",
    type=DURATION,
    default=duration_text(_DEFAULTS.health.timeout),
    help="Time for an answer, after which the engine counts as unhealthy.",
)
@click.option(
    "--max-model-len",
    type=click.IntRange(1),
    help="Tokens of the longest prompt, for an engine whose /v1/models needs an API key: texts that"
    " cannot fit are refused. [default: as the engine lists it]",
)
@click.option(
    "--breaker-failures",
    type=click.IntRange(1),
    default=_DEFAULTS.breaker.failures,
    help="Failures in a row that open a prefill pod's circuit breaker.",
)
@click.option(
    "--breaker-cooldown",
    type=DURATION,
    default=duration_text(_DEFAULTS.breaker.cooldown),
    help="Time that a circuit breaker stays open before one request probes the pod.",
)
@click.option(
    "--peer-port",
    type=click.IntRange(1, 65535),
    help="Port for queries to prefill pods; default: mooncake 8998, offloading 7777.",
)
@click.option(
    "--stream-kv/--no-stream-kv",
    default=_DEFAULTS.stream_kv,
    help="Send both legs at once where both engines can: KV moves while the prefill computes.",
)
@click.option(
    "--resume",
    is_flag=False,
    flag_value="auto",
    type=click.Choice(["auto", "always", "never"]),
    default="never",
    callback=lambda _ctx, _param, mode: mode != "never",
    help="Whether a stream goes on at another decode engine when its own fails or drains, with the"
    " same tokens, where that is exact, and otherwise ends with an error"
    " (docs/understand/resume.md). The router chooses the engine; a sidecar takes the pod that the"
    " plan names as an alternate. auto, also without a word: each stream shows whether its engine"
    " gives token ids, so it is the same as always. never: unless the router's file, or the plan,"
    " asks for it.",
)
@click.option(
    "--resume-max-regeneration",
    type=DURATION,
    default=duration_text(_DEFAULTS.resume_max_regeneration),
    help="With --resume: the longest time for which another engine generates again what was sent of"
    " a stream that it cannot continue by token ids; beyond it the stream ends with an error.",
)
@click.option(
    "--tokenize-once/--no-tokenize-once",
    default=_DEFAULTS.tokenize_once,
    help="Pass the token ids of a chat from the prefill's answer to the decode engine.",
)
@click.option(
    "--prefill-tls/--no-prefill-tls",
    default=_DEFAULTS.tls.prefill,
    help="Connect to prefill pods over TLS.",
)
@click.option(
    "--tls-ca",
    type=_FILE,
    help="Authorities that engines' certificates are verified against; reloaded when it changes.",
)
@click.option("--tls-cert", type=_FILE, help="Client certificate, for engines that require one.")
@click.option("--tls-key", type=_FILE, help="Private key of the client certificate.")
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=_DEFAULTS.workers,
    help="Processes that serve.",
)
@click.option(
    "--history",
    type=click.IntRange(0),
    default=_DEFAULTS.history,
    help="Ended requests remembered for `tandem trace`, per worker.",
)
@click.option(
    "--log-format",
    type=click.Choice([f.value for f in LogFormat]),
    default=_DEFAULTS.log_format.value,
    help="Format of log lines.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default=_DEFAULTS.log_level,
    help="Least severe level that is logged.",
)
@click.option(
    "--otlp-endpoint",
    callback=collector_url,
    default=_DEFAULTS.otlp_endpoint,
    metavar="URL",
    help="OpenTelemetry collector that spans are sent to: by gRPC on port 4317, else over HTTP; "
    "empty: see OTEL_* variables.",
)
# Set by the supervisor for its workers: the sockets and the table of plans that they share.
@click.option("--worker-sockets", type=WorkerSockets.parse, hidden=True)
@click.option("--used-plans", type=int, hidden=True)
@llmd_command.options
@click.pass_context
def main(ctx: click.Context, /, **flags: Any) -> None:
    """Proxy of a decode pod: prefills on a prefill pod, decodes on this pod's engine.

    The flags of llm-d's sidecar work, too: docs/reference/llm-d.md lists them.
    """
    settings = settings_from(flags)
    keys = _plan_keys(flags["plan_key_dir"])
    source = Source(config_file(ctx), flags, _parse_again, _build)
    sockets: WorkerSockets | None = flags["worker_sockets"]
    logs.configure(settings.log_format, settings.log_level)
    for line in llmd_command.notes(ctx) if sockets is None else ():
        log.warning("%s", line)
    raise_descriptor_limit()
    try:
        # A worker has the same flags, and `sockets`: it must not start workers of its own.
        if settings.workers > 1 and sockets is None:
            asyncio.run(supervise(settings, source, sys.argv[1:]))
        else:
            collect_seldom()
            uvloop.run(run(settings, keys, source, sockets))
    except (CannotListen, WorkerFailed) as err:
        fail(str(err))


def _parse_again() -> Flags:
    try:
        return main.make_context("tandem-sidecar", sys.argv[1:]).params
    except click.ClickException as err:
        raise BadConfiguration(err.format_message()) from err


def _build(flags: Flags) -> Settings:
    try:
        return settings_from(flags)
    except click.ClickException as err:
        raise BadConfiguration(err.format_message()) from err


if __name__ == "__main__":
    main()
