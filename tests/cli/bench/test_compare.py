"""`tandem bench compare A.json B.json`."""

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from tandem_cli.bench import command
from tandem_loadtest.figures.model import Estimate, Report
from tests.loadtest.figures.samples import sample_report

pytestmark = pytest.mark.long


def compare(*arguments: str) -> Result:
    return CliRunner().invoke(command, ["compare", *arguments])


def write(file: Path, report: Report) -> str:
    file.write_bytes(msgspec.json.encode(report))
    return str(file)


def slower(report: Report, factor: float) -> Report:
    """The report with every figure of the summary multiplied in every repeat."""
    text = msgspec.json.decode(msgspec.json.encode(report))
    for repeat in text["repeats"]:
        for name in ("ttft", "ttft_wire"):
            distribution = repeat["all"][name]
            for key in ("mean", "minimum", "maximum"):
                distribution[key] *= factor
            for percent in distribution["percentiles"]:
                distribution["percentiles"][percent] *= factor
    for name, estimate in text["summary"].items():
        if name.startswith("ttft"):
            for key in ("value", "low", "high"):
                estimate[key] = estimate[key] and estimate[key] * factor
    return msgspec.json.decode(msgspec.json.encode(text), type=Report)


def test_a_report_equals_itself(tmp_path: Path) -> None:
    file = write(tmp_path / "a", sample_report())
    result = compare(file, file, "--fail-if-worse")
    assert result.exit_code == 0, result.output
    assert "within noise" in result.stdout
    assert result.stdout.startswith("0 better, 0 worse, ")


def test_a_slower_server_is_worse_and_can_fail_a_pipeline(tmp_path: Path) -> None:
    a = write(tmp_path / "a", sample_report())
    b = write(tmp_path / "b", slower(sample_report(), 10.0))
    assert "worse" in compare(a, b).stdout
    result = compare(a, b, "--fail-if-worse")
    assert result.exit_code == 1
    assert "worse beyond noise: ttft" in result.stderr
    assert "better" in compare(b, a).stdout


def test_the_comparison_as_json(tmp_path: Path) -> None:
    file = write(tmp_path / "a", sample_report())
    differences = json.loads(compare(file, file, "--json").stdout)["differences"]
    assert {entry["a"] == entry["b"] for entry in differences} == {True}


def test_a_file_that_is_no_report_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text("{}")
    result = compare(str(file), str(tmp_path / "missing"))
    assert result.exit_code == 2
    assert str(file) in result.stderr.replace("\n", "")


def test_another_cache_is_named(tmp_path: Path) -> None:
    a, b = sample_report(), sample_report()
    summary = {**b.summary, "cache_hit_share": Estimate(value=0.99, unit="share")}
    cached = msgspec.structs.replace(b, summary=summary)
    output = compare(write(tmp_path / "a", a), write(tmp_path / "b", cached)).stdout
    assert "the same --seed" in output.replace("\n", " ")


def test_help_names_the_command_with_its_group() -> None:
    assert "bench compare [OPTIONS] A B" in compare("--help").stdout
