import msgspec
import pytest

from tandem_contract.paths import ErrorPhase, RoutingPath
from tandem_contract.plan import WARM_UP
from tandem_contract.request_ids import attempt_id
from tandem_contract.timing import UNKNOWN, Timing
from tandem_contract.trace import MAX_SAME_ID, SidecarTrace
from tandem_sidecar.observability.metrics import Metrics
from tandem_sidecar.observability.observer import History, RequestObserver, left_at, to_trace
from tandem_sidecar.observability.record import Leg, Phase, Record, Result

from .records import RECEIVED, UNIX, end_record, handed_off, load_failed, record


class Setup:
    def __init__(self) -> None:
        self.metrics = Metrics()
        self.observer = RequestObserver(self.metrics)

    def process(self, request_record: Record) -> None:
        self.observer.on_request_start(request_record)
        self.observer.on_request_end(request_record)
        self.observer.catch_up()

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
def setup() -> Setup:
    return Setup()


async def test_a_hand_off_is_counted_once_in_each_metric(setup: Setup) -> None:
    setup.process(handed_off(timing=Timing(transfer=0.5)))
    path = RoutingPath.PREFILL_THEN_DECODE.value
    assert setup.value("disaggregated_requests_total", routing_path=path) == 1
    assert setup.value("disaggregated_prefill_duration_seconds_sum", backend="p-0") == 1.0
    assert setup.value("disaggregated_decode_duration_seconds_sum", backend="d-0") == 2.0
    assert setup.value("disaggregated_kv_transfer_duration_seconds_sum") == 0.5
    assert setup.value("tandem_sidecar_first_byte_seconds_sum", routing_path=path) == 3.0
    assert setup.value("tandem_sidecar_outcomes_total", outcome="answered") == 1
    for phase in ("prefill", "decode"):
        assert setup.value("tandem_sidecar_legs_total", phase=phase, result="answered") == 1
    assert setup.value("disaggregated_fallback_total") == 0


async def test_a_warm_up_is_not_counted_as_a_request(setup: Setup) -> None:
    request_record = handed_off(timing=Timing(transfer=0.5))
    request_record.reason = WARM_UP
    setup.process(request_record)
    path = RoutingPath.PREFILL_THEN_DECODE.value
    assert setup.value("disaggregated_requests_total", routing_path=path) == 0
    assert setup.value("disaggregated_prefill_duration_seconds_count", backend="p-0") == 0
    assert setup.value("tandem_sidecar_outcomes_total", outcome="answered") == 1


async def test_running_requests_are_counted_by_kind(setup: Setup) -> None:
    request_record = record(kind="responses")
    setup.observer.on_request_start(request_record)
    assert setup.value("tandem_sidecar_in_flight", kind="responses") == 1
    setup.observer.on_request_end(end_record(request_record))
    setup.observer.catch_up()
    assert setup.value("tandem_sidecar_in_flight", kind="responses") == 0


async def test_a_retry_is_counted_by_the_result_of_the_failed_leg(setup: Setup) -> None:
    request_record = record()
    request_record.path = RoutingPath.FALLBACK
    request_record.errors = (ErrorPhase.PREFILL, ErrorPhase.PREFILL)
    request_record.leg(Phase.PREFILL, "p-0", "a", 100).end(Result.BUSY, 101, status=503)
    request_record.leg(Phase.PREFILL, "p-1", "b", 101).end(Result.UNREACHABLE, 102)
    request_record.leg(Phase.DECODE, "d-0", "c", 102).end(Result.ANSWERED, 103, status=200)
    setup.process(end_record(request_record))
    assert setup.value("tandem_sidecar_retries_total", result="busy") == 1
    assert setup.value("tandem_sidecar_retries_total", result="unreachable") == 0
    assert setup.value("disaggregated_errors_total", phase="prefill") == 2
    assert setup.value("disaggregated_fallback_total") == 1


async def test_a_decode_without_the_hand_off_is_a_retry(setup: Setup) -> None:
    setup.process(load_failed())
    assert setup.value("tandem_sidecar_retries_total", result="error") == 1
    assert setup.metrics.failed_loads.value == 1


async def test_a_load_that_fails_before_the_prefill_ends_is_counted_once(setup: Setup) -> None:
    """With concurrent legs the engine counts the failure, too, and the prefill is aborted."""
    request_record = load_failed()
    request_record.legs[0].result = Result.ABORTED
    setup.process(request_record)
    assert setup.metrics.failed_loads.value == 1


async def test_an_unusable_prefill_answer_is_not_a_failed_load(setup: Setup) -> None:
    request_record = record()
    request_record.path, request_record.errors = RoutingPath.FALLBACK, (ErrorPhase.KV_TRANSFER,)
    request_record.leg(Phase.PREFILL, "p-0", "a", 100).end(Result.UNUSABLE, 101, status=200)
    request_record.leg(Phase.DECODE, "d-0", "b", 101).end(Result.ERROR, 102, status=500)
    setup.process(end_record(request_record))
    assert setup.metrics.failed_loads.value == 0


async def test_unified_requests_are_counted_by_reason(setup: Setup) -> None:
    request_record = record()
    request_record.path, request_record.reason = RoutingPath.UNIFIED, "short_prompt"
    setup.process(end_record(request_record))
    assert setup.value("tandem_sidecar_unified_total", reason="short_prompt") == 1


async def test_a_passed_through_request_is_not_counted_as_a_generation(setup: Setup) -> None:
    setup.process(end_record(record(kind="passthrough")))
    page = setup.metrics.page().decode()
    assert 'tandem_sidecar_outcomes_total{outcome="answered"} 1.0' in page
    assert 'disaggregated_requests_total{routing_path="unified"} 0.0' in page


