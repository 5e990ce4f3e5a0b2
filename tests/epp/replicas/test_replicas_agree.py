"""Whatever happens to requests, and however they end: replicas that share it know the same."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_contract.timing import Timing
from tandem_epp.backends.adapters import AdapterSlots
from tandem_epp.backends.health import EJECT_IN_A_ROW
from tandem_epp.exchange import BrokenAnswer, HttpRequest, ResponseHeaders
from tandem_epp.placement.placement import Placement
from tandem_epp.replicas.shared_fleet import SharedFleet
from tests.epp.placement.test_picker import LONG, NOW, PickerSetup
from tests.epp.simulation.replicas import LoopbackMesh

ROLES = {"d1": "decode", "d2": "decode", "p1": "prefill", "p2": "prefill"}
RESET = "upstream_reset_before_response_started{connection_termination}"
RESPONSES = {
    "answered": ResponseHeaders(
        Timing(queue=0.0, compute=0.4, cached=16, computed=480).encode(), 200
    ),
    "client error": ResponseHeaders(None, 400),
    "error": ResponseHeaders(None, 500),
    "busy": ResponseHeaders(None, 503, path="prefill_then_decode"),
    "reset": ResponseHeaders(None, 503, details=RESET),
    "timeout": ResponseHeaders(None, 504, details="upstream_response_timeout"),
}


@dataclass
class Agreement:
    """Pickers over the same pods; what one does reaches the others at the next `settle`."""

    replicas: int
    now: float = NOW
    under_way: list[tuple[int, Placement]] = field(default_factory=list)
    """Replica and placement."""

    def __post_init__(self) -> None:
        self.setups = [PickerSetup(**ROLES) for _ in range(self.replicas)]
        self.shared = [SharedFleet(setup.fleet, lambda: self.now) for setup in self.setups]
        self.mesh = LoopbackMesh(self.shared, 0.001)
        for i, (setup, shared) in enumerate(zip(self.setups, self.shared, strict=True)):
            shared.publisher = self.mesh.channel(i)
            setup.picker.observer = shared

    def settle(self) -> None:
        """Let all events arrive, and those that they cause."""
        for _ in range(2):
            # Twenty times the median delay of an event.
            self.now += 0.02
            self.mesh.advance(self.now)

    def place(self, replica: int, model: str = "m", prompt: str = LONG) -> Placement:
        body = f'{{"model": "{model}", "prompt": "{prompt}", "stream": true}}'.encode()
        request = HttpRequest("POST", "/v1/completions", {})
        placement = self.setups[replica].picker.place(request, body, self.now)
        self.under_way.append((replica, placement))
        return placement

    def knowledge(self, replica: int) -> list[object]:
        """What a replica knows of each pod that the others must know as well."""
        setup = self.setups[replica]
        return [
            (
                pod.name,
                pod.in_flight,
                pod.token_scale,
                pod.health.state,
                pod.health.ejections,
                pytest.approx(pod.health.failure_rate, rel=1e-2),
                len(pod.estimates.queue),
                (pod.estimates.decodes, pod.estimates.awaiting_prefill),
                (fit := pod.estimates.prefill).count,
                # A pod without samples takes over those of alike pods at a replica's next decision.
                fit.count and pytest.approx(fit.cost.seconds(1000), rel=1e-3),
                setup.fleet.prefixes._cached.tokens(pod),
            )
            for pod in setup.fleet
        ]

    def leave_ends(self) -> None:
        """What ends by time ends a little later where it was heard of: wait until all agree."""
        pods = [pod for setup in self.setups for pod in setup.fleet]
        while any(abs(pod.health.until - self.now) < 0.1 for pod in pods):
            self.now += 0.2

    def assert_equal(self) -> None:
        self.leave_ends()
        for setup in self.setups:
            setup.fleet.ejections.advance(self.now)
            # Rates fade lazily, at different times.
            for pod in setup.fleet:
                pod.health.decay(self.now)
        known = [self.knowledge(replica) for replica in range(self.replicas)]
        for other in known[1:]:
            assert other == known[0]


step = st.tuples(
    st.sampled_from(["place", "place", "respond", "respond", "break", "end", "end"]),
    st.integers(0, 2),
    st.sampled_from(sorted(RESPONSES)),
)


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(step, max_size=40), replicas=st.integers(2, 3))
def test_replicas_know_the_same_whatever_happens(
    steps: list[tuple[str, int, str]], replicas: int
) -> None:
    agreement = Agreement(replicas)
    for action, number, response in steps:
        if action == "place":
            agreement.place(number % replicas)
        elif agreement.under_way:
            index = number % len(agreement.under_way)
            _, placement = agreement.under_way[index]
            if action == "respond":
                placement.on_response_headers(RESPONSES[response], agreement.now)
            elif action == "break":
                address = placement.decode.address or ""
                placed = placement.decision
                broken = BrokenAnswer(address, placed.decided_at, placed.request_id)
                # Envoy logs to any replica.
                agreement.shared[len(response) % replicas].on_broken(broken, agreement.now)
            else:
                del agreement.under_way[index]
                placement.end(agreement.now)
        agreement.settle()
        agreement.assert_equal()
        # No pause or ejection ends at such a distance: replicas know of it up to 0.04 s apart.
        agreement.now += 2.5
        agreement.leave_ends()
    for _, placement in agreement.under_way:
        placement.end(agreement.now)
    agreement.settle()
    agreement.assert_equal()
    assert all(pod.in_flight == 0 for setup in agreement.setups for pod in setup.fleet)


def test_how_many_tokens_texts_have_is_learned_by_all() -> None:
    agreement = Agreement(2)
    placement = agreement.place(0)
    placement.on_response_headers(
        ResponseHeaders(Timing(prompt=2000, cached=0).encode(), 200), agreement.now
    )
    agreement.settle()
    first, second = (setup.fleet.token_scales.scale("m") for setup in agreement.setups)
    assert first == second > 1


def test_what_first_tokens_take_beyond_the_terms_is_learned_by_all() -> None:
    agreement = Agreement(2)
    for replica in (0, 1) * 4:
        placement = agreement.place(replica)
        timing = Timing(queue=0.0, compute=0.0, transfer=0.0).encode()
        answer = ResponseHeaders(timing, 200, path=placement.decision.path, is_stream=True)
        placement.on_response_headers(answer, agreement.now)
        placement.end(agreement.now)
        agreement.settle()
    first, second = (setup.fleet.overheads for setup in agreement.setups)
    learned = [(path, seconds) for path, seconds, _ in first.latest]
    assert sum(len(seconds) for _, seconds in learned) == 8
    assert learned == [(path, seconds) for path, seconds, _ in second.latest]


def test_an_adapter_placed_by_one_replica_is_resident_for_all() -> None:
    agreement = Agreement(2)
    for setup in agreement.setups:
        setup.fleet.learn_adapters(AdapterSlots(waiting=frozenset({"m"}), slots=2))
    placement = agreement.place(0)
    agreement.settle()
    (there,) = [p for p in agreement.setups[1].fleet if p.name == placement.decode.name]
    assert there.adapters.load_seconds("m") == 0


def test_a_replica_that_joined_after_the_first_failures_ejects_with_the_others() -> None:
    agreement = Agreement(2)
    early, late = agreement.setups
    agreement.mesh.delay = float("inf")
    for failure in range(EJECT_IN_A_ROW):
        if failure == EJECT_IN_A_ROW - 1:
            agreement.mesh.delay = 0.001
        # One prompt that fails again and again is taken for the client's fault.
        placement = agreement.place(0, prompt=f"{LONG} {failure}")
        served = early["d1"].address
        placement.on_response_headers(ResponseHeaders(None, 500, served=served), agreement.now)
        placement.end(agreement.now)
    agreement.settle()
    assert early["d1"].health.is_ejected
    assert late["d1"].health.is_ejected
    assert late["d1"].health.until == pytest.approx(early["d1"].health.until, abs=2)


def test_requests_of_a_replica_that_stops_count_until_it_is_forgotten() -> None:
    agreement = Agreement(2)
    placement = agreement.place(0)
    agreement.settle()
    agreement.shared[0].leave()
    # What the server does at its stop: the stream ends, and Envoy goes on without it.
    placement.end(agreement.now)
    agreement.settle()
    pods = list(agreement.setups[1].fleet)
    assert sum(pod.in_flight for pod in pods) == 2, "one decode pod, one prefill pod"
    agreement.shared[1].reset("0")
    assert sum(pod.in_flight for pod in pods) == 0
