"""How log lines are written, text or JSON, and the line of an ended request.

    log.warning("no answer from %s", address, extra={"request_id": ident})

    text  2026-03-01T12:00:00.000Z WARNING tandem_sidecar.x: no answer from p:8000 request_id=r1
    json  {"time":"2026-…","level":"warning","logger":"tandem_sidecar.x","message":"…",…}

A line never holds prompt text, a header's value or a query: names, ids, figures.
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

from .record import Leg, Phase, Record, Result

_OURS: Final = "tandem_sidecar"
_REQUESTS: Final = f"{_OURS}.requests"
_ENDED: Final = "request ended"
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes of every log record: the others came by `extra`."""
_ONE_LINE: Final = str.maketrans({"\n": "\\n", "\r": "\\r"})
"""What an engine answers cannot write lines of its own."""
_encoder: Final = msgspec.json.Encoder(enc_hook=str)


class LogFormat(StrEnum):
    """How a log line is written."""

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
    """Write this process's log to stderr; called again, it changes how.

    `level` (`debug`, `info`, …) is that of our own loggers: below `info` a library tells of the
    bytes it sends.
    """
    root = logging.getLogger()
    handlers = [h for h in root.handlers if isinstance(h.formatter, _Formatter)]
    if not handlers:
        handlers = [logging.StreamHandler()]
        root.addHandler(handlers[0])
    for handler in handlers:
        handler.setFormatter(_Formatter(form))
    number = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(number, logging.INFO))
    logging.getLogger(_OURS).setLevel(number)
    _of_requests.form = form if number <= logging.INFO else None


@dataclass(slots=True)
class _OfRequests:
    form: LogFormat | None = None
    """None: no line is written of them."""


_of_requests: Final = _OfRequests()


def log_requests(ended: Sequence[Record]) -> None:
    """Log ended requests at info, in one write.

    Past `logging`, whose work for one line costs as much as the rest of a request.
    """
    form = _of_requests.form
    if form is not None and ended:
        lines = [_request_line(form, record) for record in ended]
        # A log that takes nothing costs its lines, as with `logging`: there is nobody to tell.
        with suppress(OSError):
            sys.stderr.write("\n".join(lines) + "\n")
            sys.stderr.flush()


def _request_line(form: LogFormat, record: Record) -> str:
    lasted = 0.0 if record.ended is None else record.ended - record.received
    when = record.received_unix + lasted
    if form is LogFormat.JSON:
        return _encoder.encode(_ended(record, _stamp(when))).decode()
    return _line(form, _Head(when, "INFO", _REQUESTS, _ENDED), request_fields(record))


def request_fields(record: Record) -> dict[str, Any]:
    """What the log says of a request; durations in seconds; what is not known is left out."""
    fields: dict[str, Any] = msgspec.to_builtins(_ended(record, ""))
    return {name: value for name, value in fields.items() if name not in _HEAD}


class _Leg(msgspec.Struct, omit_defaults=True):
    phase: Phase
    backend: str
    engine_id: str
    result: Result | None = None
    status: int | None = None
    seconds: float | None = None


class _Ended(msgspec.Struct, omit_defaults=True):
    """An ended request's line. A struct, for a dictionary costs twice as much to write."""

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
    )


def _leg(leg: Leg) -> _Leg:
    seconds = _since(leg.started, leg.ended)
    return _Leg(leg.phase, leg.backend, leg.engine_id, leg.result, leg.status, seconds)


def _since(start: float, end: float | None) -> float | None:
    """Seconds to the microsecond; `round` takes three times as long."""
    return None if end is None else int((end - start) * 1e6 + 0.5) / 1e6


def _line(form: LogFormat, head: _Head, extra: Mapping[str, Any]) -> str:
    """One line of the log, but for its end."""
    when, level, logger, message = head
    stamp = _stamp(when)
    if form is LogFormat.JSON:
        first = {"time": stamp, "level": level.lower(), "logger": logger, "message": message}
        return _encoder.encode({**first, **extra}).decode()
    fields = dict(extra)
    trace = fields.pop("exception", None)
    behind = "".join([f" {key}={_text(value)}" for key, value in fields.items()])
    line = f"{stamp} {level} {logger}: {message.translate(_ONE_LINE)}{behind}"
    return f"{line}\n{trace}" if trace else line


def _stamp(when: float) -> str:
    return f"{_second(int(when))}.{int(when % 1 * 1000):03d}Z"


@lru_cache(maxsize=4)
def _second(when: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(when))


def _text(value: object) -> str:
    """As it is where that is one word, else as JSON."""
    if isinstance(value, str) and value.isascii() and value.isprintable() and " " not in value:
        return str(value)
    return _encoder.encode(value).decode()
