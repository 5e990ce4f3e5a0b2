"""Values of the command's flags: how they are read, and how defaults are shown."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import click

from tandem_contract import otlp
from tandem_contract.commandline import HostPort, format_duration, parse_host_port
from tandem_contract.connectors import ConnectorName
from tandem_contract.memory_limit import least_held_bytes
from tandem_http1.client import Limits

from . import connectors
from .security.route import AllowList, parse_allow

_UNITS: Final = {"": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


_LLMD_CONNECTORS: Final = {"nixlv2": ConnectorName.NIXL.value}
"""llm-d's names of connectors that have another one here."""

_UNSUPPORTED: Final = {
    "sglang": "engines of SGLang are not supported",
    "shared-storage": "KV is handed off through shared storage by LMCache only",
}
"""Why connectors of llm-d are refused."""


class Engine(NamedTuple):
    """The parsed value of `--engine`."""

    address: HostPort
    tls: bool


def duration_text(seconds: float) -> str:
    """A default as users write it: in seconds below five minutes, as in `120s`."""
    return f"{seconds:g}s" if seconds < 300 else format_duration(seconds)


def size_text(size: int) -> str:
    """A default in the largest unit that divides it."""
    unit = next(unit for unit, factor in reversed(_UNITS.items()) if size % factor == 0)
    return f"{size // _UNITS[unit]}{unit}"


def engine_url(_ctx: click.Context, _param: click.Parameter, value: str) -> Engine:
    scheme, _, rest = value.partition("://")
    try:
        if scheme not in ("http", "https"):
            raise ValueError("it does not begin with http:// or https://")
        return Engine(parse_host_port(rest.removesuffix("/")), scheme == "https")
    except ValueError as err:
        raise click.BadParameter(f"{value!r}: {err}: write http://HOST:PORT") from err


def allow_list(_ctx: click.Context, _param: click.Parameter, value: tuple[str, ...]) -> AllowList:
    try:
        return parse_allow(value)
    except ValueError as err:
        raise click.BadParameter(str(err)) from err


def url_path(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    """A path of the engine."""
    if not value.startswith("/"):
        raise click.BadParameter(f"{value!r} is not a path: begin with /")
    return value


def size(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    digits = value.rstrip("BGKMi")
    unit = value[len(digits) :]
    if not digits.isdecimal() or unit not in _UNITS or int(digits) == 0:
        raise click.BadParameter(
            f"{value!r} is not a size: write a number of bytes, or a number with KiB, MiB or GiB"
        )
    return int(digits) * _UNITS[unit]


def _optional_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    return None if value is None else size(ctx, param, value)


held_bytes = click.option(
    "--held-bytes",
    callback=_optional_size,
    default=Limits().held,
    help="Request bodies of all clients together, per worker; one beyond it is answered with 503."
    " At least twice --max-body. Default: a quarter of the container's memory, at most 512MiB,"
    " shared by the workers.",
)


def limits_from(flags: Mapping[str, Any]) -> Limits:
    """The limits on clients. Raises UsageError."""
    body, held = flags["max_body"], flags["held_bytes"]
    if held is not None and held < (least := least_held_bytes(body)):
        raise click.UsageError(f"--held-bytes must be at least twice --max-body: {least}")
    return Limits(body=body, held=held, connections=flags["max_connections"])


def connector(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    try:
        return connector_name(value)
    except connectors.UnknownConnector as err:
        raise click.BadParameter(str(err)) from err


def connector_name(value: str) -> str:
    """The connector that Tandem or llm-d calls `value`. Raises UnknownConnector."""
    if (reason := _UNSUPPORTED.get(value)) is not None:
        raise connectors.UnknownConnector(
            f"{value!r}: {reason}: use one of {', '.join(connectors.NAMES)}"
        )
    return connectors.check_name(_LLMD_CONNECTORS.get(value, value))


def collector_url(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    try:
        return value and otlp.traces_url(value)
    except ValueError as err:
        raise click.BadParameter(str(err)) from err
