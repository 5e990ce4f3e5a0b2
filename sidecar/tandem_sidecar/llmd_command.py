"""A command that takes the flags of llm-d's sidecar beside its own.

click parses both. `LlmdCommand` then translates llm-d's into Tandem's, which alone reach the
settings. As soon as a flag of llm-d is given, not counting environment variables, llm-d's defaults
apply: clients connect over TLS, and prefill pods may be named without a signed plan, here only
those with private addresses.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from tandem_contract.commandline import load_flags, load_flags_file
from tandem_contract.documents import DocumentError, parse_documents
from tandem_contract.go_flags import GO_BOOL, GO_STRINGS, click_arguments
from tandem_contract.llmd_flags import Treatment

from .llmd_flags import FLAGS, OURS
from .llmd_translation import Given, Refused, translate

_NOTES: Final = "tandem_sidecar.llmd_command.notes"
_BY_NAME: Final = {flag.name: flag for flag in FLAGS}
_BOOLEANS: Final = tuple(flag.name for flag in FLAGS if flag.type is GO_BOOL)
_COMMAND_LINE: Final = ParameterSource.COMMANDLINE
F = TypeVar("F", bound=Callable[..., Any])


def options(function: F) -> F:
    """Add the flags to a command. They are left out of its help, which names the page instead."""
    for flag in FLAGS:
        if flag.name in OURS:
            continue
        function = click.option(
            f"--{flag.name}",
            flag.parameter,
            type=flag.type,
            multiple=flag.type is GO_STRINGS,
            hidden=True,
            envvar=flag.environment,
            # Kubernetes sets TANDEM_SIDECAR_PORT in every pod beside a Service tandem-sidecar.
            allow_from_autoenv=False,
        )(function)
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


class LlmdCommand(click.Command):
    """A command whose parameters are Tandem's alone after parsing; see `options` and `notes`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and translate llm-d's flags. Raises UsageError for refused flags."""
        rest = super().parse_args(ctx, click_arguments(args, _BOOLEANS, {"v": "v"}))
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
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    flags = {flag.parameter: flag for flag in FLAGS}
    values = {
        flag.name: ctx.params[name]
        for name, flag in flags.items()
        if ctx.params.get(name) not in (None, ())
    }
    explicit = frozenset(
        flag.name
        for name, flag in flags.items()
        if flag.name in values and sources[name] is not ParameterSource.ENVIRONMENT
    )
    tandem = {name: value for name, value in ctx.params.items() if name not in flags}
    given = Given(
        values,
        explicit,
        frozenset(n for n in explicit if sources[_BY_NAME[n].parameter] is _COMMAND_LINE),
        frozenset(name for name in tandem if sources[name] is not ParameterSource.DEFAULT),
    )
    lines = _lines_without_effect(given)
    ctx.params, more = translate(given, tandem)
    ctx.meta[_NOTES] = (*lines, *more)


def _lines_without_effect(given: Given) -> list[str]:
    """One log line for each flag that has no effect. Raises Refused."""
    lines = []
    for name, value in given.values.items():
        flag = _BY_NAME[name]
        if flag.treatment is Treatment.WORKS or value in flag.off:
            continue
        text = flag.text.replace("`", "")
        if flag.treatment is Treatment.REFUSED:
            raise Refused(f"--{name}: {text}")
        if name in given.explicit:
            lines.append(f"--{name} has no effect: {text}")
    return lines
