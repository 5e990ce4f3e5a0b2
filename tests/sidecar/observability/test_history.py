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


def test_the_oldest_are_forgotten_and_the_newest_of_one_id_come_last() -> None:
    history = History(20)
    for i in range(MAX_SAME_ID + 12):
        made = record("same" if i % 2 else f"r{i}")
        made.received += i
        made.received_unix += i
        history.start(made)
        end(history, ended(made))
    found = [t.received - UNIX for t in history.find("same")]
    assert found == [5, 7, 9, 11, 13, 15, 17, 19]
    end(history, ended(record("last")))
    assert history.find("r0") == []


def test_nothing_is_kept_where_none_is_asked_for() -> None:
    history, made = History(0), record()
    history.start(made)
    end(history, ended(made))
    assert history.find("r1") == []


def test_a_long_detail_is_cut() -> None:
    made = handed_off()
    made.legs[0].detail = "y" * 9999
    assert len(to_trace(made).legs[0].detail) == 256


def test_times_are_told_from_the_moment_the_request_came_in() -> None:
    told = to_trace(handed_off(timing=Timing(transfer=0.5)))
    assert (told.path, told.first_byte, told.ended) == (RoutingPath.PREFILL_THEN_DECODE, 3.0, 5.0)
    assert [(leg.phase, leg.started, leg.first_byte, leg.ended) for leg in told.legs] == [
        ("prefill", 1.0, None, 2.0),
        ("decode", 2.0, 3.0, 4.0),
    ]
    assert told.legs[1].timing == Timing(transfer=0.5)
    assert msgspec.json.decode(msgspec.json.encode(told), type=SidecarTrace) == told
