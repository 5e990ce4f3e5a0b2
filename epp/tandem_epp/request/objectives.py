"""How important requests are, and whose they are.

    with an API key   the client's settings say both; its own headers do not count
    without           headers name an InferenceObjective, which has a priority, and a tenant

A priority orders what waits in flow control. Where that is off, it only tells requests apart: in
llm-d's metrics and in the trace of a decision.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tandem_contract import headers as wire
from tandem_contract.config import FlowClient

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
        self.clients: Mapping[str, FlowClient] = {}
        """Name of a client with an API key → its settings; one without has the default priority,
        and is a tenant of its own. Replaced as a whole."""

    def replace(self, objectives: Iterable[Objective]) -> None:
        """Have these objectives and no others."""
        self._priorities = {each.name: each.priority for each in objectives}

    def priority(self, headers: Mapping[str, str]) -> int:
        """The priority of a request with these headers."""
        if (name := headers.get(wire.CLIENT)) is not None:
            client = self.clients.get(name)
            return DEFAULT if client is None else client.priority
        if not self._priorities:
            return DEFAULT
        for header in wire.OBJECTIVES:
            if name := headers.get(header):
                return self._priorities.get(name, DEFAULT)
        return DEFAULT

    def tenant(self, headers: Mapping[str, str]) -> str:
        """Whose request it is, of those who share in flow control; empty: nothing tells."""
        if (name := headers.get(wire.CLIENT)) is not None:
            client = self.clients.get(name)
            return name if client is None else client.tenant or name
        for header in (wire.FAIRNESS, wire.FAIRNESS_OLDER):
            if tenant := headers.get(header):
                return tenant
        return ""


def read_objective(body: Mapping[str, Any]) -> Objective:
    """The objective in an object that its definition has validated."""
    return Objective(body["metadata"]["name"], body["spec"].get("priority", DEFAULT))
