"""Log lines, text and JSON."""

import io
import json
import logging

import pytest
from msgspec.structs import replace

from tandem_contract.paths import RoutingPath
from tandem_sidecar.observability import logs
from tandem_sidecar.observability.logs import LogFormat
from tandem_sidecar.observability.record import Phase, Record, Result

pytestmark = pytest.mark.usefixtures("own_logging")

log = logging.getLogger("tandem_sidecar.test")


def ended_record() -> Record:
    record = Record("r1", "completions", received=10.0, received_unix=1000.0)
    leg = record.leg(Phase.PREFILL, "prefill-0", "r1-a", now=10.0)
    leg.end(Result.ANSWERED, 10.5, status=200)
    record.path, record.outcome, record.status = RoutingPath.PREFILL_THEN_DECODE, "answered", 200
    record.first_byte, record.ended = 10.75, 12.0
    return record


def test_json_format_is_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogFormat.JSON, "info")
    log.warning("no answer\nfrom %s", "p", extra={"request_id": "r1", "tries": 2})
    [line] = capsys.readouterr().err.splitlines()
    fields = json.loads(line)
    assert fields.pop("time").endswith("Z")
    assert fields == {
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


def test_text_format_shows_the_fields_and_escapes_line_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure(LogFormat.TEXT, "info")
    log.warning("no answer\nERROR forged", extra={"request_id": "r1", "why": "two words"})
    [line] = capsys.readouterr().err.splitlines()
    _, text = line.split(" ", 1)
    message = r'no answer\nERROR forged request_id=r1 why="two words"'
    assert text == f"WARNING tandem_sidecar.test: {message}"


def test_a_second_configure_changes_format_and_level(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogFormat.TEXT, "warning")
    log.info("not logged")
    logs.configure(LogFormat.JSON, "debug")
    log.debug("logged")
    [line] = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "logged"


def test_libraries_do_not_log_below_info(capsys: pytest.CaptureFixture[str]) -> None:
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
    assert logs.request_fields(ended_record()) == {
        "request_id": "r1",
        "kind": "completions",
        "path": "prefill_then_decode",
        "outcome": "answered",
        "status": 200,
        "first_byte": 0.75,
        "seconds": 2.0,
        "legs": [leg],
    }


def test_unknown_fields_are_left_out() -> None:
    record = Record("r1", "chat", 1.0, 2.0, target="/v1/chat/completions", outcome="left")
    assert logs.request_fields(record) == {"request_id": "r1", "kind": "chat", "outcome": "left"}


def test_lines_of_requests(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogFormat.JSON, "info")
    logs.log_requests([ended_record(), replace(ended_record(), request_id="r2")])
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["request_id"] for line in lines] == ["r1", "r2"]
    assert {line["message"] for line in lines} == {"request ended"}


def test_lines_of_requests_are_text_too(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogFormat.TEXT, "info")
    logs.log_requests([ended_record()])
    [line] = capsys.readouterr().err.splitlines()
    assert "INFO tandem_sidecar.requests: request ended request_id=r1 kind=completions" in line


def test_above_info_requests_are_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogFormat.JSON, "warning")
    logs.log_requests([ended_record()])
    assert capsys.readouterr().err == ""


class Closed(io.StringIO):
    """Like stderr after its reader has closed the pipe."""

    def flush(self) -> None:
        raise BrokenPipeError


def test_lines_that_cannot_be_written_are_dropped_without_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs.configure(LogFormat.JSON, "info")
    stderr = Closed()
    monkeypatch.setattr("sys.stderr", stderr)
    logs.log_requests([ended_record()])
    assert "request ended" in stderr.getvalue()
