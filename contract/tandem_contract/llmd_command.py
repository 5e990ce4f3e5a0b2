"""Commands that take the flags of llm-d's programs beside their own; click parses both.

`llmd_options` adds the flags of a table (`llmd_flags`), `LlmdCommand` has click read them in Go's
syntax and takes them out of the command's parameters, and `given` returns those that have a value.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import click
from click.core import ParameterSource

from .go_flags import GO_BOOL, GO_INTS, GO_STRINGS, click_arguments
from .llmd_flags import LlmdFlag, Treatment

F = TypeVar("F", bound=Callable[..., Any])

_GIVEN: Final = "tandem_contract.llmd_command.given"
_LISTS: Final = (GO_INTS, GO_STRINGS)


class GivenFlag(NamedTuple):
    """A flag of llm-d's that has a value."""

    flag: LlmdFlag
    value: Any
    """A list is one tuple, however often the flag was repeated."""
    source: ParameterSource | None


class LlmdCommand(click.Command):
    """A command whose parameters are its own alone after parsing."""

    flags: ClassVar[tuple[LlmdFlag, ...]]
    """The table, as given to `llmd_options`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and keep llm-d's flags for `given`. Raises UsageError."""
        booleans = [flag.name for flag in self.flags if flag.type is GO_BOOL]
        letters = {flag.name: flag.name for flag in self.flags if len(flag.name) == 1}
        rest = super().parse_args(ctx, click_arguments(args, booleans, letters))
        values = {flag: ctx.params.pop(flag.parameter, None) for flag in self.flags}
        ctx.meta[_GIVEN] = {
            flag.name: GivenFlag(flag, value, ctx.get_parameter_source(flag.parameter))
            for flag, value in values.items()
            if value not in (None, ())
        }
        return rest


def llmd_options(flags: Iterable[LlmdFlag], *, in_help: bool) -> Callable[[F], F]:
    """Adds `flags` to a command. `in_help`: its help shows those that work."""

    def decorate(function: F) -> F:
        for flag in reversed(tuple(flags)):
            function = click.option(
                f"--{flag.name}",
                flag.parameter,
                type=flag.type,
                multiple=flag.type in _LISTS,
                callback=partial(_checked, flag),
                envvar=flag.environment,
                # Kubernetes sets TANDEM_SIDECAR_PORT in every pod beside a Service tandem-sidecar.
                allow_from_autoenv=False,
                show_default=False,
                hidden=not (in_help and flag.treatment is Treatment.WORKS),
                help=f"llm-d's: {flag.text}.",
            )(function)
        return function

    return decorate


def given(ctx: click.Context) -> Mapping[str, GivenFlag]:
    """llm-d's flags that have a value, by name."""
    flags: Mapping[str, GivenFlag] = ctx.meta[_GIVEN]
    return flags


def without_effect(flags: Mapping[str, GivenFlag]) -> list[str]:
    """One log line for each flag that somebody wrote and that has no effect."""
    return [
        f"--{flag.name} has no effect: {flag.text.replace('`', '')}"
        for flag, value, source in flags.values()
        if flag.treatment is Treatment.NO_EFFECT
        and value not in flag.off
        and source is not ParameterSource.ENVIRONMENT
    ]


def _checked(flag: LlmdFlag, _ctx: click.Context, _param: click.Parameter, value: Any) -> Any:
    """The value, a list as one tuple. Raises BadParameter for a flag that is refused."""
    if value in (None, ()):
        return value
    if flag.treatment is Treatment.REFUSED and value not in flag.off:
        raise click.BadParameter(f"refused: {flag.text.replace('`', '')}")
    return tuple(item for part in value for item in part) if flag.type in _LISTS else value
