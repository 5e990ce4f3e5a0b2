"""The command `tandem-sidecar`."""

import asyncio
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import uvloop

from tandem_contract import otlp, ports
from tandem_contract.commandline import (
    DURATION,
    HOST_PORT,
    HostPort,
    command,
    config_file,
    fail,
    parse_host_port,
)

from . import connectors
from .http.server import Limits
from .observability import logs
from .observability.logs import LogFormat
from .process.listen import CannotListen, WorkerSockets, raise_descriptor_limit
from .process.reload import BadConfiguration, Flags, Source
from .process.run import run
from .process.supervisor import WorkerFailed, supervise
from .security.credentials import BadCertificates, EngineTls, PlanKeys, Tls
from .security.route import AllowList, parse_allow
from .settings import Breaker, Policy, Settings

_FILE: Final = click.Path(path_type=Path, dir_okay=False, exists=True)
_UNITS = {"": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


class Engine(NamedTuple):
    """What `--engine` names."""

    address: HostPort
    tls: bool


def _engine(_ctx: click.Context, _param: click.Parameter, value: str) -> Engine:
    scheme, _, rest = value.partition("://")
    try:
        if scheme not in ("http", "https"):
            raise ValueError("it begins with neither http:// nor https://")
        return Engine(parse_host_port(rest.removesuffix("/")), scheme == "https")
    except ValueError as err:
        raise click.BadParameter(f"{value!r}: {err}: write http://HOST:PORT") from err


def _allow(_ctx: click.Context, _param: click.Parameter, value: tuple[str, ...]) -> AllowList:
    try:
        return parse_allow(value)
    except ValueError as err:
        raise click.BadParameter(str(err)) from err


def _size(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    digits = value.rstrip("BGKMi")
    unit = value[len(digits) :]
    if not digits.isdecimal() or unit not in _UNITS or int(digits) == 0:
        raise click.BadParameter(
            f"{value!r} is no size: write bytes, or a number and KiB, MiB, GiB"
        )
    return int(digits) * _UNITS[unit]


def _connector(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    try:
        return connectors.check(value)
    except connectors.UnknownConnector as err:
        raise click.BadParameter(str(err)) from err


def _collector(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    try:
        return value and otlp.traces_url(value)
    except ValueError as err:
        raise click.BadParameter(str(err)) from err


def _worker_sockets(
    _ctx: click.Context, _param: click.Parameter, value: str | None
) -> WorkerSockets | None:
    return None if value is None else WorkerSockets.parse(value)


def _plan_keys(directory: Path | None) -> PlanKeys:
    try:
        return PlanKeys(directory)
    except ValueError as err:
        raise click.UsageError(f"--plan-key-dir: {err}") from err
    except OSError as err:
        raise click.UsageError(f"--plan-key-dir {directory}: {err.strerror}") from err


def settings_from(flags: Flags) -> Settings:
    """The parsed flags as one value. Raises UsageError for flags that do not go together."""
    given = {
        name: value
        for name, value in flags.items()
        if name not in ("plan_key_dir", "worker_sockets")
    }
    engine: Engine = given.pop("engine")
    if (flags["tls_cert"] is None) != (flags["tls_key"] is None):
        raise click.UsageError("--tls-cert and --tls-key go together: give both")
    tls = Tls(
        engine.tls,
        given.pop("prefill_tls"),
        given.pop("tls_ca"),
        given.pop("tls_cert"),
        given.pop("tls_key"),
    )
    try:
        EngineTls(tls, engine.address)
    except BadCertificates as err:
        raise click.UsageError(str(err)) from err
    return Settings(
        engine=engine.address,
        policy=Policy(fallback_to_unified=given.pop("fallback_to_unified")),
        limits=Limits(body=given.pop("max_body"), connections=given.pop("max_connections")),
        allow=given.pop("prefill_allow"),
        breaker=Breaker(given.pop("breaker_failures"), given.pop("breaker_cooldown")),
        tls=tls,
        log_format=LogFormat(given.pop("log_format")),
        **given,
    )


@command("tandem-sidecar")
@click.option(
    "--listen",
    type=HOST_PORT,
    default=f"0.0.0.0:{ports.SIDECAR}",
    help="HOST:PORT clients (Envoy) connect to.",
)
@click.option(
    "--admin",
    type=HOST_PORT,
    default=f"0.0.0.0:{ports.SIDECAR_ADMIN}",
    help="HOST:PORT of /metrics, /readyz, /drain and /state.",
)
@click.option(
    "--engine",
    callback=_engine,
    default=f"http://127.0.0.1:{ports.ENGINE_DECODE}",
    help="URL of this pod's decode engine.",
)
@click.option(
    "--connector",
    callback=_connector,
    default=connectors.NAMES[0],
    help=f"How KV moves between the engines: {', '.join(connectors.NAMES)}.",
)
@click.option(
    "--prefill-timeout",
    type=DURATION,
    default="30s",
    help="For all prefill attempts of a request together.",
)
@click.option(
    "--prefill-grace",
    type=DURATION,
    default="1s",
    help="What a prefill that nobody waits for gets to end in; then it is aborted. Pull only.",
)
@click.option(
    "--kv-transfer-timeout",
    type=DURATION,
    default="10s",
    help="For a call that releases KV; the decode engine bounds the transfer itself.",
)
@click.option(
    "--push-timeout",
    type=DURATION,
    default="5m",
    help="With nixl-push: a decode without a first byte this long is computed without the KV.",
)
@click.option(
    "--fallback-to-unified/--no-fallback-to-unified",
    default=True,
    help="Serve without the split when it is impossible, or answer with an error.",
)
@click.option(
    "--retries", type=click.IntRange(0, 16), default=2, help="Prefill pods asked after the first."
)
@click.option(
    "--prefill-allow",
    callback=_allow,
    multiple=True,
    metavar="CIDR|HOST:PORT",
    help="Prefill pods that may be named without a signed plan; repeatable. Unused with keys.",
)
@click.option(
    "--plan-key-dir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Directory of plan keys, followed live; with keys nothing unsigned is trusted.",
)
@click.option("--pod-name", default="", help="Name in headers and metrics; empty: the address.")
@click.option(
    "--drain-timeout",
    type=DURATION,
    default="120s",
    help="What runs when a drain begins gets this long.",
)
@click.option(
    "--max-body", callback=_size, default="32MiB", help="Largest request body; more is a 413."
)
@click.option(
    "--max-connections",
    type=click.IntRange(1),
    default=8192,
    help="Clients connected at once, per worker; more wait in the backlog.",
)
@click.option(
    "--silence-timeout",
    type=DURATION,
    default="10s",
    help="An engine silent this long is asked for /health, and given up after as long again.",
)
@click.option(
    "--breaker-failures",
    type=click.IntRange(1),
    default=5,
    help="Failures in a row after which a prefill pod is left alone.",
)
@click.option(
    "--breaker-cooldown",
    type=DURATION,
    default="5s",
    help="How long, before one request probes it.",
)
@click.option(
    "--peer-port",
    type=click.IntRange(1, 65535),
    help="Port at which the connector asks prefill pods; default: mooncake 8998, offloading 7777.",
)
@click.option(
    "--tokenize-once/--no-tokenize-once",
    default=True,
    help="Hand the prefill's token ids of a chat to the decode engine.",
)
@click.option(
    "--prefill-tls/--no-prefill-tls", default=False, help="Prefill pods are asked over TLS."
)
@click.option("--tls-ca", type=_FILE, help="Authorities engines are checked by; followed live.")
@click.option("--tls-cert", type=_FILE, help="Our certificate, for engines that ask for one.")
@click.option("--tls-key", type=_FILE, help="Its key.")
@click.option("--workers", type=click.IntRange(1, 64), default=1, help="Processes that serve.")
@click.option(
    "--history",
    type=click.IntRange(0),
    default=2048,
    help="Ended requests kept for `tandem trace`, per worker.",
)
@click.option(
    "--log-format",
    type=click.Choice([f.value for f in LogFormat]),
    default=LogFormat.TEXT.value,
    help="How a log line is written.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="What is logged.",
)
@click.option(
    "--otlp-endpoint",
    callback=_collector,
    default="",
    metavar="URL",
    help="Where OpenTelemetry spans go, over HTTP; empty: nowhere.",
)
@click.option(
    "--worker-sockets",
    callback=_worker_sockets,
    hidden=True,
    help="Set by the supervisor for its workers: the sockets they inherit.",
)
@click.pass_context
def main(ctx: click.Context, /, **flags: Any) -> None:
    """The decode pod's proxy: prefill on a prefill pod, KV across, decode here."""
    settings = settings_from(flags)
    keys = _plan_keys(flags["plan_key_dir"])
    source = Source(config_file(ctx), flags, _read_again, _build)
    sockets: WorkerSockets | None = flags["worker_sockets"]
    logs.configure(settings.log_format, settings.log_level)
    raise_descriptor_limit()
    try:
        if settings.workers > 1 and sockets is None:
            asyncio.run(supervise(settings, source, sys.argv[1:]))
        else:
            uvloop.run(run(settings, keys, source, sockets))
    except (CannotListen, WorkerFailed) as err:
        fail(str(err))


def _read_again() -> Flags:
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
