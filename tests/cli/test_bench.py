"""`tandem bench` against real servers."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from tandem_cli.bench import VOCABULARY, command
from tandem_contract import headers
from tests.loadtest.servers import DONE, Handler, answering, chunk, serving, streaming

GOOD = streaming(
    chunk("a", 1), chunk("b", 2, "length"), DONE, **{headers.ROUTING_PATH: "fast_decode"}
)


@contextmanager
def background(handler: Handler) -> Iterator[str]:
    """The URL of a server in another thread with its own event loop."""
    up, urls = threading.Event(), []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        async with serving(handler) as url:
            urls.append(url)
            up.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert up.wait(10)
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def bench(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(
        command, ["--model", "tiny", *arguments], env=environment, auto_envvar_prefix="TANDEM_BENCH"
    )


FAST = ("--limit", "5", "--rate", "1000")


def test_a_run_is_reported_as_table_and_json(tmp_path: Path) -> None:
    with background(GOOD) as url:
        result = bench(
            url, *FAST, "--json", str(tmp_path / "out"), "--slo-ttft", "9s", "--slo-itl", "9s"
        )
    assert result.exit_code == 0, result.output
    assert "fast_decode" in result.stdout
    written = json.loads((tmp_path / "out").read_text())
    row = written["paths"]["fast_decode"]
    assert (row["requests"], row["failed"]) == (5, 0)
    assert written["all"] == row
    assert row["goodput"] == pytest.approx(5 / written["seconds"])


def test_a_trace_is_scaled_and_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 30, "hash_ids": [0, 1]},
        {"timestamp": 90000, "input_length": 512, "output_length": 15, "hash_ids": [0]},
        {"timestamp": 99999, "input_length": 0, "output_length": 0, "hash_ids": []},
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bodies: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return await GOOD(request)

    with background(handler) as url:
        result = bench(
            url, "--trace", str(trace), "--limit", "2", "--rate", "100",
            "--prompt-tokens", "64", "--output-tokens", "10",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    long, short = bodies
    assert (len(long["prompt"]), long["max_tokens"]) == (64, 10)
    assert short["prompt"] == long["prompt"][:32]
    assert short["max_tokens"] == 5
    assert set(long["prompt"]) <= set(VOCABULARY)
    assert long["ignore_eos"] is True


def test_failed_requests_are_reported_and_fail_the_run() -> None:
    with background(answering({"error": {"message": "no such model"}}, 404)) as url:
        result = bench(url, *FAST)
    assert result.exit_code == 1
    assert result.stderr.endswith("error: 5 of 5 requests failed: 5 × HTTP 404: no such model\n")
    assert "unrouted" in result.stdout


def test_flags_can_come_from_the_environment() -> None:
    with background(GOOD) as url:
        result = bench(url, "--limit", "2", TANDEM_BENCH_RATE="1000")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ftp://host"], "write http://HOST:PORT"),
        (["http://host:99999"], "write http://HOST:PORT"),
        (["http://h", "--rate", "0"], "--rate"),
        (["http://h", "--limit", "-1"], "--limit"),
        (["http://h", "--timeout", "30"], "is not a duration"),
        (["http://h", "--slo-ttft", "1s"], "go together"),
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
