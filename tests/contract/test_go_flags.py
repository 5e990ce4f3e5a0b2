"""Values and arguments in the syntax of Go's pflag."""

from collections.abc import Callable
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tandem_contract.go_flags import (
    GO_BOOL,
    GO_DURATION,
    GO_INT,
    GO_INTS,
    click_arguments,
    parse_bool,
    parse_duration,
    parse_int,
    parse_ints,
    parse_strings,
)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_bool, "T", True),
        (parse_bool, "FALSE", False),
        (parse_bool, "0", False),
        (parse_int, "9002", 9002),
        (parse_int, "-3", -3),
        (parse_int, "0x1F", 31),
        (parse_int, "1_000", 1000),
        (parse_int, "010", 8),
        (parse_int, "0", 0),
        (parse_duration, "0", 0.0),
        (parse_duration, "1h30m", 5400.0),
        (parse_duration, "1.5s", 1.5),
        (parse_duration, "250ms", 0.25),
        (parse_duration, "500us", 5e-4),
        (parse_duration, "-2s", -2.0),
        (parse_ints, "1,0x2,3", (1, 2, 3)),
        (parse_strings, "a,b", ("a", "b")),
        (parse_strings, "", ()),
    ],
)
def test_values(parse: Callable[[str], object], text: str, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_bool, "yes"),
        (parse_bool, "tRUE"),
        (parse_int, "9 002"),
        (parse_int, "1.0"),
        (parse_int, ""),
        (parse_int, "08"),
        (parse_duration, "30"),
        (parse_duration, "s"),
        (parse_duration, "1d"),
        (parse_ints, "1,"),
    ],
)
def test_invalid_values_are_named(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text!r}|^''"):
        parse(text)


def run(*arguments: str) -> dict[str, Any] | str:
    """What a command gets for `arguments`, or its error."""
    received: dict[str, Any] = {}

    class Command(click.Command):
        def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
            return super().parse_args(ctx, click_arguments(args, ["tracing"], {"v": "v"}))

    @click.command(cls=Command)
    @click.option("--tracing", type=GO_BOOL)
    @click.option("--v", type=GO_INT)
    @click.option("--drain-timeout", type=GO_DURATION)
    @click.option("--ports", type=GO_INTS, multiple=True)
    @click.option("-l", "--listen")
    @click.argument("rest", nargs=-1)
    def command(**values: Any) -> None:
        received.update((name, value) for name, value in values.items() if value not in (None, ()))

    result = CliRunner().invoke(command, list(arguments))
    return received if result.exit_code == 0 else result.stderr


@pytest.mark.parametrize(
    ("arguments", "received"),
    [
        (("--tracing",), {"tracing": True}),
        (("--tracing=false",), {"tracing": False}),
        (("--tracing", "false"), {"tracing": True, "rest": ("false",)}),
        (("--tracing=false", "--tracing"), {"tracing": True}),
        (("-v=4",), {"v": 4}),
        (("-v4",), {"v": 4}),
        (("-v", "4"), {"v": 4}),
        (("--v=4", "--v", "5"), {"v": 5}),
        (("--drain-timeout", "1m"), {"drain_timeout": 60.0}),
        (("--ports=1,2", "--ports", "3"), {"ports": ((1, 2), (3,))}),
        (("-l", "x"), {"listen": "x"}),
        (("--", "--tracing", "-v"), {"rest": ("--tracing", "-v")}),
    ],
)
def test_arguments(arguments: tuple[str, ...], received: dict[str, Any]) -> None:
    assert run(*arguments) == received


def test_an_invalid_value_is_a_usage_error_that_names_the_flag() -> None:
    error = run("--tracing=maybe")
    assert isinstance(error, str)
    assert "'--tracing': 'maybe' is not true or false" in error
