"""Validation of custom resources against their CRD's schema: defaults, structure, CEL rules.

    object_ = defaulted(kind, data)
    for problem in problems(kind, object_): …

Kubernetes' structural schemas differ from JSON Schema in a few keywords; each of those is an
own keyword of a jsonschema validator here. As in the API server with strict validation, unknown
fields are errors, a null counts as left out, and CEL rules are evaluated only when the structure
is right. One check is stricter: an integer written as 2.0 is an error; the API server reads it
as 2.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from ..crd import KINDS, LIST_MAP_KEYS, LIST_TYPE, PRESERVE_UNKNOWN, RULES, load_schema
from .cel import broken_rules

if TYPE_CHECKING:
    from jsonschema import ValidationError
    from jsonschema.protocols import Validator

Path_ = tuple[str | int, ...]

_LONGEST_VALUE: Final = 80
_MOST_PLACES: Final = 3
"""A field with this name at more places, such as `name`, says nothing about what was meant."""
_TYPE_NAMES: Final = {
    dict: "a mapping", list: "a list", str: "a string", bool: "a boolean", int: "an integer",
    float: "a number", type(None): "nothing",
}  # fmt: skip
_EXPECTED: Final = {
    "object": "a mapping", "array": "a list", "string": "a string", "boolean": "true or false",
    "integer": "an integer", "number": "a number",
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """An error at `path`; the message says what would be right."""

    path: Path_
    message: str


def defaulted(kind: str, data: Any) -> Any:
    """A copy of `data` with nulls left out and the schema's defaults filled in."""
    return _default(load_schema(kind), data)


def defaulted_spec(kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Like `defaulted`, for a `spec` alone."""
    filled: dict[str, Any] = _default(load_schema(kind)["properties"]["spec"], spec)
    return filled


def problems(kind: str, data: Any) -> list[Problem]:
    """Everything wrong with an object of `kind` after `defaulted`; empty when it is valid."""
    structural, rules = _validators(kind)
    errors = [_problem(error) for error in structural.iter_errors(data)]
    if errors:
        # Keep the first error of each path: an empty value, for one, also breaks its pattern.
        return list({problem.path: problem for problem in reversed(errors)}.values())[::-1]
    return [_problem(error) for error in rules.iter_errors(data)]


def nearest(name: object, known: Sequence[str]) -> str:
    """` (did you mean …?)` for the known name closest to `name`; empty when none is close."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _default(schema: Mapping[str, Any], value: Any) -> Any:
    if isinstance(value, list) and "items" in schema:
        return [_default(schema["items"], item) for item in value]
    if not isinstance(value, dict):
        return deepcopy(value)
    fields: Mapping[str, Any] = schema.get("properties", {})
    rest: Mapping[str, Any] = schema.get("additionalProperties", {})
    # A null of an unknown field stays, so that the field is reported.
    absent = [k for k, v in value.items() if v is None and (k in fields or rest)]
    fields_set = {k: v for k, v in value.items() if k not in absent}
    for name, field in fields.items():
        # Before the recursion: a default may itself have fields with defaults.
        if name not in fields_set and "default" in field:
            fields_set[name] = field["default"]
    return {key: _default(fields.get(key, rest), item) for key, item in fields_set.items()}


@cache
def _validators(kind: str) -> tuple["Validator", "Validator"]:
    from jsonschema import Draft202012Validator, validators  # noqa: PLC0415 - 0.2 s, on first use

    standard: dict[str, Any] = dict(Draft202012Validator.VALIDATORS)
    walk: dict[str, Any] = {name: standard[name] for name in ("items", "properties")}
    ours: dict[str, Any] = {
        "properties": _properties, "pattern": _pattern, "minimum": _minimum, LIST_TYPE: _list_type,
    }  # fmt: skip
    # JSON Schema's exclusiveMinimum is a number; OpenAPI's boolean is handled by `_minimum`.
    standard = {name: check for name, check in standard.items() if name != "exclusiveMinimum"}
    # `type(v) is int` excludes booleans, which are integers in Python, and 2.0.
    types = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, v: type(v) is int)
    structural = validators.create({}, {**standard, **ours}, type_checker=types)
    # Two validators, because rules may be evaluated only after the structure proved right.
    rules = validators.create({}, {**walk, RULES: _rules})
    schema = load_schema(kind)
    return structural(schema), rules(schema)


def _properties(
    validator: Any, fields: Mapping[str, Any], value: Any, schema: Mapping[str, Any]
) -> Iterator["ValidationError"]:
    from jsonschema import ValidationError  # noqa: PLC0415 - see _validators

    if not isinstance(value, dict):
        return
    for name, item in value.items():
        if name in fields:
            yield from validator.descend(item, fields[name], path=name, schema_path=name)
        elif not schema.get(PRESERVE_UNKNOWN):
            hint = _elsewhere(name) or nearest(name, list(fields))
            hint = hint or f": known are {', '.join(fields)}"
            yield ValidationError(f"unknown field{hint}", path=(name,))


