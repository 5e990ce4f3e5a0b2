"""A picker that does not follow a gateway's subset hints."""

from random import Random

import pytest

from tandem_contract.config import Backend, DisaggregatedServing
from tandem_contract.documents import parse_documents
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend
from tandem_epp.choice.routing import Routing
from tandem_epp.exchange import HttpRequest, NotPlaced
from tandem_epp.llmd.plugins.config import load_scheduling
from tandem_epp.metrics.counters import Metrics
from tandem_epp.placement.history import History
from tandem_epp.placement.picker import EndpointPicker

ELSEWHERE = HttpRequest("GET", "/health", {}, frozenset({"10.9.9.9:1"}))


def picker(*, follows_hints: bool) -> EndpointPicker:
    """A picker with one backend."""
    serving = DisaggregatedServing()
    document = parse_documents("{}", "router.yaml")[0]
    routing = Routing(serving, load_scheduling(document, document.data, serving))
    fleet = Fleet()
    fleet.apply([DiscoveredBackend(Backend("d1", "http://10.0.0.1:8000"))])
    made = EndpointPicker(fleet, routing, Metrics(fleet), History(8), Random(1))
    made.follows_hints = follows_hints
    return made


def test_a_hint_that_names_no_backend_changes_nothing() -> None:
    assert picker(follows_hints=False).place(ELSEWHERE, b"", 1.0).decode.name == "d1"
    with pytest.raises(NotPlaced):
        picker(follows_hints=True).place(ELSEWHERE, b"", 1.0)
