"""The command `tandem-sidecar`."""

import logging
from pathlib import Path

import click
import uvloop

from tandem_contract import ports
from tandem_contract.commandline import (
    DURATION,
    HOST_PORT,
    HostPort,
    command,
    fail,
    parse_host_port,
)

from .connectors import nixl
from .handoff.machine import Policy
from .http.server import Limits
from .process.run import CannotListen, run
from .settings import Settings
from .trust.plan_keys import PlanKeys
from .trust.route import AllowList, parse_allow

_COMING = ("nixl-push", "offloading", "multi", "storage", "mooncake", "lmcache", "p2p-nccl")
_UNITS = {"": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


def _engine(_ctx: click.Context, _param: click.Parameter, value: str) -> HostPort:
    scheme, _, rest = value.partition("://")
    if scheme == "https":
        raise click.BadParameter(f"{value!r}: TLS to the engine is not supported yet: use http")
    try:
        if scheme != "http":
            raise ValueError("it does not begin with http://")
        return parse_host_port(rest.removesuffix("/"))
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


def _workers(_ctx: click.Context, _param: click.Parameter, value: int) -> int:
    if value != 1:
        raise click.BadParameter("only 1 is supported yet: more sidecars take more decode pods")
    return value


def _connector(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    if value == nixl.NAME:
        return value
    if value in _COMING:
        raise click.BadParameter(f"{value!r} is not supported yet: only {nixl.NAME} is")
    raise click.BadParameter(f"no connector {value!r}: {nixl.NAME}; coming: {', '.join(_COMING)}")


def _keys(_ctx: click.Context, _param: click.Parameter, value: Path | None) -> PlanKeys:
    try:
        return PlanKeys(value)
    except ValueError as err:
        raise click.BadParameter(str(err)) from err
    except OSError as err:
        raise click.BadParameter(f"{value}: cannot read it: {err.strerror}") from err


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
    default=nixl.NAME,
    help="How KV moves between the engines.",
)
@click.option(
    "--prefill-timeout",
    type=DURATION,
    default="30s",
    help="For all prefill attempts of a request together.",
)
@click.option(
    "--kv-transfer-timeout",
    type=DURATION,
    default="10s",
    help="For a call that releases KV; the decode engine bounds the transfer itself.",
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
    "keys",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    callback=_keys,
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
@click.option("--workers", type=int, callback=_workers, default=1, help="Processes.")
def main(
    *,
    listen: HostPort,
    admin: HostPort,
    engine: HostPort,
    connector: str,
    prefill_timeout: float,
    kv_transfer_timeout: float,
    fallback_to_unified: bool,
    retries: int,
    prefill_allow: AllowList,
    keys: PlanKeys,
    pod_name: str,
    drain_timeout: float,
    max_body: int,
    workers: int,
) -> None:
    """The decode pod's proxy: prefill on a prefill pod, KV across, decode here."""
    settings = Settings(
        listen=listen,
        admin=admin,
        engine=engine,
        policy=Policy(fallback_to_unified=fallback_to_unified),
        limits=Limits(body=max_body),
        allow=prefill_allow,
        pod_name=pod_name,
        prefill_timeout=prefill_timeout,
        kv_transfer_timeout=kv_transfer_timeout,
        drain_timeout=drain_timeout,
        retries=retries,
    )
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        uvloop.run(run(settings, keys))
    except CannotListen as err:
        fail(str(err))


if __name__ == "__main__":
    main()
