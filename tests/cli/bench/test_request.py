"""The flags of `tandem bench` as options, and their usage errors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import pytest
from click.testing import CliRunner

from tandem_cli.bench import command, run
from tandem_cli.bench.request import Flags, bench_options
from tandem_loadtest.figures.model import Slo
from tandem_loadtest.run.options import BenchOptions, Reference, TimedCommand
from tandem_loadtest.workload.settings import Arrivals, Prompts


class Parsed(Exception):
    """Carries the options out of the command before it runs."""


def parse(*arguments: str) -> BenchOptions:
    """The options that the command line asks for. Raises click.UsageError."""
    parsed: list[Flags] = []

    def keep(flags: Flags) -> BenchOptions:
        parsed.append(flags)
        raise Parsed

    with patch.object(run, "bench_options", keep):
        result = CliRunner().invoke(command, ["http://h:1", "--model", "tiny", *arguments])
    assert isinstance(result.exception, Parsed), result.output
    return bench_options(parsed[0])


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[str]:
    file = tmp_path / "trace.jsonl"
    row: dict[str, Any] = {"input_length": 512, "output_length": 9, "hash_ids": [1]}
    file.write_text("".join(json.dumps(row | {"timestamp": t * 1000}) + "\n" for t in range(5)))
    return iter([str(file)])


def test_the_defaults_send_a_hundred_poisson_sessions_as_token_ids() -> None:
    options = parse()
    assert options.arrivals == Arrivals(process="poisson", rate=1.0)
    assert options.limit == 100
    assert options.prompts == Prompts(style="token-ids")
    assert options.target.extra_body == {}
    assert options.slo is None


def test_each_run_has_a_seed_of_its_own_unless_given() -> None:
    assert parse().seed != parse().seed
    assert parse("--seed", "7").seed == 7


def test_a_duration_replaces_the_default_limit() -> None:
    options = parse("--duration", "60s", "--rate", "5")
    assert (options.limit, options.duration, options.arrivals.rate) == (None, 60.0, 5.0)


def test_concurrency_is_closed_loop() -> None:
    assert parse("--concurrency", "8").arrivals == Arrivals(process="closed", concurrency=8)


def test_a_trace_comes_at_the_given_rate(trace: Iterator[str]) -> None:
    # Recorded at one per second: twice the rate halves the times.
    arrivals = parse("--trace", next(trace), "--rate", "2").arrivals
    assert arrivals == Arrivals(process="trace", time_factor=0.5)


def test_chat_is_text_and_a_tokenizer_makes_it_exact() -> None:
    assert parse("--endpoint", "chat").prompts.style == "words"
    exact = parse("--endpoint", "chat", "--tokenizer", "/models/m").prompts
    assert exact == Prompts(style="tokenizer", tokenizer="/models/m")


def test_headers_the_key_and_extra_members_reach_the_target() -> None:
    target = parse(
        "--header", "X-Team: a:b", "--api-key", "secret", "--extra-body", '{"top_k": 20}'
    ).target
    assert target.headers == {"x-team": "a:b", "authorization": "Bearer secret"}
    assert target.extra_body == {"top_k": 20}


@pytest.mark.parametrize("endpoint", ["completions", "chat", "responses", "messages"])
def test_the_temperature_is_a_member_of_the_body(endpoint: str) -> None:
    target = parse("--endpoint", endpoint, "--temperature", "0.7").target
    assert target.extra_body == {"temperature": 0.7}


def test_generate_has_its_temperature_among_the_sampling_parameters() -> None:
    extra = '{"sampling_params": {"top_k": 5}}'
    target = parse("--endpoint", "generate", "--temperature", "0.7", "--extra-body", extra).target
    assert target.extra_body == {"sampling_params": {"temperature": 0.7, "top_k": 5}}


def test_the_reference_has_its_own_model_and_key() -> None:
    options = parse(
        "--api-key", "secret", "--reference", "http://r:1", "--reference-model", "base",
        "--reference-api-key", "other",
    )  # fmt: skip
    assert options.reference == Reference(
        url="http://r:1", model="base", headers={"authorization": "Bearer other"}
    )


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    assert parse().target.headers == {"authorization": "Bearer theirs"}
    monkeypatch.setenv("TANDEM_BENCH_API_KEY", "ours")
    assert parse().target.headers == {"authorization": "Bearer ours"}


def test_a_slo_may_have_one_limit() -> None:
    assert parse("--slo-ttft", "500ms").slo == Slo(ttft=0.5)


def test_commands_keep_their_times() -> None:
    options = parse("--at", "30s", "kubectl delete pod p", "--at", "1m", "true")
    assert options.commands == (
        TimedCommand(at=30.0, command="kubectl delete pod p"),
        TimedCommand(at=60.0, command="true"),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--adapter", "name"], "write NAME=WEIGHT"),
        (["--adapter", "name=nan"], "write NAME=WEIGHT"),
        (["--header", "no colon"], "write NAME:VALUE"),
        (["--extra-body", "[1]"], "not a JSON object"),
        (["--rate", "1", "--concurrency", "1"], "exclude each other"),
        (["--trace", "a", "--conversations", "b"], "exclude each other"),
        (["--arrivals", "ramp"], "needs --rate-end"),
        (["--rate-end", "9"], "needs --arrivals ramp"),
        (["--burstiness", "2"], "needs --arrivals gamma"),
        (["--arrivals", "gamma", "--concurrency", "1"], "no effect with --concurrency"),
        (["--arrivals", "gamma", "--trace", "a"], "no effect with --trace"),
        (["--workload", "chat", "--trace", "a"], "no effect with a file"),
        (["--reference-model", "m"], "need --reference"),
        (
            [
                "--endpoint",
                "generate",
                "--temperature",
                "1",
                "--extra-body",
                '{"sampling_params": 1}',
            ],
            "is no object",
        ),
        (["--reference", "http://r", "--temperature", "1"], "needs greedy answers"),
        (["--reference", "r"], "write http://HOST:PORT"),
        (["--metrics", "m"], "write http://HOST:PORT"),
        (["--find-rate", "0.9"], "needs an SLO"),
    ],
)
def test_values_that_do_not_fit_are_usage_errors(arguments: list[str], message: str) -> None:
    with pytest.raises(click.UsageError, match=message):
        parse(*arguments)
