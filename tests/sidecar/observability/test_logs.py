"""Log lines, text and JSON."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from tandem_contract.paths import RoutingPath
from tandem_sidecar.observability import logs
from tandem_sidecar.observability.logs import LogFormat
from tandem_sidecar.observability.record import Phase, Record, Result

log = logging.getLogger("tandem_sidecar.test")


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("tandem_sidecar")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def ended() -> Record:
    record = Record("r1", "completions", received=10.0, received_unix=1000.0)
    leg = record.leg(Phase.PREFILL, "prefill-0", "r1-a", now=10.0)
    leg.end(Result.ANSWERED, 10.5, status=200)
    record.path, record.outcome, record.status = RoutingPath.PREFILL_THEN_DECODE, "answered", 200
    record.first_byte, record.ended = 10.75, 12.0
    return record


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogFormat.JSON, "info")
    log.warning("no answer\nfrom %s", "p", extra={"request_id": "r1", "tries": 2})
    [line] = capsys.readouterr().err.splitlines()
    said = json.loads(line)
    assert said.pop("time").endswith("Z")
    assert said == {
        "level": "warning",
        "logger": "tandem_sidecar.test",
        "message": "no answer\nfrom p",
        "request_id": "r1",
        "tries": 2,
    }


def test_json_holds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogFormat.JSON, "info")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("what")
    [line] = capsys.readouterr().err.splitlines()
    assert json.loads(line)["exception"].endswith("ValueError: why")


def test_text_shows_the_fields_and_writes_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogFormat.TEXT, "info")
    log.warning("no answer\nERROR forged", extra={"request_id": "r1", "why": "two words"})
    [line] = capsys.readouterr().err.splitlines()
    _, rest = line.split(" ", 1)
    said = r'no answer\nERROR forged request_id=r1 why="two words"'
    assert rest == f"WARNING tandem_sidecar.test: {said}"


def test_configured_again_it_changes_how(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogFormat.TEXT, "warning")
    log.info("unheard")
    logs.configure(LogFormat.JSON, "debug")
    log.debug("heard")
    [line] = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "heard"


def test_a_library_is_not_heard_below_info(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogFormat.TEXT, "debug")
    logging.getLogger("other.package").debug("sent %s", b"bytes")
    assert capsys.readouterr().err == ""


def test_fields_of_a_request() -> None:
    leg = {
        "phase": "prefill",
        "backend": "prefill-0",
        "engine_id": "r1-a",
        "result": "answered",
        "status": 200,
        "seconds": 0.5,
    }
    assert logs.request_fields(ended()) == {
        "request_id": "r1",
        "kind": "completions",
        "path": "prefill_then_decode",
        "outcome": "answered",
        "status": 200,
        "first_byte": 0.75,
        "seconds": 2.0,
        "legs": [leg],
    }


def test_fields_leave_out_what_is_not_known() -> None:
    record = Record("r1", "chat", 1.0, 2.0, target="/v1/chat/completions", outcome="left")
    assert logs.request_fields(record) == {"request_id": "r1", "kind": "chat", "outcome": "left"}


def test_lines_of_requests(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogFormat.JSON, "info")
    logs.log_requests([ended(), replace(ended(), request_id="r2")])
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["request_id"] for line in lines] == ["r1", "r2"]
    assert {line["message"] for line in lines} == {"request ended"}


def test_lines_of_requests_are_text_too(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogFormat.TEXT, "info")
    logs.log_requests([ended()])
    [line] = capsys.readouterr().err.splitlines()
    assert "INFO tandem_sidecar.requests: request ended request_id=r1 kind=completions" in line


def test_above_info_no_line_of_a_request(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogFormat.JSON, "warning")
    logs.log_requests([ended()])
    assert capsys.readouterr().err == ""


class Closed(io.StringIO):
    """As stderr whose reader is gone."""

    def flush(self) -> None:
        raise BrokenPipeError


def test_a_log_that_takes_nothing_costs_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    logs.configure(LogFormat.JSON, "info")
    stderr = Closed()
    monkeypatch.setattr("sys.stderr", stderr)
    logs.log_requests([ended()])
    assert "request ended" in stderr.getvalue()
