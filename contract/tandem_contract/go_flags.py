"""The command-line syntax of Go's pflag, for flags of llm-d's programs; click parses them.

    --tracing                a flag that is true or false stands alone, or has its value behind `=`:
    --tracing=false          the next argument never belongs to it
    --grpc-port 9002         any other takes the next argument, or what is behind `=`
    -v=4, -v4, -v 4          one letter
    --ports=1,2 --ports=3    a list: 1, 2, 3

Values are written as Go writes them: 0x1F and 1_000 are integers, 1h30m is a duration, T is true.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import click

T = TypeVar("T")

_TRUE: Final = frozenset(("1", "t", "T", "TRUE", "true", "True"))
_FALSE: Final = frozenset(("0", "f", "F", "FALSE", "false", "False"))
_UNITS: Final = {
    "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0,
}  # fmt: skip
_STEP: Final = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_DURATION: Final = re.compile(rf"[-+]?(?:{_STEP.pattern})+", re.ASCII)


def parse_bool(text: str) -> bool:
    """As strconv.ParseBool. Raises ValueError."""
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ValueError(f"{text!r} is not true or false")


def parse_int(text: str) -> int:
    """As strconv.ParseInt with base 0. Raises ValueError."""
    # Go reads a leading 0 as octal, which Python refuses.
    octal = re.fullmatch(r"([-+]?)0(_?[0-7][0-7_]*)", text, re.ASCII)
    try:
        return int(f"{octal[1]}0o{octal[2].lstrip('_')}" if octal else text, 0)
    except ValueError as err:
        raise ValueError(f"{text!r} is not an integer") from err


def parse_duration(text: str) -> float:
    """Seconds, as time.ParseDuration reads them. Raises ValueError."""
    if text in ("0", "+0", "-0"):
        return 0.0
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is not a duration: write 30s, 1m30s or 250ms")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _STEP.findall(text))
    return -seconds if text.startswith("-") else seconds


def parse_ints(text: str) -> tuple[int, ...]:
    """Integers with commas between them. Raises ValueError."""
    return tuple(parse_int(part) for part in text.split(","))


def parse_strings(text: str) -> tuple[str, ...]:
    """Words with commas between them."""
    return tuple(text.split(",")) if text else ()


class GoType(click.ParamType[T], Generic[T]):
    """A value in Go's syntax."""

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        # A file of flags has booleans of YAML.
        text = str(value).lower() if isinstance(value, bool) else value
        try:
            return self._parse(text)
        except ValueError as err:
            self.fail(str(err), param, ctx)


GO_BOOL: Final = GoType("bool", parse_bool)
GO_INT: Final = GoType("int", parse_int)
GO_DURATION: Final = GoType("duration", parse_duration)
GO_INTS: Final = GoType("ints", parse_ints)
GO_STRING: Final = GoType("string", str)
GO_STRINGS: Final = GoType("strings", parse_strings)


def click_arguments(
    arguments: Sequence[str], booleans: Iterable[str], shorthands: Mapping[str, str]
) -> list[str]:
    """`arguments` as click has to get them. `booleans`: names of flags that may stand alone;
    `shorthands`: letter → name."""
    alone = {f"--{name}" for name in booleans}
    written: list[str] = []
    for at, argument in enumerate(arguments):
        if argument == "--":
            return [*written, *arguments[at:]]
        if argument in alone:
            written.append(f"{argument}=true")
        elif len(argument) > 1 and argument[0] == "-" and argument[1] in shorthands:
            name, value = shorthands[argument[1]], argument[2:]
            written.append(f"--{name}={value.removeprefix('=')}" if value else f"--{name}")
        else:
            written.append(argument)
    return written
