"""`tandem demo` as users run it."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tandem_cli.main import main
from tandem_engine.tiny import make_tiny_model

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]


async def tandem_demo(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("tandem")),
        "demo",
        "--port",
        "0",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def test_all_answers_are_correct_and_all_paths_occur(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    status, output = await tandem_demo("--run-dir", str(tmp_path / "run"), "--json", str(figures))
    assert status == 0, output
    outcome = json.loads(figures.read_text())
    assert outcome["mismatches"] == outcome["failed"] == outcome["transfers_failed"] == 0
    for path in ("prefill_then_decode", "fast_decode", "unified"):
        assert outcome["paths"][path]["requests"] > 0
    assert outcome["paths"]["prefill_then_decode"]["kv_bytes"] > 0


async def test_a_trace_is_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:47.9951690,96,9\n"
    )
    status, output = await tandem_demo("--run-dir", str(tmp_path / "run"), "--trace", str(trace))
    assert status == 0, output
    assert "2 of 2 answers equal" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nonexistent"], "does not exist"),
        (["--limit", "3"], "--trace"),
        (["--limit", "0"], "--limit"),
        (["--json", "/nonexistent/figures.json"], "does not exist"),
        (["--port", "70000"], "--port"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_usage_errors_exit_with_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["demo", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_an_invalid_trace_is_reported_with_its_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": -4, "output_length": 1, "hash_ids": []}\n')
    result = CliRunner().invoke(main, ["demo", "--trace", str(trace)])
    assert result.exit_code == 2
    assert f"{trace}:1" in result.output


def test_a_context_too_short_for_the_conversations_is_refused_before_start(
    tmp_path: Path,
) -> None:
    make_tiny_model(tmp_path / "model", max_position=256)
    result = CliRunner().invoke(main, ["demo", "--model", str(tmp_path / "model")])
    assert result.exit_code == 2
    assert "256 tokens is too short" in result.output
