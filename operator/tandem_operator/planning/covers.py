"""Whether an object on the API server already says what is wanted, so that nothing is written."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from ..observed import Body

_WHOLE: Final = frozenset({"data", "matchLabels", "selector"})
"""Mappings that are ours alone: a key too many makes them another."""
_QUANTITIES: Final = frozenset({"requests", "limits"})
_QUANTITY: Final = re.compile(
    r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))(?:[eE]([+-]?[0-9]+)|([numkMGTPE]|[KMGTPE]i)?)"
)
_SUFFIX: Final = {
    "n": Decimal(10) ** -9, "u": Decimal(10) ** -6, "m": Decimal(10) ** -3,
    **{s: Decimal(1000) ** (i + 1) for i, s in enumerate("kMGTPE")},
    **{f"{s}i": Decimal(1024) ** (i + 1) for i, s in enumerate("KMGTPE")},
}  # fmt: skip


def covers(live: Body, desired: Body) -> bool:
    """Whether every field of `desired` is in `live` with that value.

    What `live` has beyond that is the API server's: defaults, status. Lists are equal in length
    and compared by position; quantities by what they measure; an empty value is an absent one.
    """
    return _mapping(live, desired)


def _mapping(live: Mapping[str, Any], desired: Mapping[str, Any]) -> bool:
    return all(_field(name, live.get(name), value) for name, value in desired.items())


def _field(name: str, live: Any, desired: Any) -> bool:
    if name in _WHOLE and isinstance(desired, Mapping) and isinstance(live, Mapping):
        # A Deployment's selector is a mapping of mappings, a Service's one of labels.
        return live.keys() == desired.keys() and _mapping(live, desired)
    if name in _QUANTITIES and isinstance(desired, Mapping) and isinstance(live, Mapping):
        return live.keys() == desired.keys() and all(
            _same_quantity(live[key], desired[key]) for key in desired
        )
    return _value(live, desired)


def _value(live: Any, desired: Any) -> bool:
    if isinstance(desired, Mapping):
        return _mapping(live if isinstance(live, Mapping) else {}, desired) and (
            bool(live) or not desired or not _says_anything(desired)
        )
    if isinstance(desired, list | tuple):
        found = live if isinstance(live, list) else []
        return len(found) == len(desired) and all(map(_value, found, desired))
    if desired is None or desired == "":
        return not live
    return bool(live == desired) and isinstance(live, bool) == isinstance(desired, bool)


def _says_anything(desired: Any) -> bool:
    """Whether a value holds more than emptiness, which the API server does not keep."""
    if isinstance(desired, Mapping):
        return any(_says_anything(value) for value in desired.values())
    return desired not in (None, "", [], ())


def _same_quantity(live: Any, desired: Any) -> bool:
    return live == desired or quantity(live) == quantity(desired) is not None


def quantity(text: Any) -> Decimal | None:
    """A Kubernetes quantity as a number; None when it is none."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        return None
    number, exponent, suffix = match.groups()
    return Decimal(number) * (Decimal(10) ** int(exponent or 0)) * _SUFFIX.get(suffix, Decimal(1))
