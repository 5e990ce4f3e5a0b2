"""The schema of docs/, and that reports match it."""

import json
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings

from tandem_loadtest.figures.collector import Collector
from tandem_loadtest.figures.histogram import Histogram
from tandem_loadtest.figures.intervals import build_report
from tandem_loadtest.figures.model import Report
from tandem_loadtest.figures.schema import COMMAND, FILE, content, schema
from tandem_loadtest.records import Record

from .records import records
from .samples import SLO, sample_report

VALIDATOR = jsonschema.Draft202012Validator(schema())


def check_round_trip(report: Report) -> None:
    """The JSON of a report is valid and is read back as the same report."""
    written = msgspec.json.encode(report)
    VALIDATOR.validate(json.loads(written))
    assert msgspec.json.decode(written, type=Report) == report


def test_the_file_is_current() -> None:
    assert FILE.read_bytes() == content(), f"stale: run .venv/bin/{COMMAND}"


def test_the_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


def test_fields_have_their_docstrings() -> None:
    definitions = schema()["$defs"]
    assert definitions["Figures"]["properties"]["ttft"]["description"] == (
        "First token − intended time. Streamed requests only, like all of the next six."
    )
    assert definitions["Report"]["properties"]["format"]["const"] == "tandem-bench/1"


def test_a_sample_matches_the_schema() -> None:
    check_round_trip(sample_report(count=100))


@given(records())
@settings(max_examples=25)
def test_every_report_matches_the_schema(added: list[Record]) -> None:
    collector = Collector(SLO)
    for record in added:
        collector.add(record)
    repeat = collector.repeat(
        started="2026-01-01T00:00:00Z", seconds=5.0, read_lag=Histogram(),
        cpu_share=[0.1],
    )  # fmt: skip
    check_round_trip(
        build_report(
            [repeat], tandem_version="1", machine="m", url="u", model="m", endpoint="chat",
            workload={"rate": 1.5, "limit": None}, processes=1,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"), [("format", "other/1"), ("repeats", {}), ("gpus", "two")]
)
def test_the_schema_refuses_other_values(field: str, value: Any) -> None:
    report = json.loads(msgspec.json.encode(sample_report(count=20, repeats=1)))
    report[field] = value
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(report)
