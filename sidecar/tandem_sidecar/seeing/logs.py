"""How log lines are written, text or JSON, and the line of an ended request.

    log.warning("no answer from %s", address, extra={"request_id": ident})

    text  2026-03-01T12:00:00.000Z WARNING tandem_sidecar.x: no answer from p:8000 request_id=r1
    json  {"time":"2026-…","level":"warning","logger":"tandem_sidecar.x","message":"…",…}

A line never holds prompt text, a header's value or a query: names, ids, figures.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from .record import Leg, Record

_OURS: Final = "tandem_sidecar"
_REQUESTS: Final = f"{_OURS}.requests"
_ENDED: Final = "request ended"
_HELD_SECONDS: Final = 0.2
"""Lines of requests are held back this long and written together."""
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


class _RequestLines:
    """Lines of ended requests, written many at a time.

    Past `logging`, whose work for one line costs as much as the rest of a request.
    """

    def __init__(self) -> None:
        self.form: LogFormat | None = None
        """None: they are not written."""
        self._held: list[str] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, record: Record) -> None:
        if self.form is None:
            return
        head = _Head(time.time(), "INFO", _REQUESTS, _ENDED)
        self._held.append(_line(self.form, head, request_fields(record)))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_HELD_SECONDS, self.flush)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, []
        if held:
            sys.stderr.write("\n".join(held) + "\n")
            sys.stderr.flush()


_requests: Final = _RequestLines()


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
    _requests.form = form if number <= logging.INFO else None


def request_line(record: Record) -> None:
    """Log an ended request at info, within `_HELD_SECONDS`. Called on the event loop."""
    _requests.add(record)


def flush() -> None:
    """Write the request lines held back: before the process ends."""
    _requests.flush()


def request_fields(record: Record) -> dict[str, Any]:
    """What the log says of a request; durations in seconds; what is not known is left out."""
    fields: dict[str, Any] = {"request_id": record.request_id, "kind": record.kind}
    if record.path is not None:
        fields["path"] = record.path
    if record.reason:
        fields["reason"] = record.reason
    fields["outcome"] = record.outcome
    if record.status is not None:
        fields["status"] = record.status
    if record.first_byte is not None:
        fields["first_byte"] = round(record.first_byte - record.received, 6)
    if record.ended is not None:
        fields["seconds"] = round(record.ended - record.received, 6)
    if record.legs:
        fields["legs"] = [_leg(leg) for leg in record.legs]
    return fields


def _leg(leg: Leg) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "phase": leg.phase,
        "backend": leg.backend,
        "engine_id": leg.engine_id,
        "result": leg.result,
    }
    if leg.status is not None:
        fields["status"] = leg.status
    if leg.ended is not None:
        fields["seconds"] = round(leg.ended - leg.started, 6)
    return fields


def _line(form: LogFormat, head: _Head, extra: Mapping[str, Any]) -> str:
    """One line of the log, but for its end."""
    when, level, logger, message = head
    stamp = f"{_second(int(when))}.{int(when % 1 * 1000):03d}Z"
    if form is LogFormat.JSON:
        first = {"time": stamp, "level": level.lower(), "logger": logger, "message": message}
        return _encoder.encode({**first, **extra}).decode()
    fields = dict(extra)
    trace = fields.pop("exception", None)
    behind = "".join([f" {key}={_text(value)}" for key, value in fields.items()])
    line = f"{stamp} {level} {logger}: {message.translate(_ONE_LINE)}{behind}"
    return f"{line}\n{trace}" if trace else line


@lru_cache(maxsize=4)
def _second(when: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(when))


def _text(value: object) -> str:
    """As it is where that is one word, else as JSON."""
    if isinstance(value, str) and value.isascii() and value.isprintable() and " " not in value:
        return str(value)
    return _encoder.encode(value).decode()
