"""Replicas that share their placements: each sees the others' counts and prompts, and returns
them."""

import json
from array import array

import msgspec
import pytest

from tandem_contract.prefix import text_chain
from tandem_contract.stalls import STALL_SECONDS
from tandem_contract.timing import Timing
from tandem_epp.backends.adapters import AdapterSlots
from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.backends.health import BASE_EJECTION, EJECT_IN_A_ROW, HealthState
from tandem_epp.backends.outcomes import Outcome
from tandem_epp.backends.pods import DiscoveredBackend
from tandem_epp.estimates.engine_figures import EngineCounters, Gauges
from tandem_epp.exchange import BrokenAnswer, Ending, HttpRequest, ResponseHeaders
from tandem_epp.placement.placement import Placement
from tandem_epp.replicas.peers.frames import (
    PrefixCached,
    RequestAnswered,
    RequestEnded,
    RequestStarted,
    decode_events,
    decode_frame,
    encode_event,
    encode_frame,
    pack,
)
from tandem_epp.replicas.shared_fleet import SNAPSHOT_BYTES, SharedFleet, encode_response
from tandem_planner.cost import HANDOFF_SECONDS
from tests.epp.placement.test_picker import LONG, NOW, WEIGHTED, PickerSetup
from tests.epp.simulation.replicas import LoopbackMesh


class Replicas:
    """Pickers over the same pods, with what they share."""

    def __init__(self, *, delay: float = 0.0, **roles: str) -> None:
        self.now = NOW
        self.setups = [PickerSetup(WEIGHTED, **roles) for _ in range(2)]
        self.shared = [SharedFleet(setup.fleet, lambda: self.now) for setup in self.setups]
        self.mesh = LoopbackMesh(self.shared, delay)
        for i, (setup, shared) in enumerate(zip(self.setups, self.shared, strict=True)):
            shared.publisher = self.mesh.channel(i)
            setup.picker.observer = shared

    def counts(self, replica: int, name: str) -> tuple[int, int]:
        """In flight, and how many of these the other replica placed, once all has arrived."""
        self.mesh.advance(self.mesh.now + 1.0)
        pod = self.setups[replica][name]
        return pod.in_flight, pod.remote_in_flight


def test_a_placement_counts_at_both_replicas_until_each_of_its_phases_ends() -> None:
    replicas = Replicas(d="decode", p="prefill")
    placement, _ = replicas.setups[0].place()
    assert [replicas.counts(0, name) for name in "dp"] == [(1, 0), (1, 0)]
    assert [replicas.counts(1, name) for name in "dp"] == [(1, 1), (1, 1)]
    placement.on_response_headers(ResponseHeaders(None, 200), NOW)
    assert [replicas.counts(1, name) for name in "dp"] == [(1, 1), (0, 0)]
    placement.end(NOW)
    assert [replicas.counts(1, name) for name in "dp"] == [(0, 0), (0, 0)]


def test_requests_of_two_replicas_are_spread_like_those_of_one() -> None:
    replicas = Replicas(a="unified", b="unified", c="unified")
    chosen = []
    for i in range(12):
        placement, _ = replicas.setups[i % 2].place(prompt="short")
        chosen.append(placement.decode.name)
        replicas.mesh.advance(float(i + 1))
    assert sorted(map(chosen.count, "abc")) == [4, 4, 4]


def test_the_metric_counts_own_requests_only() -> None:
    replicas = Replicas(d="decode")
    replicas.setups[0].place(prompt="short")
    assert replicas.counts(1, "d") == (1, 1)
    registry = replicas.setups[1].metrics.registry
    assert registry.get_sample_value("tandem_epp_in_flight", {"backend": "d"}) == 0


def test_a_prompt_is_cached_for_the_other_replica_once_it_is_answered() -> None:
    replicas = Replicas(d1="decode", d2="decode", p="prefill")
    placement, first = replicas.setups[0].place(LONG)
    replicas.mesh.advance(1.0)
    _, unanswered = replicas.setups[1].place(LONG)
    assert unanswered.cached_tokens == 0
    placement.on_response_headers(ResponseHeaders(None, 200), NOW)
    replicas.mesh.advance(2.0)
    _, answered = replicas.setups[1].place(LONG)
    assert (answered.decode.name, answered.cached_tokens) == (first.decode.name, 496)


