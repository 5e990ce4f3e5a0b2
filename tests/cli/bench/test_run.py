"""`tandem bench URL` against real servers."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tandem_cli.bench import command
from tandem_loadtest.figures.files import load_report
from tests.loadtest.run.engines import FakeOpenAI

from .servers import background, wait_for_requests

pytestmark = pytest.mark.long

FAST = ("--limit", "5", "--rate", "1000", "--warm-up", "0")


def bench(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(
        command, ["--model", "m", *arguments], env=environment, auto_envvar_prefix="TANDEM_BENCH"
    )


def test_without_plotly_nothing_is_sent_for_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem_cli.bench.run.find_spec", lambda _: None)
    result = bench("http://127.0.0.1:1", *FAST, "--html", str(tmp_path / "out.html"))
    assert result.exit_code == 2
    assert "pip install 'tandem-llm[bench]'" in result.stderr


def test_a_run_is_reported_as_tables_json_and_html(tmp_path: Path) -> None:
    json_file, html_file = tmp_path / "out.json", tmp_path / "out.html"
    with background(FakeOpenAI()) as url:
        result = bench(
            url, *FAST, "--json", str(json_file), "--html", str(html_file), "--slo-ttft", "9s",
            "--at", "0s", "echo marked", "--repeats", "2",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert re.search(r"scheduled +10 ", result.stdout)
    # The run may end before the command does.
    assert re.search(r"at 0\.\d s: echo marked \((exit 0|exit -15|still running)\)", result.stdout)
    report = load_report(json_file)
    assert [repeat.all.outcomes for repeat in report.repeats] == [{"ok": 5}, {"ok": 5}]
    assert report.summary["attainment"].value == 1.0
    assert "<html" in html_file.read_text()


def test_a_trace_is_scaled_and_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 30, "hash_ids": [0, 1]},
        {"timestamp": 90000, "input_length": 512, "output_length": 15, "hash_ids": [0]},
        {"timestamp": 99999, "input_length": 0, "output_length": 0, "hash_ids": []},
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = FakeOpenAI()
    with background(server) as url:
        result = bench(
            url, "--trace", str(trace), "--limit", "2", "--rate", "100", "--warm-up", "0",
            "--prompt-tokens", "64", "--output-tokens", "10",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    long, short = server.bodies
    assert (len(long["prompt"]), long["max_tokens"]) == (64, 10)
    assert short["prompt"] == long["prompt"][:32]
    assert short["max_tokens"] == 5
    assert long["ignore_eos"] is True


def test_lost_requests_are_reported_and_fail_the_run() -> None:
    server = FakeOpenAI()
    server.status = 503
    with background(server) as url:
        result = bench(url, *FAST)
    assert result.exit_code == 1
    assert "error: 5 of 5 requests were lost" in result.stderr
    assert "5 × shed: HTTP 503" in result.stdout


def test_a_wrong_model_is_refused_before_the_run() -> None:
    server = FakeOpenAI()
    server.models = ["other"]
    with background(server) as url:
        result = bench(url, *FAST)
    assert result.exit_code == 2
    assert "other" in result.stderr
    assert not server.bodies


def test_an_unreachable_url_is_one_line() -> None:
    result = bench("http://127.0.0.1:1", *FAST)
    assert result.exit_code == 2
    assert "http://127.0.0.1:1" in result.stderr.splitlines()[-1]


def test_flags_can_come_from_the_environment() -> None:
    with background(FakeOpenAI()) as url:
        result = bench(url, "--limit", "2", "--warm-up", "0", TANDEM_BENCH_RATE="1000")
    assert result.exit_code == 0, result.output


def test_ctrl_c_writes_what_was_measured(tmp_path: Path) -> None:
    server, file = FakeOpenAI(), tmp_path / "out.json"
    loop = asyncio.new_event_loop()
    with background(server, loop) as url:
        process = subprocess.Popen(
            [sys.executable, "-m", "tandem_cli", "bench", url, "--model", "m", "--rate", "20",
             "--limit", "100000", "--warm-up", "0", "--json", str(file)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        wait_for_requests(server, loop, 3)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "stopped early" in output
    repeat = load_report(file).repeats[0]
    assert repeat.stopped
    assert repeat.all.outcomes["ok"] >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ftp://host"], "write http://HOST:PORT"),
        (["http://host:99999"], "write http://HOST:PORT"),
        (["http://h/v1/chat/completions"], "write http://h and choose it with --endpoint"),
        (["http://h", "--rate", "0"], "--rate"),
        (["http://h", "--limit", "-1"], "--limit"),
        (["http://h", "--timeout", "30"], "is not a duration"),
        (["http://h", "--json", "/nowhere/at/all"], "directory /nowhere/at does not"),
        (["http://h", "--trace", "/nowhere/trace"], "/nowhere/trace: cannot read it"),
        (["http://h", "--nonsense"], "No such option"),
        ([], "Missing argument 'URL'"),
    ],
)
def test_usage_errors_exit_with_2_and_a_message(arguments: list[str], message: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_bad_trace_names_file_and_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01,x,1\n")
    result = bench("http://h", "--trace", str(trace))
    assert result.exit_code == 2
    assert f"{trace}:2: ContextTokens" in result.stderr.replace("\n", "")


def test_help_shows_the_options_by_section() -> None:
    text = bench("--help").output
    positions = [text.index(f"\n{name}:") for name in ("Load", "Workload", "Requests", "Output")]
    assert positions == sorted(positions)
    assert text.index("\nOther:") > positions[-1]
