"""`x-kubernetes-validations` rules, evaluated as the API server does when an object is created.

There is no old object (`oldSelf`) to compare with: transition rules are skipped, and those with
`optionalOldSelf` see an empty optional.
Compiling a rule takes milliseconds and importing celpy half a second, so both happen at the first
use of a rule: a command that parses no pool does not wait for them.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from ..crd import RULES

if TYPE_CHECKING:
    from celpy import Environment, Runner

_TRANSITION: Final = re.compile(r"\boldSelf\b")


def broken_rules(schema: Mapping[str, Any], value: Any) -> Iterator[Mapping[str, Any]]:
    """Rules of this schema node (not of nodes below it) that `value`, with defaults, breaks.

    A rule that cannot be evaluated counts as broken, as in the API server.
    """
    rules = [
        rule
        for rule in schema.get(RULES, ())
        if rule.get("optionalOldSelf") or not _TRANSITION.search(rule["rule"])
    ]
    if rules:
        activation = {"self": _to_cel(schema, value), "oldSelf": _to_cel({}, {})}
        yield from (rule for rule in rules if not _holds(rule["rule"], activation))


def _holds(expression: str, activation: dict[str, Any]) -> bool:
    from celpy.evaluation import CELEvalError  # noqa: PLC0415 - see the module's docstring

    try:
        return bool(_program(expression).evaluate(activation))
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
