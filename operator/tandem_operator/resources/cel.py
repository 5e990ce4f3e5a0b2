"""`x-kubernetes-validations` rules, evaluated as the API server does on a create.

Rules that compare with the old object (`oldSelf`) hold there by definition and are skipped.
Compiling a rule takes milliseconds, importing celpy half a second: both happen at a rule's first
use, so a command that parses no pool pays nothing.
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
    """Rules of this node (not of those below it) that `value`, defaults applied, breaks.

    A rule that cannot be evaluated is broken, as in the API server.
    """
    rules = [r for r in schema.get(RULES, ()) if not _TRANSITION.search(r["rule"])]
    if rules:
        activation = {"self": _to_cel(schema, value)}
        yield from (rule for rule in rules if not _holds(rule["rule"], activation))


def _holds(expression: str, activation: dict[str, Any]) -> bool:
    from celpy.evaluation import CELEvalError  # noqa: PLC0415 - see the module's docstring

    try:
        return bool(_program(expression).evaluate(activation))
    except CELEvalError:
        return False


@cache
def _environment() -> "Environment":
    from celpy import Environment  # noqa: PLC0415 - see the module's docstring

    # celpy raises the whole process's recursion limit, which rules as short as ours never need.
    limit = sys.getrecursionlimit()
    try:
        return Environment()
    finally:
        sys.setrecursionlimit(limit)


@cache
def _program(expression: str) -> "Runner":
    environment = _environment()
    return environment.program(environment.compile(expression))


def _to_cel(schema: Mapping[str, Any], value: Any) -> Any:
    """`value` as CEL sees it: fields without a schema are hidden, and in a number 1 is a double."""
    from celpy import celtypes as cel  # noqa: PLC0415 - see the module's docstring

    if isinstance(value, dict):
        fields, rest = schema.get("properties", {}), schema.get("additionalProperties")
        known = {key: fields.get(key, rest) for key in value}
        return cel.MapType(
            {cel.StringType(k): _to_cel(s, value[k]) for k, s in known.items() if s is not None}
        )
    if isinstance(value, list):
        return cel.ListType([_to_cel(schema.get("items", {}), item) for item in value])
    if isinstance(value, bool):
        return cel.BoolType(value)
    if isinstance(value, str):
        return cel.StringType(value)
    if schema.get("type") == "number" or isinstance(value, float):
        return cel.DoubleType(value)
    return cel.IntType(value)