def test_a_request_that_an_alternate_served_counts_there() -> None:
    replicas = Replicas(d1="unified", d2="unified")
    placement, _ = replicas.setups[0].place(prompt="short")
    (other,) = {"d1", "d2"} - {placement.decode.name}
    assert replicas.counts(1, other) == (0, 0)
    served = replicas.setups[0][other].address
    placement.on_response_headers(ResponseHeaders(None, 200, served=served), NOW)
    assert replicas.counts(1, other) == (1, 1)
    placement.end(NOW)
    assert replicas.counts(1, "d1") == replicas.counts(1, "d2") == (0, 0)


def test_a_failed_prompt_is_cached_nowhere() -> None:
    replicas = Replicas(d="decode", p="prefill")
    placement, _ = replicas.setups[0].place(LONG)
    placement.on_response_headers(ResponseHeaders(None, 500), NOW)
    replicas.mesh.advance(1.0)
    _, plan = replicas.setups[1].place(LONG)
    assert plan.cached_tokens == 0


def test_a_snapshot_has_what_has_not_ended() -> None:
    replicas = Replicas(d="decode", p="prefill")
    ended, _ = replicas.setups[0].place()
    answered, _ = replicas.setups[0].place()
    waiting, _ = replicas.setups[0].place(prompt="short")
    ended.end(NOW)
    answered.on_response_headers(ResponseHeaders(None, 200), NOW)
    events = list(replicas.shared[0].snapshot())
    assert [
        (event.request, event.status, event.prefill)
        for event in events
        if isinstance(event, RequestStarted)
    ] == [(waiting.number, 0, ()), (answered.number, 200, ("p",))]


def test_a_snapshot_is_bounded_and_names_every_request() -> None:
    replicas = Replicas(d="decode")
    prompt = "long prompt " * 100_000
    for _ in range(10):
        replicas.setups[0].place(prompt)
    events = [e for e in replicas.shared[0].snapshot() if isinstance(e, RequestStarted)]
    assert len(events) == 10
    assert 0 < sum(len(event.chain) for event in events) <= SNAPSHOT_BYTES
    assert events[0].chain


def test_a_snapshot_replaces_what_was_known_of_a_peer() -> None:
    setup = PickerSetup(d="decode", p="prefill")
    shared = SharedFleet(setup.fleet)
    shared.apply("peer", RequestStarted(1, "d", ("p",)))
    shared.apply("other", RequestStarted(1, "d"))
    assert (setup["d"].in_flight, setup["p"].in_flight) == (2, 1)
    shared.reset("peer")
    assert (setup["d"].in_flight, setup["p"].in_flight) == (1, 0)
    shared.reset("peer")
    shared.reset("unheard of")
    assert setup["d"].in_flight == 1


@pytest.mark.parametrize(
    "event",
    [
        RequestAnswered(9, encode_response(ResponseHeaders(None))),
        RequestEnded(9),
        RequestStarted(9, "unknown", ("unknown",)),
    ],
    ids=["answered", "ended", "pod"],
)
def test_what_this_replica_does_not_know_changes_nothing(event: object) -> None:
    setup = PickerSetup(d="decode")
    shared = SharedFleet(setup.fleet)
    shared.apply("peer", event)  # type: ignore[arg-type]
    shared.apply("peer", RequestEnded(9))
    assert setup["d"].in_flight == 0


def test_a_request_on_a_pod_that_left_is_returned_to_it_and_not_to_its_successor() -> None:
    setup = PickerSetup(d="decode")
    shared = SharedFleet(setup.fleet)
    shared.apply("peer", RequestStarted(1, "d", chain=pack(array("Q", [1, 2]))))
    old = setup["d"]
    setup.fleet.apply([])
    shared.apply("peer", RequestEnded(1))
    assert (old.in_flight, old.remote_in_flight) == (0, 0)


def test_without_connected_peers_no_event_is_made() -> None:
    setup = PickerSetup(d="decode")
    shared = SharedFleet(setup.fleet)

    class Alone:
        has_peers, rank = False, (0, 1)

        def publish(self, event: object) -> None:
            raise AssertionError(event)

    shared.publisher, setup.picker.observer = Alone(), shared
    placement, _ = setup.place()
    placement.on_response_headers(ResponseHeaders(None, 200), NOW)
    assert sum(isinstance(event, RequestStarted) for event in shared.snapshot()) == 1
    placement.end(NOW)
    assert not any(isinstance(event, RequestStarted) for event in shared.snapshot())


def fail(setup: PickerSetup, name: str) -> None:
    """Place requests on a pod until it is ejected for its errors."""
    for number in range(EJECT_IN_A_ROW):
        placement, _ = setup.place(prompt=f"short {number}")
        served = setup[name].address
        placement.on_response_headers(ResponseHeaders(None, 500, served=served), NOW)
        placement.end(NOW)


