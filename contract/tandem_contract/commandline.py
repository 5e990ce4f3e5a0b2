"""Command-line conventions that all Tandem commands share, on top of click.

Each flag has an environment variable (`TANDEM_SIDECAR_PREFILL_TIMEOUT`) and may be set in a YAML
file given with `--config`. `--help` shows defaults. A usage error prints one line and exits with 2.
"""

import ipaddress
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

import click
import msgspec

from .api_paths import ApiPaths
from .documents import Document, DocumentError, load_documents
from .durations import format_duration, parse_duration

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S")

_HOST_PORT: Final = re.compile(
    r"(?:\[(?P<address>[^\[\]]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>\d{1,5})", re.ASCII
)
_CONFIG: Final = "tandem_contract.commandline.config"


class HostPort(NamedTuple):
    """An address to listen on or to connect to."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_host_port(text: str) -> HostPort:
    """`host:port` or `[address]:port`. Raises ValueError saying what is wrong.

    Brackets are also allowed around an IPv4 address: a template such as `[$(POD_IP)]:8000` cannot
    know the address family.
    """
    match = _HOST_PORT.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT with a port of 0 to 65535")
    if match["address"]:
        return HostPort(str(ipaddress.ip_address(match["address"])), int(match["port"]))
    return HostPort(match["host"], int(match["port"]))


# The sidecar asks for each hand-off, always for the same few prefill pods.
@lru_cache(maxsize=1024)
def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own for every machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def api_paths(_ctx: click.Context, _param: click.Parameter, value: tuple[str, ...]) -> ApiPaths:
    """Callback of a repeatable `--api-path`. Raises BadParameter."""
    try:
        return ApiPaths(value)
    except ValueError as err:
        raise click.BadParameter(str(err)) from err


class DurationType(click.ParamType[float]):
    """A duration with a unit (`30s`), parsed to seconds."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        # Defaults are seconds already; click passes them through this method, too.
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
DIRECTORY: Final = click.Path(path_type=Path, file_okay=False, exists=True)
"""A directory that exists."""


def load_flags_file(ctx: click.Context, _param: click.Parameter, file: Path | None) -> Path | None:
    """Use the values of the YAML file as the flags' defaults. An unknown flag name is an error."""
    if file is None:
        return None
    try:
        load_flags(ctx, load_documents(file), str(file))
    except DocumentError as err:
        raise click.UsageError(str(err), ctx) from err
    ctx.meta[_CONFIG] = file
    return file


def load_flags(ctx: click.Context, documents: Sequence[Document], source: str) -> None:
    """Use the one mapping in `documents` as the flags' defaults. Raises DocumentError."""
    if len(documents) != 1 or not isinstance(documents[0].data, dict):
        raise DocumentError(f"{source}:1: expected one YAML mapping of flag names to values")
    # --help, --version and --config are not passed to the command: no flags here.
    flags = {
        name.lstrip("-"): flag
        for flag in ctx.command.params
        if flag.expose_value
        for name in flag.opts
    }
    values = {}
    for key, value in documents[0].data.items():
        if (flag := flags.get(str(key))) is None:
            raise documents[0].error([key], "no such flag: see --help")
        values[flag.name] = _flag_value(ctx, flag, documents[0], key, value)
    # As defaults, so that the command line and the environment win over the file.
    ctx.default_map = {**(ctx.default_map or {}), **values}


def config_file(ctx: click.Context) -> Path | None:
    """The path given with `--config`, for a process that reloads the file when it changes."""
    file: Path | None = ctx.meta.get(_CONFIG)
    return file


def _flag_value(
    ctx: click.Context, flag: click.Parameter, document: Document, key: str | int, value: Any
) -> Any:
    """The value in command-line form. Raises DocumentError when the flag does not accept it."""
    # A list in YAML is the repeated flag of the command line.
    if flag.multiple != isinstance(value, list):
        raise document.error(
            [key], "expected a list" if flag.multiple else "expected one value, this is a list"
        )
    if value is None:
        raise document.error([key], "has no value: give it one or leave it out")
    arguments = [_as_argument(v) for v in value] if flag.multiple else _as_argument(value)
    try:
        # Converts the value only to check it: the error then has the file's line.
        flag.process_value(ctx, arguments)
    except click.BadParameter as err:
        raise document.error([key], err.message) from err
    return arguments


def _as_argument(value: Any) -> Any:
    """`value` as text; booleans stay, and a mapping becomes JSON, as vLLM's flags take it."""
    if isinstance(value, bool):
        return value
    if isinstance(value, dict | list):
        return msgspec.json.encode(value).decode()
    return str(value)


def command(
    name: str, *, flags_file: bool = True, cls: type[click.Command] = click.Command
) -> Callable[[F], click.Command]:
    """`click.command` with the shared options: `--version`, environment variables, `--config`.

    `flags_file=False` for a command whose `--config` means something else (the EPP's router file).
    `cls`: how it parses its arguments.
    """

    def decorate(function: F) -> click.Command:
        command = click.command(
            name,
            cls=cls,
            context_settings={
                "auto_envvar_prefix": name.upper().replace("-", "_"),
                "help_option_names": ["-h", "--help"],
                "show_default": True,
                "max_content_width": 100,
            },
        )(function)
        decorated: click.Command = click.version_option(version("tandem-llm"), prog_name=name)(
            command
        )
        return config_option(decorated) if flags_file else decorated

    return decorate


def config_option(made: click.Command) -> click.Command:
    """`--config FILE` on a command: YAML, flag name → value."""
    decorated: click.Command = click.option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        # Before the other options are parsed, whose defaults it sets.
        is_eager=True,
        expose_value=False,
        callback=load_flags_file,
        help="YAML file: flag names without leading dashes, and their values. A flag given on the "
        "command line takes precedence.",
    )(made)
    return decorated


def settings_of(kind: Callable[..., S], flags: Mapping[str, Any], **made: Any) -> S:
    """The settings of a program: a dataclass whose fields document them. Each field has the flag of
    its own name, else its default; `made` has those of other flags, or of several together."""
    own = {name: flags[name] for name in signature(kind).parameters if name in flags}
    return kind(**own | made)


def fail(message: str, *, status: int = 1) -> NoReturn:
    """Exit after printing one line to stderr; `status` 2 means wrong usage."""
    print(f"error: {message}", file=sys.stderr)  # noqa: T201 - the only way commands report errors
    sys.exit(status)


__all__ = [
    "DIRECTORY",
    "DURATION",
    "HOST_PORT",
    "HostPort",
    "command",
    "config_file",
    "config_option",
    "fail",
    "format_duration",
    "load_flags",
    "load_flags_file",
    "parse_host_port",
    "settings_of",
]
