"""Reads a report from its JSON file."""

from pathlib import Path

import msgspec

from .model import FORMAT, Report


class ReportError(Exception):
    """A file is not a report that this version reads; the text names file, field and reason."""


class _Header(msgspec.Struct):
    format: str | None = None


def load_report(path: Path) -> Report:
    """The report of `tandem bench --json`. Raises ReportError, also if the file is unreadable."""
    try:
        content = path.read_bytes()
    except OSError as err:
        raise ReportError(f"{path}: {err.strerror}") from err
    try:
        header = msgspec.json.decode(content, type=_Header)
        if header.format != FORMAT:
            raise ReportError(
                f"{path}: format is {header.format!r}, not {FORMAT!r}: "
                "give a file that `tandem bench --json` of this version wrote"
            )
        report = msgspec.json.decode(content, type=Report)
    except msgspec.ValidationError as err:
        raise ReportError(f"{path}: not a report of `tandem bench`: {err}") from err
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise ReportError(f"{path}: not JSON: {err}") from err
    if not report.repeats:
        raise ReportError(f"{path}: `repeats` is empty")
    return report