def test_a_pod_that_fails_at_one_replica_is_ejected_by_all() -> None:
    replicas = Replicas(d1="unified", d2="unified")
    fail(replicas.setups[0], "d1")
    replicas.mesh.advance(1.0)
    assert all(setup["d1"].health.is_ejected for setup in replicas.setups)
    counts = [setup["d1"].health.outcomes[Outcome.ERROR] for setup in replicas.setups]
    assert counts == [EJECT_IN_A_ROW, 0], "the sum over the replicas counts each request once"
    _, plan = replicas.setups[1].place(prompt="short")
    assert plan.decode.name == "d2"
    rates = [setup["d1"].health.failure_rate for setup in replicas.setups]
    assert rates[0] == rates[1] > 0


def test_a_request_that_every_pod_fails_ejects_none_at_any_replica() -> None:
    replicas = Replicas(d1="unified", d2="unified", d3="unified")
    met = set()
    for number in range(14):
        # Both replicas meet the client's retries.
        placement, plan = replicas.setups[number % 2].place(prompt="bad")
        met.add(plan.decode.name)
        placement.on_response_headers(ResponseHeaders(None, 500), NOW)
        placement.end(NOW)
        replicas.mesh.advance(1.0)
    assert len(met) > 1
    for setup in replicas.setups:
        assert not any(pod.health.is_ejected for pod in setup.fleet)
        assert {pod.health.failure_rate for pod in setup.fleet} == {0.0}


def test_one_replicas_probe_is_known_to_the_other_and_ends_the_ejection_there() -> None:
    replicas = Replicas(d1="unified", d2="unified")
    for setup in replicas.setups:
        setup.fleet.ejections.eject(setup["d1"], NOW - 60)
        setup.fleet.ejections.advance(NOW)
    replicas.setups[0]["d2"].in_flight = 9
    probe, plan = replicas.setups[0].place(prompt="short")
    assert plan.decode.name == "d1"
    replicas.mesh.advance(2.0)
    assert replicas.setups[1]["d1"].health.state is HealthState.PROBING
    probe.on_response_headers(ResponseHeaders(None, 200), NOW)
    replicas.mesh.advance(3.0)
    assert replicas.setups[1]["d1"].health.state is HealthState.SERVING


def test_a_snapshot_has_ejections_and_what_pods_cache() -> None:
    replicas = Replicas(delay=float("inf"), d1="unified", d2="unified")
    told, joining = replicas.setups
    placement, plan = told.place(LONG)
    placement.on_response_headers(ResponseHeaders(None, 200), NOW)
    placement.end(NOW)
    (other,) = {"d1", "d2"} - {plan.decode.name}
    fail(told, other)
    for _ in range(2):
        for event in replicas.shared[0].snapshot():
            replicas.shared[1].apply("peer", event)
    assert joining[other].health.is_ejected
    assert joining[other].health.ejections == 1, "the second snapshot tells nothing new"
    _, repeated = joining.place(LONG)
    assert repeated.decode.name == plan.decode.name
    assert repeated.cached_tokens > 400


def test_a_replica_that_joins_knows_what_failed_and_how_long_texts_are() -> None:
    replicas = Replicas(delay=float("inf"), d1="unified", d2="unified")
    told, joining = replicas.setups
    for pod in told.fleet:
        pod.health.eject(NOW - 100)
        pod.health.on_new_process(NOW - 100)
    placement, _ = told.place(prompt="short")
    failing = placement.decode.name
    placement.on_response_headers(ResponseHeaders(None, 500), NOW)
    placement.end(NOW)
    told.fleet.token_scales.learn("m", 1000, 2000)
    told[failing].token_scale = told.fleet.token_scales.scale("m")
    for _ in range(2):
        for event in replicas.shared[0].snapshot():
            replicas.shared[1].apply("peer", event)
    here, there = told[failing].health, joining[failing].health
    assert there.failure_rate == here.failure_rate > 0
    assert joining.fleet.token_scales.scale("m") == told.fleet.token_scales.scale("m") > 1
    assert joining[failing].token_scale == told[failing].token_scale
    for health in (here, there):
        health.eject(NOW)
    assert there.until == here.until > NOW + BASE_EJECTION, "it was ejected before"


