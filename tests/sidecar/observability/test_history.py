import msgspec

from tandem_contract.paths import RoutingPath
from tandem_contract.timing import Timing
from tandem_contract.trace import MAX_SAME_ID, SidecarTrace
from tandem_sidecar.observability.observer import History, to_trace
from tandem_sidecar.observability.record import Record

from .records import UNIX, ended, handed_off, record


def end(history: History, made: Record) -> None:
    history.end([made], keep=[made])


def test_a_request_is_found_while_it_runs_and_after() -> None:
    history, made = History(2), record("r1")
    history.start(made)
    assert [(t.request_id, t.outcome, t.ended) for t in history.find("r1")] == [("r1", "", None)]
    end(history, ended(made))
    assert [(t.outcome, t.ended) for t in history.find("r1")] == [("answered", 5.0)]
    assert history.find("r2") == []


def test_old_requests_are_dropped_and_the_newest_of_an_id_comes_last() -> None:
    history = History(20)
    for i in range(MAX_SAME_ID + 12):
        made = record("same" if i % 2 else f"r{i}")
        made.received += i
        made.received_unix += i
        history.start(made)
        end(history, ended(made))
    received = [t.received - UNIX for t in history.find("same")]
    assert received == [5, 7, 9, 11, 13, 15, 17, 19]
    end(history, ended(record("last")))
    assert history.find("r0") == []


def test_a_limit_of_zero_keeps_no_ended_request() -> None:
    history, made = History(0), record()
    history.start(made)
    end(history, ended(made))
    assert history.find("r1") == []


def test_a_long_detail_is_cut() -> None:
    made = handed_off()
    made.legs[0].detail = "y" * 9999
    assert len(to_trace(made).legs[0].detail) == 256


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
