"""The conventions of every Tandem command (DESIGN §8), on click.

Each flag has an environment variable (`TANDEM_SIDECAR_PREFILL_TIMEOUT`) and may stand in a YAML
file given with `--config`; `--help` shows defaults; usage errors exit with 2 and one line.
"""

import ipaddress
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import click

from .documents import DocumentError, load_documents
from .durations import format_duration, parse_duration

F = TypeVar("F", bound=Callable[..., Any])


class HostPort(NamedTuple):
    """An address to listen on or to connect to."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_host_port(text: str) -> HostPort:
    """`host:port` or `[v6]:port`. Raises ValueError saying what is wrong."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ValueError(f"{text!r} is not HOST:PORT with a port of 0 to 65535")
    if host.startswith("["):
        return HostPort(str(ipaddress.IPv6Address(host.strip("[]"))), int(port))
    return HostPort(host, int(port))


class DurationType(click.ParamType[float]):
    """A duration with a unit, in seconds once parsed."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        try:
            return parse_duration(str(value))
        except ValueError as err:
            self.fail(str(err), param, ctx)


class HostPortType(click.ParamType[HostPort]):
    """`HOST:PORT`."""

    name = "host:port"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> HostPort:
        if isinstance(value, HostPort):
            return value
        try:
            return parse_host_port(str(value))
        except ValueError as err:
            self.fail(str(err), param, ctx)


DURATION = DurationType()
HOST_PORT = HostPortType()


def _load_config(ctx: click.Context, _param: click.Parameter, file: Path | None) -> Path | None:
    """Values of the YAML file become the flags' defaults; a name no flag has is an error."""
    if file is None:
        return None
    try:
        documents = load_documents(file)
        if len(documents) != 1 or not isinstance(documents[0].data, dict):
            raise DocumentError(f"{file}:1: expected one YAML mapping of flag names to values")
        names = {flag.lstrip("-"): p.name for p in ctx.command.params for flag in p.opts}
        values = {}
        for key, value in documents[0].data.items():
            if (name := names.get(str(key))) is None:
                raise documents[0].error([key], "no such flag: see --help")
            values[name] = value
    except DocumentError as err:
        raise click.UsageError(str(err), ctx) from err
    ctx.default_map = {**(ctx.default_map or {}), **values}
    return file


def command(name: str, *, flags_file: bool = True) -> Callable[[F], click.Command]:
    """`click.command` with the house's options: `--version`, environment variables, `--config`.

    `flags_file=False` where `--config` is the command's own (the EPP's router configuration).
    """

    def decorate(function: F) -> click.Command:
        made = click.command(
            name,
            context_settings={
                "auto_envvar_prefix": name.upper().replace("-", "_"),
                "help_option_names": ["-h", "--help"],
                "show_default": True,
                "max_content_width": 100,
            },
        )(function)
        decorated: click.Command = click.version_option(version("tandem-llm"), prog_name=name)(made)
        return config_option(decorated) if flags_file else decorated

    return decorate


def config_option(made: click.Command) -> click.Command:
    """`--config FILE` on a command: YAML, flag name → value."""
    decorated: click.Command = click.option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        is_eager=True,
        expose_value=False,
        callback=_load_config,
        help="YAML file of flag names (without dashes in front) and values; flags win over it.",
    )(made)
    return decorated


def fail(message: str, *, status: int = 1) -> NoReturn:
    """End the process with one line on stderr; `status` 2 is for usage."""
    print(f"error: {message}", file=sys.stderr)  # noqa: T201 - the one place commands end with
    sys.exit(status)


__all__ = [
    "DURATION",
    "HOST_PORT",
    "HostPort",
    "command",
    "config_option",
    "fail",
    "format_duration",
    "parse_host_port",
]
