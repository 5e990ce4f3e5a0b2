"""llm-d's flags of the EPP's command: which exclude its own, and which have no effect."""

import logging
from collections.abc import Mapping
from typing import Any, Final

import click

from tandem_contract import llmd_command
from tandem_contract.llmd_command import without_effect

from .flags import FLAGS

_log: Final = logging.getLogger(__name__)


class EppCommand(llmd_command.LlmdCommand):
    """The EPP's command: llm-d's flags beside its own."""

    flags = FLAGS
    # Go's flags end at no argument: what belongs to none is left over, and `main` judges it.
    allow_extra_args = True


llmd_options: Final = llmd_command.llmd_options(FLAGS, in_help=True)


def given(context: click.Context) -> Mapping[str, Any]:
    """The values of those of llm-d's flags that the command line has. Raises UsageError where one
    of this EPP's own flags is there for the same setting."""
    flags = llmd_command.given(context)
    for name, (flag, _, _) in flags.items():
        if flag.own is not None and _is_given(context, flag.own):
            raise click.UsageError(
                f"--{name} and --{flag.own.replace('_', '-')} exclude each other"
            )
    return {name: value for name, (_, value, _) in flags.items()}


def log_treatments(context: click.Context) -> None:
    """Warn of each flag that has no effect; `with_values` has checked them."""
    flags = llmd_command.given(context)
    for line in without_effect(flags):
        _log.warning("%s", line)


def _is_given(context: click.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source not in (None, click.core.ParameterSource.DEFAULT)
