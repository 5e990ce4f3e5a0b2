"""Errors in files of reports."""

from pathlib import Path

import msgspec
import pytest

from tandem_loadtest.figures.files import ReportError, load_report

from .samples import sample_report


def test_a_report_is_read_back(tmp_path: Path) -> None:
    report = sample_report(count=60)
    file = tmp_path / "report.json"
    file.write_bytes(msgspec.json.encode(report))
    assert load_report(file) == report


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON: Input data was truncated"),
        (b"no", "not JSON"),
        (b'{"format": "\xff"}', "not JSON"),
        (b"[]", "not a report of `tandem bench`: Expected `object`, got `array`"),
        (b"{}", "format is None, not 'tandem-bench/1'"),
        (b'{"format": "tandem-bench/9"}', "format is 'tandem-bench/9', not 'tandem-bench/1'"),
        (b'{"format": "tandem-bench/1"}', "missing required field `tandem_version`"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "report.json"
    file.write_bytes(content)
    with pytest.raises(ReportError) as error:
        load_report(file)
    assert str(error.value).startswith(f"{file}: ")
    assert message in str(error.value)


def test_a_wrong_field_is_named(tmp_path: Path) -> None:
    report = msgspec.to_builtins(sample_report(count=20))
    report["repeats"][1]["all"]["requests"] = "many"
    file = tmp_path / "report.json"
    file.write_bytes(msgspec.json.encode(report))
    with pytest.raises(ReportError, match=r"got `str` - at `\$.repeats\[1\]\.all\.requests`"):
        load_report(file)


def test_a_report_without_repeats_is_refused(tmp_path: Path) -> None:
    report = msgspec.structs.replace(sample_report(count=20), repeats=[])
    file = tmp_path / "report.json"
    file.write_bytes(msgspec.json.encode(report))
    with pytest.raises(ReportError, match="`repeats` is empty"):
        load_report(file)


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="No such file"):
        load_report(tmp_path / "missing.json")
    with pytest.raises(ReportError, match="Is a directory"):
        load_report(tmp_path)
