"""Which requests an access log may speak of."""

from tandem_epp.exchange import HttpRequest
from tandem_epp.replicas.shared_fleet import RecentRequests
from tests.epp.placement.test_picker import NOW, PickerSetup


def test_ended_requests_are_remembered_up_to_a_number() -> None:
    setup, recent = PickerSetup(d="unified"), RecentRequests(most=2)
    request = HttpRequest("POST", "/v1/completions", {})
    placements = [setup.picker.place(request, b'{"prompt": "p"}', NOW) for _ in range(4)]
    for placement in placements:
        recent.start(placement)
    for placement in placements[:3]:
        recent.end(placement)
    address = setup["d"].address or ""
    taken = [recent.take(each.decision.request_id, address) for each in placements]
    assert taken == [None, NOW, NOW, NOW], "the first one is forgotten, the last one runs"
    recent.end(placements[3])
    again = [recent.take(each.decision.request_id, address) for each in placements]
    assert again == [None] * 4, "each counts once"
