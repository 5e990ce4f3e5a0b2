"""Whether an object on the API server is as desired already, so that nothing has to be written."""

from collections.abc import Mapping
from typing import Any, Final

from tandem_contract.quantities import quantity

from ..observed import Body

_EXACT: Final = frozenset({"data", "matchLabels", "selector"})
"""Mappings that only the operator writes: an additional key is a difference."""
_QUANTITIES: Final = frozenset({"requests", "limits"})


def is_up_to_date(live: Body, desired: Body) -> bool:
    """Whether every field of `desired` is in `live` with that value.

    Further fields of `live` are the API server's: defaults, status. Lists must have equal length
    and are compared by position, quantities by their amount. An empty value counts as absent.
    """
    return _has_fields(live, desired)


def _has_fields(live: Mapping[str, Any], desired: Mapping[str, Any]) -> bool:
    return all(_has_field(name, live.get(name), value) for name, value in desired.items())


def _has_field(name: str, live: Any, desired: Any) -> bool:
    if name in _EXACT and isinstance(desired, Mapping) and isinstance(live, Mapping):
        # A Deployment's selector holds further mappings, a Service's holds labels: compare both
        # the keys here and the values below.
        return live.keys() == desired.keys() and _has_fields(live, desired)
    if name in _QUANTITIES and isinstance(desired, Mapping) and isinstance(live, Mapping):
        return live.keys() == desired.keys() and all(
            _is_same_quantity(live[key], desired[key]) for key in desired
        )
    return _has_value(live, desired)


def _has_value(live: Any, desired: Any) -> bool:
    if isinstance(desired, Mapping):
        return _has_fields(live if isinstance(live, Mapping) else {}, desired) and (
            bool(live) or not desired or not _has_content(desired)
        )
    if isinstance(desired, list | tuple):
        # The order of lists is meaningful to Kubernetes: containers, arguments, rules.
        items = live if isinstance(live, list) else []
        return len(items) == len(desired) and all(map(_has_value, items, desired))
    if desired is None or desired == "":
        # The API server leaves out empty fields, so an absent one is equal.
        return not live
    # Python's True equals 1; in JSON they differ.
    return bool(live == desired) and isinstance(live, bool) == isinstance(desired, bool)


def _has_content(desired: Any) -> bool:
    """Whether a value holds anything but empty values, which the API server does not store."""
    if isinstance(desired, Mapping):
        return any(_has_content(value) for value in desired.values())
    return desired not in (None, "", [], ())


def _is_same_quantity(live: Any, desired: Any) -> bool:
    return live == desired or quantity(live) == quantity(desired) is not None
