"""A command that takes the flags of llm-d's sidecar beside its own.

`SidecarCommand` translates llm-d's into Tandem's, which alone reach the settings. As soon as a flag
of llm-d is given, not counting environment variables, llm-d's defaults apply: clients connect over
TLS, and prefill pods may be named without a signed plan, here only those with private addresses.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from tandem_contract.commandline import load_flags, load_flags_file
from tandem_contract.documents import DocumentError, parse_documents
from tandem_contract.llmd_command import (
    GivenFlag,
    LlmdCommand,
    given,
    llmd_options,
    without_effect,
)

from .llmd_flags import FLAGS, OURS
from .llmd_translation import Given, Refused, translate

_NOTES: Final = "tandem_sidecar.llmd_command.notes"
F = TypeVar("F", bound=Callable[..., Any])
_FLAGS: Final = tuple(flag for flag in FLAGS if flag.name not in OURS)


def options(function: F) -> F:
    """Add the flags to a command. They are left out of its help, which names the page instead."""
    function = llmd_options(_FLAGS, in_help=False)(function)
    for name, callback in (("configuration-file", load_flags_file), ("configuration", _inline)):
        function = click.option(
            f"--{name}",
            type=click.Path(path_type=Path) if name == "configuration-file" else str,
            is_eager=True,
            expose_value=False,
            hidden=True,
            callback=callback,
            allow_from_autoenv=False,
        )(function)
    return function


def _inline(ctx: click.Context, _param: click.Parameter, text: str | None) -> None:
    if text is None:
        return
    try:
        load_flags(ctx, parse_documents(text, "--configuration"), "--configuration")
    except DocumentError as err:
        raise click.UsageError(str(err), ctx) from err


class SidecarCommand(LlmdCommand):
    """A command whose parameters are Tandem's alone after parsing; see `options` and `notes`."""

    flags = _FLAGS

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and translate llm-d's flags. Raises UsageError for refused values."""
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            try:
                _translate(ctx)
            except Refused as err:
                raise click.UsageError(str(err), ctx) from err
        return rest


def notes(ctx: click.Context) -> tuple[str, ...]:
    """One line for each flag of llm-d that was given and has no effect, and for its defaults."""
    lines: tuple[str, ...] = ctx.meta[_NOTES]
    return lines


def _translate(ctx: click.Context) -> None:
    """Replace the parameters in `ctx` by Tandem's, and note what to log. Raises Refused."""
    flags = given(ctx)
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    translated = Given(
        values={name: value for name, (_, value, _) in flags.items()},
        explicit=_from(flags, set(ParameterSource) - {ParameterSource.ENVIRONMENT}),
        typed=_from(flags, {ParameterSource.COMMANDLINE}),
        tandem=frozenset(
            name for name, source in sources.items() if source is not ParameterSource.DEFAULT
        ),
    )
    ctx.params, lines = translate(translated, ctx.params)
    ctx.meta[_NOTES] = (*without_effect(flags), *lines)


def _from(flags: Mapping[str, GivenFlag], sources: set[ParameterSource]) -> frozenset[str]:
    return frozenset(name for name, flag in flags.items() if flag.source in sources)
