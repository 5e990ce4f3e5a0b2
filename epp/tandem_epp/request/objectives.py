"""The priorities of requests: those of the InferenceObjectives that a header names.

A priority orders what waits in flow control. Where that is off, it only tells requests apart: in
llm-d's metrics and in the trace of a decision.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tandem_contract import headers as wire

DEFAULT: Final = 0
"""Priority of a request that names no objective, or one that does not exist or has none."""


@dataclass(frozen=True)
class Objective:
    """An InferenceObjective."""

    name: str
    priority: int
    """The higher, the more important; may be negative."""


class Objectives:
    """The objectives of a pool."""

    def __init__(self) -> None:
        self._priorities: Mapping[str, int] = {}

    def replace(self, objectives: Iterable[Objective]) -> None:
        """Have these objectives and no others."""
        self._priorities = {each.name: each.priority for each in objectives}

    def priority(self, headers: Mapping[str, str]) -> int:
        """The priority of a request with these headers."""
        if not self._priorities:
            return DEFAULT
        for header in wire.OBJECTIVES:
            if name := headers.get(header):
                return self._priorities.get(name, DEFAULT)
        return DEFAULT


def read_objective(body: Mapping[str, Any]) -> Objective:
    """The objective in an object that its definition has validated."""
    return Objective(body["metadata"]["name"], body["spec"].get("priority", DEFAULT))
