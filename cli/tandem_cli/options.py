"""Options that several subcommands of `tandem` share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from tandem_contract.commandline import config_option

F = TypeVar("F", bound=Callable[..., Any])

SETTINGS: Final = {
    "help_option_names": ["-h", "--help"],
    "show_default": True,
    "max_content_width": 100,
}

SEED: Final = click.IntRange(0, 2**63 - 1)
"""What torch takes for one."""


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
        help="Directory of the run's state and logs.  [default: $XDG_RUNTIME_DIR/tandem or "
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
