"""How the process writes its log: lines of text for people, or JSON objects for collectors."""

import logging
from typing import Final

import msgspec

_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object per line, with the keys that llm-d's EPP writes."""

    default_msec_format = "%s.%03d"

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "level": record.levelname.lower(),
            "ts": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info:
            line["stacktrace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure(level: str, *, as_json: bool) -> None:
    """Write the process's log to stderr, from `level` (debug, info, warning, error) on."""
    logging.basicConfig(level=level.upper(), format=_TEXT)
    if as_json:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
