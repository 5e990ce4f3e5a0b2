"""Writes log lines as text or JSON, and one line for each ended request.

    log.warning("no answer from %s", address, extra={"request_id": ident})

    text  2026-03-01T12:00:00.000Z WARNING tandem_sidecar.x: no answer from p:8000 request_id=r1
    json  {"time":"2026-…","level":"warning","logger":"tandem_sidecar.x","message":"…",…}

A line contains names, ids and numbers, never prompt text, a header value or a query string.
"""

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from tandem_contract.paths import RoutingPath

from .moves import MoveReport, move_reports
from .record import Leg, Phase, Record, Result

_LOGGER: Final = "tandem_sidecar"
_REQUESTS: Final = f"{_LOGGER}.requests"
_ENDED: Final = "request ended"
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes that every log record has; all others were given by `extra`."""
_ONE_LINE: Final = str.maketrans({"\n": "\\n", "\r": "\\r"})
"""Escapes line ends in messages: an engine's answer must not be able to forge log lines."""
_encoder: Final = msgspec.json.Encoder(enc_hook=str)


class LogFormat(StrEnum):
    """Format of log lines."""

    TEXT = "text"
    JSON = "json"


class _Head(NamedTuple):
    when: float
    """Unix seconds."""
    level: str
    logger: str
    message: str


class _Formatter(logging.Formatter):
    def __init__(self, form: LogFormat) -> None:
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            extra["exception"] = self.formatException(record.exc_info)
        head = _Head(record.created, record.levelname, record.name, record.getMessage())
        return _line(self._form, head, extra)


def configure(form: LogFormat, level: str) -> None:
    """Log to stderr from now on. A further call changes format and level.

    `level` (`debug`, `info`, …) applies to the sidecar's own loggers. Libraries log at `info` and
    above only: at `debug` they would write the bytes they send.
    """
    root = logging.getLogger()
    # Handlers of earlier calls are reused; those of others, such as a test runner, are left alone.
    handlers = [h for h in root.handlers if isinstance(h.formatter, _Formatter)]
    if not handlers:
        handlers = [logging.StreamHandler()]
        root.addHandler(handlers[0])
    for handler in handlers:
        handler.setFormatter(_Formatter(form))
    number = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(number, logging.INFO))
    logging.getLogger(_LOGGER).setLevel(number)
    _request_lines.form = form if number <= logging.INFO else None


@dataclass(slots=True)
class _RequestLines:
    form: LogFormat | None = None
    """None: no lines are written for requests, because the level is above `info`."""


_request_lines: Final = _RequestLines()


def log_requests(ended: Sequence[Record]) -> None:
    """Log ended requests at level info, with a single write to stderr.

    Bypasses `logging`, which takes as much CPU for one line as all other work for a request.
    """
    form = _request_lines.form
    if form is not None and ended:
        lines = [_request_line(form, record) for record in ended]
        # If stderr cannot be written, the lines are lost, as with `logging`: there is no other
        # place to report it.
        with suppress(OSError):
            sys.stderr.write("\n".join(lines) + "\n")
            sys.stderr.flush()


def _request_line(form: LogFormat, record: Record) -> str:
    seconds = 0.0 if record.ended is None else record.ended - record.received
    when = record.received_unix + seconds
    if form is LogFormat.JSON:
        return _encoder.encode(_ended(record, _stamp(when))).decode()
    return _line(form, _Head(when, "INFO", _REQUESTS, _ENDED), request_fields(record))


def request_fields(record: Record) -> dict[str, Any]:
    """The fields of a request's log line. Durations in seconds; unknown values are left out."""
    fields: dict[str, Any] = msgspec.to_builtins(_ended(record, ""))
    return {name: value for name, value in fields.items() if name not in _HEAD}


class _Leg(msgspec.Struct, omit_defaults=True):
    phase: Phase
    backend: str
    engine_id: str
    result: Result | None = None
    status: int | None = None
    seconds: float | None = None


class _Move(msgspec.Struct, omit_defaults=True):
    cause: str
    method: str
    result: str | None = None
    source: str = ""
    target: str = ""
    delivered: int = 0
    gap: float | None = None
    why: str = ""


class _Ended(msgspec.Struct, omit_defaults=True):
    """The JSON line of an ended request. A struct: encoding a dict takes twice as long."""

    time: str
    level: str
    logger: str
    message: str
    request_id: str
    kind: str
    outcome: str
    path: RoutingPath | None = None
    reason: str = ""
    status: int | None = None
    first_byte: float | None = None
    seconds: float | None = None
    legs: list[_Leg] = []
    moves: list[_Move] = []


_HEAD: Final = frozenset({"time", "level", "logger", "message"})


def _ended(record: Record, stamp: str) -> _Ended:
    return _Ended(
        stamp,
        "info",
        _REQUESTS,
        _ENDED,
        record.request_id,
        record.kind,
        record.outcome,
        record.path,
        record.reason,
        record.status,
        _since(record.received, record.first_byte),
        _since(record.received, record.ended),
        [_leg(leg) for leg in record.legs],
        [_move(report) for report in move_reports(record)]
        if record.moves or record.not_resumed
        else [],
    )


def _move(report: MoveReport) -> _Move:
    return _Move(
        report.cause,
        report.method,
        report.result,
        report.source,
        report.target,
        report.delivered,
        _since(0, report.gap),
        report.why,
    )


def _leg(leg: Leg) -> _Leg:
    seconds = _since(leg.started, leg.ended)
    return _Leg(leg.phase, leg.backend, leg.attempt_id, leg.result, leg.status, seconds)


def _since(start: float, end: float | None) -> float | None:
    """Seconds from `start` to `end`, rounded to microseconds; `round` takes three times as long."""
    return None if end is None else int((end - start) * 1e6 + 0.5) / 1e6


def _line(form: LogFormat, head: _Head, extra: Mapping[str, Any]) -> str:
    """One log line without its line end; in text format a traceback follows it."""
    when, level, logger, message = head
    stamp = _stamp(when)
    if form is LogFormat.JSON:
        first = {"time": stamp, "level": level.lower(), "logger": logger, "message": message}
        return _encoder.encode({**first, **extra}).decode()
    fields = dict(extra)
    trace = fields.pop("exception", None)
    suffix = "".join([f" {key}={_text(value)}" for key, value in fields.items()])
    line = f"{stamp} {level} {logger}: {message.translate(_ONE_LINE)}{suffix}"
    return f"{line}\n{trace}" if trace else line


def _stamp(when: float) -> str:
    return f"{_second(int(when))}.{int(when % 1 * 1000):03d}Z"


@lru_cache(maxsize=4)
def _second(when: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(when))


def _text(value: object) -> str:
    """`value` unchanged if it is one printable ASCII word, else as JSON."""
    if isinstance(value, str) and value.isascii() and value.isprintable() and " " not in value:
        return str(value)
    return _encoder.encode(value).decode()
