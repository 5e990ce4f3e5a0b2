"""`x-kubernetes-validations` rules, evaluated as the API server does when an object is created.

There is no old object (`oldSelf`) to compare with: transition rules are skipped, and those with
`optionalOldSelf` see an empty optional.
Compiling a rule takes milliseconds and importing celpy half a second, so both happen at the first
use of a rule: a command that parses no pool does not wait for them. Evaluating all rules of a pair
takes 40 ms, and pools differ in few of the fields that a rule reads: results are remembered.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final

from ..crd import RULES

if TYPE_CHECKING:
    from celpy import Environment, Runner

_TRANSITION: Final = re.compile(r"\boldSelf\b")
_SELF: Final = re.compile(r"\bself\b(?:\.(\w+))?")
_REMEMBERED: Final = 8192
"""Results of rules; the fields that a rule reads take a few hundred bytes."""


def broken_rules(schema: Mapping[str, Any], value: Any) -> Iterator[Mapping[str, Any]]:
    """Rules of this schema node (not of nodes below it) that `value`, with defaults, breaks.

    A rule that cannot be evaluated counts as broken, as in the API server.
    """
    rules = [
        rule
        for rule in schema.get(RULES, ())
        if rule.get("optionalOldSelf") or not _TRANSITION.search(rule["rule"])
    ]
    for rule in rules:
        names = _fields(rule["rule"])
        if isinstance(value, dict) and names is not None:
            part = _to_cel(schema, {name: value[name] for name in value if name in names})
        else:
            part = _to_cel(schema, value)
        if not _holds(rule["rule"], _Input(part)):
            yield rule


@cache
def _fields(expression: str) -> frozenset[str] | None:
    """The fields of `self` that the rule reads; None: it may read any."""
    names = _SELF.findall(expression)
    return None if "" in names else frozenset(names)


class _Input:
    """What a rule reads; equal to another of the same text, which shows values and their types."""

    __slots__ = ("_text", "value")

    def __init__(self, value: Any) -> None:
        self.value, self._text = value, repr(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Input) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


@lru_cache(maxsize=_REMEMBERED)
def _holds(expression: str, read: _Input) -> bool:
    from celpy.evaluation import CELEvalError  # noqa: PLC0415 - see the module's docstring

    try:
        return bool(_program(expression).evaluate({"self": read.value, "oldSelf": _to_cel({}, {})}))
    # For example a field that the rule reads without `has()` and that the object lacks.
    except CELEvalError:
        return False


@cache
def _environment() -> "Environment":
    from celpy import Environment  # noqa: PLC0415 - see the module's docstring

    # celpy raises the recursion limit of the whole process; rules this short do not need that.
    limit = sys.getrecursionlimit()
    try:
        return Environment()
    finally:
        sys.setrecursionlimit(limit)


@cache
def _program(expression: str) -> "Runner":
    from celpy import celtypes as cel  # noqa: PLC0415 - see the module's docstring

    environment = _environment()
    # celpy has no optionals. This is all that a rule asks of an empty one.
    return environment.program(
        environment.compile(expression), functions={"hasValue": lambda _: cel.BoolType(False)}
    )


def _to_cel(schema: Mapping[str, Any], value: Any) -> Any:
    """`value` as CEL types. Fields without a schema are hidden; a number's 1 becomes a double."""
    from celpy import celtypes as cel  # noqa: PLC0415 - see the module's docstring

    if isinstance(value, dict):
        fields, additional = schema.get("properties", {}), schema.get("additionalProperties")
        schemas = {key: fields.get(key, additional) for key in value}
        return cel.MapType(
            {cel.StringType(k): _to_cel(s, value[k]) for k, s in schemas.items() if s is not None}
        )
    if isinstance(value, list):
        return cel.ListType([_to_cel(schema.get("items", {}), item) for item in value])
    # Before numbers: Python's booleans are integers.
    if isinstance(value, bool):
        return cel.BoolType(value)
    if isinstance(value, str):
        return cel.StringType(value)
    if schema.get("type") == "number" or isinstance(value, float):
        return cel.DoubleType(value)
    return cel.IntType(value)
