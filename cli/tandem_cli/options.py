"""Options that several subcommands of `tandem` share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from tandem_contract import ports
from tandem_contract.commandline import config_option

F = TypeVar("F", bound=Callable[..., Any])

SETTINGS: Final = {
    "help_option_names": ["-h", "--help"],
    "show_default": True,
    "max_content_width": 100,
}

SEED: Final = click.IntRange(0, 2**63 - 1)
"""The seeds that torch accepts."""

STACK_AND_CLUSTER: Final = (
    "--run-dir is for this machine's stack; the other options are for a cluster: give one or the "
    "other"
)
"""Usage error of commands that look at a stack or at a cluster."""


def command(name: str) -> Callable[[Callable[..., Any]], click.Command]:
    """`click.command` with this program's settings and `--config FILE`."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        return config_option(click.command(name, context_settings=SETTINGS)(function))

    return decorate


def run_dir_option(function: F) -> F:
    """`--run-dir DIR`."""
    return click.option(
        "--run-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="Directory with the stack's state and logs.  [default: $XDG_RUNTIME_DIR/tandem or "
        "~/.cache/tandem/run]",
    )(function)


def files_option(function: F) -> F:
    """`-f PATH`, at least once."""
    return click.option(
        "-f",
        "--filename",
        "paths",
        type=click.Path(path_type=Path),
        multiple=True,
        required=True,
        help="YAML file with PrefillPool and DecodePool documents, or a directory of such files; "
        "repeatable.",
    )(function)


def port_option(function: F) -> F:
    """`--port PORT`."""
    return click.option(
        "--port",
        type=click.IntRange(0, 65535),
        default=ports.ENVOY,
        help="Port of 127.0.0.1 on which Envoy serves; 0 picks a free one.",
    )(function)


def kubeconfig_option(function: F) -> F:
    """`--kubeconfig FILE`."""
    return click.option(
        "--kubeconfig",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Kubeconfig file.  [default: $KUBECONFIG or ~/.kube/config; in a pod, its own "
        "cluster]",
    )(function)


def context_option(function: F) -> F:
    """`--context NAME`."""
    return click.option("--context", help="Context of the kubeconfig.  [default: the current one]")(
        function
    )