def test_a_replica_that_joins_knows_which_adapters_are_loaded() -> None:
    replicas = Replicas(delay=float("inf"), d1="unified", d2="unified")
    told, joining = replicas.setups
    told["d1"].adapters.apply(AdapterSlots(frozenset({"x"}), slots=2))
    told["d1"].adapters.apply(AdapterSlots(slots=2))
    told["d1"].adapters.use("y")
    for _ in range(2):
        for event in replicas.shared[0].snapshot():
            frame = encode_frame(1, 0, [encode_event(event)], is_snapshot=True)
            [decoded] = decode_events(decode_frame(frame))
            assert decoded is not None
            replicas.shared[1].apply("peer", decoded)
    assert joining.fleet.is_adapter("x")
    assert joining["d1"].adapters.resident == ("x", "y")
    assert joining["d2"].adapters.resident == ()


def test_a_replica_that_joins_knows_what_first_tokens_take_beyond_the_terms() -> None:
    replicas = Replicas(delay=float("inf"), d="decode", p="prefill")
    told, joining = (setup.fleet.overheads for setup in replicas.setups)
    for _ in range(4):
        told.learn("prefill_then_decode", 0.05, NOW - 500)
        told.learn("unified", 0.02, NOW)
    for _ in range(2):
        for event in replicas.shared[0].snapshot():
            replicas.shared[1].apply("peer", event)
    assert list(joining.latest) == list(told.latest)
    assert joining.handoff(NOW) == pytest.approx(0.03)
    assert joining.handoff(NOW + 200) == HANDOFF_SECONDS, "it knows how old the latest split is"


def test_a_snapshot_is_needed_when_a_pod_that_a_peer_told_of_is_discovered() -> None:
    setup = PickerSetup(d="decode")
    shared = SharedFleet(setup.fleet)
    backends = [DiscoveredBackend(pod.backend) for pod in setup.fleet]
    setup.fleet.apply([])
    shared.apply("peer", RequestStarted(1, "d"))
    shared.apply("peer", RequestStarted(2, "another fleet's"))
    assert not shared.lacks_snapshot("peer"), "still unknown"
    setup.fleet.apply(backends)
    assert shared.lacks_snapshot("peer")
    assert not shared.lacks_snapshot("other")
    shared.reset("peer")
    assert not shared.lacks_snapshot("peer")


def test_a_malformed_size_leaves_no_count() -> None:
    setup = PickerSetup(d="decode")
    shared = SharedFleet(setup.fleet)
    size = msgspec.Raw(msgspec.msgpack.encode({"prompt": "long"}))
    with pytest.raises(msgspec.ValidationError):
        shared.apply("peer", RequestStarted(1, "d", size=size))
    shared.reset("peer")
    assert (setup["d"].in_flight, setup["d"].estimates.awaiting_prefill) == (0, 0)


@pytest.mark.interpreted
def test_prefixes_in_a_snapshot_are_the_latest_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicas = Replicas(d="unified")
    for prompt in ("a", "b", "c"):
        placement, _ = replicas.setups[0].place(prompt * 4000)
        placement.on_response_headers(ResponseHeaders(None, 200), NOW)
        placement.end(NOW)
    events = list(replicas.shared[0].snapshot())
    assert [type(event) for event in events] == [PrefixCached] * 3
    size = len(pack(text_chain(b"x" * 4000)))
    monkeypatch.setattr("tandem_epp.replicas.shared_fleet.SNAPSHOT_BYTES", 2 * size)
    assert list(replicas.shared[0].snapshot()) == events[1:]


def broken(placement: Placement, backend: str | None = None) -> BrokenAnswer:
    """What an access log says of a request."""
    decision, address = placement.decision, backend or placement.decode.address or ""
    return BrokenAnswer(address, decision.decided_at, decision.request_id)


@pytest.mark.parametrize("logs", [0, 1], ids=["placed it", "did not"])
@pytest.mark.parametrize("has_ended", [False, True])
def test_a_broken_answer_counts_once_at_all_replicas(logs: int, *, has_ended: bool) -> None:
    """Whichever replica Envoy logs to."""
    replicas = Replicas(d="decode")
    placement, _ = replicas.setups[0].place(prompt="short")
    if has_ended:
        placement.on_response_headers(ResponseHeaders(None, 200), NOW)
        placement.end(NOW)
    for _ in range(2):
        replicas.shared[logs].on_broken(broken(placement), NOW)
        for _ in range(3):
            replicas.mesh.advance(replicas.mesh.now + 1.0)
    rates = [setup["d"].health.failure_rate for setup in replicas.setups]
    assert rates[0] == rates[1] > 0
    counts = [setup["d"].health.outcomes[Outcome.BROKEN] for setup in replicas.setups]
    assert counts == [1, 0]