def _elsewhere(name: object) -> str:
    """Where a field of this name belongs; empty if nowhere, or at too many places to tell."""
    places = _places().get(name, {})
    if not 0 < len(places) <= _MOST_PLACES:
        return ""
    known = (f"{path} of {' and '.join(kinds)}" for path, kinds in places.items())
    return f" here: it is {', or '.join(known)}"


@cache
def _places() -> Mapping[object, Mapping[str, list[str]]]:
    """The paths of all fields by their last name, and the kinds that have them."""
    places: dict[object, dict[str, list[str]]] = {}

    def visit(kind: str, schema: Mapping[str, Any], at: str) -> None:
        for name, field in schema.get("properties", {}).items():
            path = f"{at}.{name}"
            places.setdefault(name, {}).setdefault(path, []).append(kind)
            visit(kind, field, path)
            visit(kind, field.get("items", {}), f"{path}[]")

    for kind in KINDS:
        visit(kind, load_schema(kind)["properties"]["spec"], "spec")
    return places


def _pattern(
    _validator: Any, pattern: str, value: Any, _schema: Mapping[str, Any]
) -> Iterator["ValidationError"]:
    """Match the whole value: Python's `$` also matches before a final line end, RE2's does not."""
    from jsonschema import ValidationError  # noqa: PLC0415 - see _validators

    if isinstance(value, str) and not re.fullmatch(pattern, value):
        yield ValidationError(pattern)


def _minimum(
    validator: Any, limit: float, value: Any, schema: Mapping[str, Any]
) -> Iterator["ValidationError"]:
    """OpenAPI's minimum: with the boolean `exclusiveMinimum` the limit itself is too small."""
    from jsonschema import ValidationError  # noqa: PLC0415 - see _validators

    if validator.is_type(value, "number") and (
        value < limit or (value == limit and schema.get("exclusiveMinimum"))
    ):
        yield ValidationError("too small")


def _list_type(
    _validator: Any, kind: str, value: Any, schema: Mapping[str, Any]
) -> Iterator["ValidationError"]:
    """A list of type set holds no item twice, one of type map no key twice."""
    from jsonschema import ValidationError  # noqa: PLC0415 - see _validators

    if kind == "atomic" or not isinstance(value, list):
        return
    names: Sequence[str] = schema.get(LIST_MAP_KEYS, ())
    earlier: list[Any] = []
    for i, item in enumerate(value):
        key = [item.get(name) for name in names] if names and isinstance(item, dict) else item
        if key in earlier:
            shown = ", ".join(str(part) for part in key) if isinstance(key, list) else str(key)
            yield ValidationError(f"{shown!r} is listed twice: remove one", path=(i,))
        earlier.append(key)


def _rules(
    _validator: Any, _rules_: Any, value: Any, schema: Mapping[str, Any]
) -> Iterator["ValidationError"]:
    from jsonschema import ValidationError  # noqa: PLC0415 - see _validators

    for rule in broken_rules(schema, value):
        at = rule.get("fieldPath", "").strip(".")
        yield ValidationError(rule["message"], path=at.split(".") if at else ())


def _problem(error: "ValidationError") -> Problem:
    path = tuple(error.absolute_path)
    if error.validator == "required":
        # jsonschema reports each missing field by itself and names it only in its message.
        required: Any = error.validator_value
        missing = [name for name in required if error.message.startswith(repr(name))]
        return Problem((*path, *missing), "is required")
    return Problem(path, _message(error))


def _message(error: "ValidationError") -> str:
    """A message for an error of one of jsonschema's own keywords: the value and what is allowed."""
    limit: Any = error.validator_value
    schema: Any = error.schema
    value = _shown(error.instance)
    match error.validator:
        case "type":
            actual = _TYPE_NAMES.get(type(error.instance), type(error.instance).__name__)
            text = f"expected {_EXPECTED.get(limit, limit)}, got {actual}: {value}"
        case "anyOf":
            text = f"expected a whole number or a string, got {value} ({schema['description']})"
        case "enum":
            hint = nearest(error.instance, [str(choice) for choice in limit])
            text = f"{value} is none of {', '.join(map(str, limit))}{hint}"
        case "pattern":
            text = f"{value} is malformed ({schema.get('description', limit)})"
        case "minimum":
            text = f"{value} is {'not above' if error.instance == limit else 'below'} {limit}"
        case "maximum":
            text = f"{value} is above {limit}"
        case "minLength" | "minItems":
            text = "is empty"
        case "maxLength" | "maxItems" | "maxProperties":
            text = f"is too long: {limit} is the most"
        case _:
            text = error.message
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