@pytest.mark.parametrize(("method", "count"), [("GET", 0), ("POST", 1)])
async def test_probes_and_scrapes_do_not_fill_the_history(method: str, count: int) -> None:
    history = History(4)
    observer = RequestObserver(Metrics(), history)
    request_record = end_record(record(kind="passthrough"))
    request_record.method = method
    observer.on_request_start(request_record)
    assert len(history.find(request_record.request_id)) == 1, "while it runs"
    observer.on_request_end(request_record)
    observer.catch_up()
    assert len(history.find(request_record.request_id)) == count


async def test_an_engine_that_reports_any_timing_reports_transfers(setup: Setup) -> None:
    assert setup.metrics.engine_reports_times is None
    setup.process(handed_off(timing=UNKNOWN))
    assert setup.metrics.engine_reports_times is False
    setup.process(handed_off(timing=Timing(queue=0.1)))
    assert setup.metrics.engine_reports_times is True


async def test_a_release_is_counted_when_it_ends(setup: Setup) -> None:
    request_record = record()
    request_record.path = RoutingPath.PREFILL_THEN_DECODE
    leg = request_record.leg(Phase.RELEASE, "d-0", "a", 100)
    setup.process(end_record(request_record, "abandoned"))
    assert setup.value("tandem_sidecar_legs_total", phase="release", result="answered") == 0
    leg.end(Result.ANSWERED, 101, status=404)
    setup.observer.on_release_end(request_record, leg)
    assert setup.value("tandem_sidecar_legs_total", phase="release", result="answered") == 1


async def test_when_a_client_left(setup: Setup) -> None:
    request_record = record()
    assert left_at(request_record) == "prefill"
    prefill = request_record.leg(Phase.PREFILL, "p-0", "a", RECEIVED)
    assert left_at(request_record) == "prefill"
    prefill.end(Result.ANSWERED, RECEIVED + 1, status=200)
    assert left_at(request_record) == "handover"
    decode = request_record.leg(Phase.DECODE, "d-0", "a", RECEIVED + 1)
    assert left_at(request_record) == "handover"
    decode.status = 200
    assert left_at(request_record) == "decode"
    request_record.first_byte = RECEIVED + 2
    assert left_at(request_record) == "answer"
    request_record.path = RoutingPath.PREFILL_THEN_DECODE
    setup.process(end_record(request_record, "abandoned"))
    assert setup.value("tandem_sidecar_client_left_total", moment="answer") == 1


class CountingTracer:
    """A tracer that only counts the calls."""

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
async def test_a_release_that_ends_after_its_request_was_sent_is_sent_separately(
    late: bool,
) -> None:
    tracer = CountingTracer()
    observer = RequestObserver(Metrics(), None, tracer)
    request_record = record()
    leg = request_record.leg(Phase.RELEASE, "d-0", "a", 100)
    observer.on_request_start(request_record)
    observer.on_request_end(end_record(request_record, "abandoned"))
    if late:
        observer.catch_up()
    leg.end(Result.ANSWERED, 101, status=404)
    observer.on_release_end(request_record, leg)
    observer.catch_up()
    assert (tracer.ends, tracer.releases) == (1, int(late))


# History.


def end_request(history: History, request_record: Record) -> None:
    history.end([request_record], keep=[request_record])


def test_a_request_is_found_while_it_runs_and_after() -> None:
    history, request_record = History(2), record("r1")
    history.start(request_record)
    assert [(t.request_id, t.outcome, t.ended) for t in history.find("r1")] == [("r1", "", None)]
    end_request(history, end_record(request_record))
    assert [(t.outcome, t.ended) for t in history.find("r1")] == [("answered", 5.0)]
    assert history.find("r2") == []
    assert history.find("r") == []


def test_the_history_has_what_another_sidecar_sent() -> None:
    history, sent = History(2), record(attempt_id("r1", 7))
    history.start(sent)
    assert [trace.request_id for trace in history.find("r1")] == ["r1-000000000007"]


def test_old_requests_are_dropped_and_the_newest_of_an_id_comes_last() -> None:
    history = History(20)
    for i in range(MAX_SAME_ID + 12):
        request_record = record("same" if i % 2 else f"r{i}")
        request_record.received += i
        request_record.received_unix += i
        history.start(request_record)
        end_request(history, end_record(request_record))
    received = [t.received - UNIX for t in history.find("same")]
    assert received == [5, 7, 9, 11, 13, 15, 17, 19]
    end_request(history, end_record(record("last")))
    assert history.find("r0") == []


def test_a_limit_of_zero_keeps_no_ended_request() -> None:
    history, request_record = History(0), record()
    history.start(request_record)
    end_request(history, end_record(request_record))
    assert history.find("r1") == []


def test_a_long_detail_is_cut() -> None:
    request_record = handed_off()
    request_record.legs[0].detail = "y" * 9999
    assert len(to_trace(request_record).legs[0].detail) == 256


def test_times_are_relative_to_the_request() -> None:
    trace = to_trace(handed_off(timing=Timing(transfer=0.5)))
    assert (trace.path, trace.first_byte, trace.ended) == (
        RoutingPath.PREFILL_THEN_DECODE,
        3.0,
        5.0,
    )
    assert [(leg.phase, leg.started, leg.first_byte, leg.ended) for leg in trace.legs] == [
        ("prefill", 1.0, None, 2.0),
        ("decode", 2.0, 3.0, 4.0),
    ]
    assert trace.legs[1].timing == Timing(transfer=0.5)
    assert msgspec.json.decode(msgspec.json.encode(trace), type=SidecarTrace) == trace
