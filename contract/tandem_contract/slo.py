"""Service level objectives, as the files of EPP and router state them for each model.

    slo:
      my-model: {ttft: 2s, itl: 50ms, attainment: 0.9}

`read_slos` reads such a section. Errors: `documents.DocumentError`, with file, line and field.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from .documents import Document

SECTION: Final = "slo"
"""Field of the router's and the EPP's file; written by users and the operator."""
_ZERO: Final = "no request meets a time of 0: write a time above 0"
_DURATIONS: Final = ("ttft", "itl")
_FIELDS: Final = (*_DURATIONS, "attainment")


class Slo(msgspec.Struct, frozen=True):
    """What the requests of a model are to meet. At least one of both times is given."""

    ttft: float | None = None
    """Seconds to the first token; None: any. Too low: most requests miss it wherever they go, and
    give way to the few that do not."""
    itl: float | None = None
    """Seconds between two tokens, on average over an answer; None: any. Too low: as above."""
    attainment: float = 0.9
    """Share of the requests that are to meet both, above 0 and at most 1. Higher: longer latencies
    of all are accepted for one more request that meets them."""


def read_slos(document: Document, path: list[str | int], slos: Mapping[Any, Any]) -> dict[str, Slo]:
    """Model → objectives, from the value at `path` of `document`. Raises DocumentError."""
    if not isinstance(slos, dict):
        message = "is no mapping of models to objectives: write MODEL: {ttft: 2s, itl: 50ms}"
        raise document.error(path, message)
    return {_name(document, path, model): _slo(document, path, model, slos) for model in slos}


def _name(document: Document, path: list[str | int], model: object) -> str:
    if not isinstance(model, str) or not model:
        raise document.error(path, f"{model!r} is no name of a model: write it in quotes")
    return model


def _slo(document: Document, path: list[str | int], model: str, slos: Mapping[Any, Any]) -> Slo:
    at, fields = [*path, model], slos[model]
    if not isinstance(fields, dict) or not fields.keys() & {*_DURATIONS}:
        raise document.error(at, "states no objective: write {ttft: 2s, itl: 50ms}, or one of them")
    if unknown := next((name for name in fields if name not in _FIELDS), None):
        message = f"is an unknown field: an objective has {', '.join(_FIELDS)}"
        raise document.error([*at, str(unknown)], message)
    seconds = {
        name: document.seconds([*at, name], fields[name], _ZERO)
        for name in _DURATIONS
        if name in fields
    }
    attainment = fields.get("attainment", Slo().attainment)
    is_number = isinstance(attainment, int | float) and not isinstance(attainment, bool)
    if not is_number or not 0.0 < attainment <= 1.0:
        message = f"{attainment!r} is no share above 0 and at most 1, such as 0.9"
        raise document.error([*at, "attainment"], message)
    return Slo(**seconds, attainment=float(attainment))
