import pytest

from tandem_contract.paths import ErrorPhase, RoutingPath
from tandem_contract.plan import WARM_UP
from tandem_contract.timing import UNKNOWN, Timing
from tandem_sidecar.observability.metrics import Metrics
from tandem_sidecar.observability.observer import History, RequestObserver, left_at
from tandem_sidecar.observability.record import Leg, Phase, Record, Result

from .records import RECEIVED, ended, handed_off, load_failed, record


class World:
    def __init__(self) -> None:
        self.metrics = Metrics()
        self.observer = RequestObserver(self.metrics)

    def see(self, made: Record) -> None:
        self.observer.on_request_start(made)
        self.observer.on_request_end(made)
        self.observer.catch_up()

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
def world() -> World:
    return World()


async def test_a_hand_off_counts_once_in_everything_it_is(world: World) -> None:
    world.see(handed_off(timing=Timing(transfer=0.5)))
    path = RoutingPath.PREFILL_THEN_DECODE.value
    assert world.value("disaggregated_requests_total", routing_path=path) == 1
    assert world.value("disaggregated_prefill_duration_seconds_sum", backend="p-0") == 1.0
    assert world.value("disaggregated_decode_duration_seconds_sum", backend="d-0") == 2.0
    assert world.value("disaggregated_kv_transfer_duration_seconds_sum") == 0.5
    assert world.value("tandem_sidecar_first_byte_seconds_sum", routing_path=path) == 3.0
    assert world.value("tandem_sidecar_outcomes_total", outcome="answered") == 1
    for phase in ("prefill", "decode"):
        assert world.value("tandem_sidecar_legs_total", phase=phase, result="answered") == 1
    assert world.value("disaggregated_fallback_total") == 0


async def test_a_pairs_first_hand_off_is_no_request_of_anybodys(world: World) -> None:
    made = handed_off(timing=Timing(transfer=0.5))
    made.reason = WARM_UP
    world.see(made)
    path = RoutingPath.PREFILL_THEN_DECODE.value
    assert world.value("disaggregated_requests_total", routing_path=path) == 0
    assert world.value("disaggregated_prefill_duration_seconds_count", backend="p-0") == 0
    assert world.value("tandem_sidecar_outcomes_total", outcome="answered") == 1


async def test_what_runs_is_counted_by_kind(world: World) -> None:
    made = record(kind="responses")
    world.observer.on_request_start(made)
    assert world.value("tandem_sidecar_in_flight", kind="responses") == 1
    world.observer.on_request_end(ended(made))
    world.observer.catch_up()
    assert world.value("tandem_sidecar_in_flight", kind="responses") == 0


async def test_a_retry_is_counted_by_what_it_followed(world: World) -> None:
    made = record()
    made.path = RoutingPath.FALLBACK
    made.errors = (ErrorPhase.PREFILL, ErrorPhase.PREFILL)
    made.leg(Phase.PREFILL, "p-0", "a", 100).end(Result.BUSY, 101, status=503)
    made.leg(Phase.PREFILL, "p-1", "b", 101).end(Result.UNREACHABLE, 102)
    made.leg(Phase.DECODE, "d-0", "c", 102).end(Result.ANSWERED, 103, status=200)
    world.see(ended(made))
    assert world.value("tandem_sidecar_retries_total", result="busy") == 1
    assert world.value("tandem_sidecar_retries_total", result="unreachable") == 0
    assert world.value("disaggregated_errors_total", phase="prefill") == 2
    assert world.value("disaggregated_fallback_total") == 1


async def test_a_decode_without_its_hand_off_is_a_retry_too(world: World) -> None:
    world.see(load_failed())
    assert world.value("tandem_sidecar_retries_total", result="error") == 1
    assert world.metrics.failed_loads.value == 1


async def test_a_prefill_that_handed_nothing_over_is_no_failed_load(world: World) -> None:
    made = record()
    made.path, made.errors = RoutingPath.FALLBACK, (ErrorPhase.KV_TRANSFER,)
    made.leg(Phase.PREFILL, "p-0", "a", 100).end(Result.UNUSABLE, 101, status=200)
    made.leg(Phase.DECODE, "d-0", "b", 101).end(Result.ERROR, 102, status=500)
    world.see(ended(made))
    assert world.metrics.failed_loads.value == 0