@pytest.mark.parametrize("logs", [0, 1], ids=["placed it", "did not"])
@pytest.mark.parametrize("is_logged_first", [False, True])
def test_a_stall_that_metrics_and_the_log_show_counts_once(
    logs: int, *, is_logged_first: bool
) -> None:
    replicas = Replicas(d="decode")
    for setup in replicas.setups:
        setup["d"].apply_scrape(counted(9), NOW - 1)
    placement, _ = replicas.setups[0].place(prompt="short")
    placement.on_response_headers(ResponseHeaders(None, 200, is_stream=True), NOW)
    for setup in replicas.setups:
        setup["d"].apply_scrape(counted(9), NOW + STALL_SECONDS)

    def log() -> None:
        idle = msgspec.structs.replace(broken(placement), ending=Ending.IDLE)
        replicas.shared[logs].on_broken(idle, NOW + STALL_SECONDS)
        replicas.mesh.advance(replicas.mesh.now + 1.0)

    if is_logged_first:
        log()
    placement.end(NOW + STALL_SECONDS)
    log()
    counts = [setup["d"].health.outcomes[Outcome.STALLED] for setup in replicas.setups]
    assert counts == [1, 0], "an outcome of a request of the first replica"


def counted(tokens: float) -> ScrapeResult:
    """A scrape of a pod that has generated so many tokens and computes one request."""
    return ScrapeResult(Gauges(running=1), b"", counters=EngineCounters(generated_tokens=tokens))


def test_invented_log_entries_count_nowhere() -> None:
    replicas = Replicas(d1="unified", d2="unified")
    placement, plan = replicas.setups[0].place(prompt="short")
    (other,) = {"d1", "d2"} - {plan.decode.name}
    entries = [BrokenAnswer(pod.address or "", NOW, "invented") for pod in replicas.setups[0].fleet]
    entries += [BrokenAnswer(entry.backend, NOW) for entry in entries]
    entries.append(broken(placement, replicas.setups[0][other].address))
    for _ in range(EJECT_IN_A_ROW):
        for entry in entries:
            replicas.shared[0].on_broken(entry, NOW)
        replicas.mesh.advance(replicas.mesh.now + 1.0)
    assert all(not pod.health.failure_rate for setup in replicas.setups for pod in setup.fleet)


def test_prefills_under_way_and_what_they_took_are_known_to_both() -> None:
    replicas = Replicas(d="unified")
    here, there = (setup["d"].estimates for setup in replicas.setups)
    for seconds in (9.0, 0.2, 0.2, 0.2):
        replicas.now += 100.0
        request = HttpRequest("POST", "/v1/completions", {})
        body = json.dumps({"model": "m", "prompt": LONG, "stream": True}).encode()
        placement = replicas.setups[0].picker.place(request, body, replicas.now)
        replicas.mesh.advance(replicas.mesh.now + 1.0)
        assert there.figures(replicas.now) == here.figures(replicas.now)
        assert len(there.queue) == 1
        timing = Timing(queue=0.0, compute=seconds, cached=0, computed=500).encode()
        placement.on_response_headers(ResponseHeaders(timing, 200), replicas.now + seconds)
        replicas.now += seconds
        replicas.mesh.advance(replicas.mesh.now + 1.0)
        assert (len(there.queue), there.decodes) == (0, 1)
        placement.end(replicas.now)
        replicas.mesh.advance(replicas.mesh.now + 1.0)
        assert there.decodes == 0
    assert there.prefill.count == here.prefill.count > 0
    assert there.prefill.cost == here.prefill.cost
    joining = PickerSetup(d="unified")
    shared = SharedFleet(joining.fleet, lambda: replicas.now)
    for event in replicas.shared[0].snapshot():
        shared.apply("peer", event)
    assert joining["d"].estimates.prefill.cost == here.prefill.cost


def test_nothing_is_left_of_the_requests_of_a_peer_that_is_gone() -> None:
    replicas = Replicas(d="decode", p="prefill")
    first, _ = replicas.setups[0].place()
    replicas.setups[0].place()
    first.on_response_headers(ResponseHeaders(None, 200), NOW)
    replicas.mesh.advance(1.0)
    setup = replicas.setups[1]
    replicas.shared[1].reset("0")
    for name in "dp":
        pod = setup[name]
        assert (pod.in_flight, pod.remote_in_flight) == (0, 0)
        assert (len(pod.estimates.queue), pod.estimates.decodes) == (0, 0)
        assert pod.estimates.awaiting_prefill == 0
