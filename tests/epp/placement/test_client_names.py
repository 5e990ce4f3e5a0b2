"""Nothing grows with what clients choose: models, ids of requests and sessions, headers."""

import gc
import json
import tracemalloc
from collections.abc import Iterator

import pytest

from tandem_contract import headers as wire
from tandem_contract.timing import Timing
from tandem_epp.backends.pods import DiscoveredBackend
from tandem_epp.exchange import BrokenAnswer, HttpRequest, NotPlaced, ResponseHeaders
from tandem_epp.placement.preparation import MAX_MODEL
from tandem_epp.replicas.shared_fleet import RecentRequests, SharedFleet
from tandem_epp.server.ext_proc.messages import BodyMode, RequestBody, RequestHeaders
from tandem_epp.server.ext_proc.stream import ExtProcStream

from .test_picker import NOW, PickerSetup

pytestmark = pytest.mark.long

REQUESTS = 1500
"""In each round; the first fills what is bounded."""
PLUGINS = """
plugins:
- {type: session-affinity-scorer}
- {type: prefix-cache-scorer}
- {type: no-hit-lru-scorer}
- {type: lora-affinity-scorer}
- {type: burst-prefix-cache-producer}
"""


@pytest.fixture(params=["{}", PLUGINS], ids=["cost", "scorers"])
def setup(request: pytest.FixtureRequest) -> PickerSetup:
    """Backends that list no model, so that clients choose any name."""
    setup = PickerSetup(request.param, d="decode", p="prefill")
    setup.fleet.apply(
        DiscoveredBackend(type(pod.backend)(**{**_fields(pod.backend), "models": ()}))
        for pod in list(setup.fleet)
    )
    setup.fleet.prefixes.limit_bytes = 100_000
    shared = SharedFleet(setup.fleet)
    shared._recent = RecentRequests(most=200)
    setup.picker.observer = shared
    return setup


def _fields(backend: object) -> dict[str, object]:
    return {name: getattr(backend, name) for name in backend.__struct_fields__}  # type: ignore[attr-defined]


def requests(start: int) -> Iterator[tuple[HttpRequest, bytes]]:
    for number in range(start, start + REQUESTS):
        name = f"name {number} "
        headers = {wire.REQUEST_ID: f"id-{number}", "x-session-token": name * 9, name: name}
        headers[wire.TRACEPARENT] = f"00-{number:032x}-{number:016x}-01"
        path = "/v1/completions" if number % 3 else f"/other/{number}"
        members = {"model": name * 9, "prompt": name * 60, "cache_salt": name, name: name}
        yield HttpRequest("POST", path, headers), json.dumps(members).encode()


def serve(setup: PickerSetup, start: int) -> None:
    """Serve a round of requests to their end."""
    shared = setup.picker.observer
    assert isinstance(shared, SharedFleet)
    timing = Timing(queue=0.0, compute=0.1, cached=16, computed=300).encode()
    for number, (request, body) in enumerate(requests(start)):
        stream = ExtProcStream(setup.picker, 1 << 20)
        now = NOW + 0.01 * (start + number)
        stream.receive(RequestHeaders(request, False, BodyMode.BUFFERED), now)
        stream.receive(RequestBody(body, True), now)
        response = ResponseHeaders(timing, 200, f"pod {number}", f"path {number}", f"{number}")
        stream.receive(response, now)
        stream.close(now)
        shared.on_broken(BrokenAnswer("10.0.0.1:8000", now, f"unknown {number}"), now)


def test_thousands_of_names_leave_no_more_than_the_first_ones(setup: PickerSetup) -> None:
    serve(setup, 0)
    # What the first round left is replaced in the second: all that a table has then is traced.
    tracemalloc.start()
    try:
        serve(setup, REQUESTS)
        gc.collect()
        before = tracemalloc.take_snapshot()
        serve(setup, 2 * REQUESTS)
        gc.collect()
        after = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    grown = {s.traceback[0]: s.count_diff for s in after.compare_to(before, "lineno")}
    # msgspec keeps up to 512 short names of members; what grows would keep all of these names.
    assert {place: count for place, count in grown.items() if count >= REQUESTS // 2} == {}
    assert sum(pod.in_flight for pod in setup.fleet) == 0


def test_metrics_do_not_grow_with_names(setup: PickerSetup) -> None:
    def samples() -> int:
        return sum(len(family.samples) for family in setup.metrics.registry.collect())

    serve(setup, 0)
    before = samples()
    serve(setup, REQUESTS)
    assert samples() <= before + 1


def test_a_models_name_is_bounded(setup: PickerSetup) -> None:
    long = json.dumps({"model": "m" * (MAX_MODEL + 1), "prompt": "x"}).encode()
    with pytest.raises(NotPlaced) as refusal:
        setup.picker.place(HttpRequest("POST", "/v1/completions", {}), long, NOW)
    assert refusal.value.reply.status == 400
