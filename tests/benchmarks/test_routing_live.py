"""The live benchmark, with a few requests: it starts a stack, sends, and reads what was decided."""

import json
from pathlib import Path

import pytest
from benchmarks.figures import load
from benchmarks.routing_live import main
from click.testing import CliRunner

pytestmark = pytest.mark.component


def test_the_error_of_predictions_is_measured_behind_tandem_up(tmp_path: Path) -> None:
    trace, out, records = tmp_path / "trace.jsonl", tmp_path / "out.json", tmp_path / "records.json"
    lines = [
        {"timestamp": 100 * i, "input_length": 600, "output_length": 4, "hash_ids": [0, i + 1]}
        for i in range(8)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    command = ["--trace", str(trace), "--only", "prediction", "--engine", "paced"]
    command += ["--requests", "8", "--learn", "2"]
    result = CliRunner().invoke(main, [*command, "--json", str(out), "--records", str(records)])
    assert result.exit_code == 0, result.output
    figures = {figure.name: figure for figure in load(out)}
    assert figures["median error of the predicted TTFT, all paths"].target == "<= 0.2"
    decisions = json.loads(records.read_text())
    assert len(decisions) == 8
    assert all(d["predicted_ttft"] > 0 and d["measured_ttft"] > 0 for d in decisions)