async def test_unified_requests_are_counted_by_reason(world: World) -> None:
    made = record()
    made.path, made.reason = RoutingPath.UNIFIED, "short_prompt"
    world.see(ended(made))
    assert world.value("tandem_sidecar_unified_total", reason="short_prompt") == 1


async def test_what_is_passed_through_is_no_generation(world: World) -> None:
    world.see(ended(record(kind="passthrough")))
    page = world.metrics.page().decode()
    assert 'tandem_sidecar_outcomes_total{outcome="answered"} 1.0' in page
    assert 'disaggregated_requests_total{routing_path="unified"} 0.0' in page


@pytest.mark.parametrize(("method", "kept"), [("GET", 0), ("POST", 1)])
async def test_probes_and_scrapes_displace_nobody(method: str, kept: int) -> None:
    history = History(4)
    observer = RequestObserver(Metrics(), history)
    made = ended(record(kind="passthrough"))
    made.method = method
    observer.on_request_start(made)
    assert len(history.find(made.request_id)) == 1, "while it runs"
    observer.on_request_end(made)
    observer.catch_up()
    assert len(history.find(made.request_id)) == kept


async def test_an_engine_reports_times_of_transfers_if_it_tells_of_anything(world: World) -> None:
    assert world.metrics.engine_reports_times is None
    world.see(handed_off(timing=UNKNOWN))
    assert world.metrics.engine_reports_times is False
    world.see(handed_off(timing=Timing(queue=0.1)))
    assert world.metrics.engine_reports_times is True


async def test_a_release_is_counted_when_it_ends(world: World) -> None:
    made = record()
    made.path = RoutingPath.PREFILL_THEN_DECODE
    leg = made.leg(Phase.RELEASE, "d-0", "a", 100)
    world.see(ended(made, "abandoned"))
    assert world.value("tandem_sidecar_legs_total", phase="release", result="answered") == 0
    leg.end(Result.ANSWERED, 101, status=404)
    world.observer.on_release_end(made, leg)
    assert world.value("tandem_sidecar_legs_total", phase="release", result="answered") == 1


async def test_the_moment_a_client_left_at(world: World) -> None:
    made = record()
    assert left_at(made) == "prefill"
    prefill = made.leg(Phase.PREFILL, "p-0", "a", RECEIVED)
    assert left_at(made) == "prefill"
    prefill.end(Result.ANSWERED, RECEIVED + 1, status=200)
    assert left_at(made) == "handover"
    decode = made.leg(Phase.DECODE, "d-0", "a", RECEIVED + 1)
    assert left_at(made) == "handover"
    decode.first_byte = RECEIVED + 2
    assert left_at(made) == "decode"
    made.first_byte = RECEIVED + 2
    assert left_at(made) == "answer"
    made.path = RoutingPath.PREFILL_THEN_DECODE
    world.see(ended(made, "abandoned"))
    assert world.value("tandem_sidecar_client_left_total", moment="answer") == 1


class Sent:
    """A tracer that only counts."""

    def __init__(self) -> None:
        self.ends = 0
        self.releases = 0

    def on_request_start(self, record: Record) -> None:
        pass

    def on_request_end(self, record: Record) -> None:
        self.ends += 1

    def on_release_end(self, record: Record, leg: Leg) -> None:
        self.releases += 1


@pytest.mark.parametrize("late", [False, True])
async def test_a_release_has_a_span_of_its_own_once_its_request_was_sent(late: bool) -> None:
    sent = Sent()
    observer = RequestObserver(Metrics(), None, sent)
    made = record()
    leg = made.leg(Phase.RELEASE, "d-0", "a", 100)
    observer.on_request_start(made)
    observer.on_request_end(ended(made, "abandoned"))
    if late:
        observer.catch_up()
    leg.end(Result.ANSWERED, 101, status=404)
    observer.on_release_end(made, leg)
    observer.catch_up()
    assert (sent.ends, sent.releases) == (1, int(late))
