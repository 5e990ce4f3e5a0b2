"""Has click accept llm-d's flags beside a command's own, in the syntax of Go."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click

from tandem_contract.go_flags import GO_BOOL, GO_INTS, GO_STRINGS, click_arguments
from tandem_contract.llmd_flags import LlmdFlag, Treatment

from .flags import BY_NAME, FEATURE_GATES, FLAGS, SHORTHANDS
from .plugins.unsupported import last_entries

F = TypeVar("F", bound=Callable[..., Any])

_log: Final = logging.getLogger(__name__)
_GIVEN: Final = "tandem_epp.llmd.given"
_BOOLEANS: Final = [flag.name for flag in FLAGS if flag.type is GO_BOOL]
_LISTS: Final = (GO_INTS, GO_STRINGS)


class LlmdCommand(click.Command):
    """A command whose arguments may be in Go's syntax."""

    # Go's flags end at no argument: what belongs to none is left over, and `main` judges it.
    allow_extra_args = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, click_arguments(args, _BOOLEANS, SHORTHANDS))


def llmd_options(function: F) -> F:
    """Add llm-d's flags to a command; `given` returns their values."""
    for flag in reversed(FLAGS):
        function = _option(flag)(function)
    return function


def given(context: click.Context) -> Mapping[str, Any]:
    """The values of those of llm-d's flags that the command line has. Raises UsageError where one
    of this EPP's own flags is there for the same setting."""
    values: dict[str, Any] = context.meta.get(_GIVEN, {})
    for name in values:
        own = BY_NAME[name].own
        if own is not None and _is_given(context, own):
            raise click.UsageError(f"--{name} and --{own.replace('_', '-')} exclude each other")
    return values


def log_treatments(values: Mapping[str, Any]) -> None:
    """Warn of each flag and gate in `values` that has no effect; `with_values` has checked them."""
    for name in values:
        flag = BY_NAME[name]
        if flag.treatment is Treatment.NO_EFFECT:
            _log.warning("--%s has no effect: %s", name, flag.text)
    for gate in last_entries(values.get(FEATURE_GATES, ())).values():
        if gate.is_lost:
            _log.warning("--%s: %s has no effect: %s", FEATURE_GATES, gate.name, gate.reason)


def _option(flag: LlmdFlag) -> Callable[[F], F]:
    return click.option(
        f"--{flag.name}",
        type=flag.type,
        multiple=flag.type in _LISTS,
        callback=_store,
        expose_value=False,
        # llm-d's EPP reads no environment variables for its flags.
        allow_from_autoenv=False,
        show_default=False,
        hidden=flag.treatment is not Treatment.WORKS,
        help=f"llm-d's: {flag.text}.",
    )


def _store(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value is None or value == ():
        return
    flag = BY_NAME[parameter.opts[0].removeprefix("--")]
    if flag.treatment is Treatment.REFUSED:
        raise click.BadParameter(f"refused: {flag.text}")
    if flag.type in _LISTS:
        value = tuple(item for part in value for item in part)
    context.meta.setdefault(_GIVEN, {})[flag.name] = value


def _is_given(context: click.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source not in (None, click.core.ParameterSource.DEFAULT)
