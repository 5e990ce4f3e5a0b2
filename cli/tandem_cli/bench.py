"""`tandem bench`: open-loop load on any OpenAI endpoint, and a table of its latencies."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from tandem_contract.commandline import DURATION, fail
from tandem_loadtest.calls import Call, Result
from tandem_loadtest.client import Client, Progress, Timed, run_open_loop
from tandem_loadtest.report import PathFigures, Slos, figures, summarize, to_json
from tandem_loadtest.traces import Arrival, load_trace, pace, scale, synthetic, token_ids

from . import options

VOCABULARY: Final = range(32, 256)
"""Token ids that stand for single bytes in byte-level and in sentencepiece vocabularies, and that
are no special tokens in most of them: prompts of these ids are valid for almost any model."""

_COUNT: Final = click.IntRange(min=1)


@options.command("bench")
@click.argument("url")
@click.option("--model", required=True, help="Model name to send in requests.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Mooncake JSONL or Azure CSV trace to replay. Without it, all requests have the same "
    "lengths and arrive at random (Poisson).",
)
@click.option(
    "--limit", type=_COUNT, default=100, help="Number of requests; the first ones of a trace."
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    help="Requests per second on average.  [default: the trace's own, or 1]",
)
@click.option("--prompt-tokens", type=_COUNT, default=512, help="Tokens of the longest prompt.")
@click.option("--output-tokens", type=_COUNT, default=64, help="Tokens of the longest answer.")
@click.option("--slo-ttft", type=DURATION, help="TTFT limit of a good request, like 500ms.")
@click.option("--slo-itl", type=DURATION, help="Mean ITL limit of a good request, like 50ms.")
@click.option("--timeout", type=DURATION, default="5m", help="Time limit for one complete answer.")
@click.option(
    "--max-in-flight",
    type=_COUNT,
    default=1000,
    help="Concurrent requests; further ones count as failed and are not sent late.",
)
@click.option("--seed", type=int, default=0, help="Seed of random prompts and arrivals.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Also write the figures to this file as JSON, times in seconds.",
)
def command(
    *,
    url: str,
    model: str,
    trace: Path | None,
    limit: int,
    rate: float | None,
    prompt_tokens: int,
    output_tokens: int,
    slo_ttft: float | None,
    slo_itl: float | None,
    timeout: float,
    max_in_flight: int,
    seed: int,
    json_file: Path | None,
) -> None:
    """Send open-loop load to the OpenAI endpoint URL and report TTFT and ITL.

    The lengths of a trace are scaled down to the token limits; its proportions and shared prefixes
    stay the same. Exits with 1 if a request failed.
    """
    _check_url(url)
    slos = _slos(slo_ttft, slo_itl)
    # Before the run, which may take minutes and would be lost.
    if json_file and not json_file.parent.is_dir():
        raise click.BadParameter(
            f"directory {json_file.parent} does not exist", param_hint="--json"
        )
    try:
        arrivals = _arrivals(
            trace, limit, rate, prompt=prompt_tokens, output=output_tokens, seed=seed
        )
    except ValueError as err:
        raise click.UsageError(str(err)) from err
    client = Client(url, model, timeout=timeout)
    # Around the whole run: goodput is per second of it, the last answers included.
    started = time.monotonic()
    results = asyncio.run(_run(client, _calls(arrivals, seed), max_in_flight))
    seconds = time.monotonic() - started
    total = figures(results, slos=slos, seconds=seconds)
    paths = summarize(results, slos=slos, seconds=seconds)
    Console().print(table(paths, total))
    if json_file:
        report = {**to_json({"all": total}), "paths": to_json(paths), "seconds": seconds}
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if total.failed:
        fail(_failure_summary(results))


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        # `port` raises ValueError for a number out of range; 0 is no port to connect to.
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
    except ValueError:
        usable = None
    if not usable:
        raise click.BadParameter(f"{url!r}: write http://HOST:PORT", param_hint="URL")


def _slos(ttft: float | None, itl: float | None) -> Slos | None:
    if ttft is None and itl is None:
        return None
    if ttft is None or itl is None:
        raise click.UsageError("--slo-ttft and --slo-itl go together: goodput needs both")
    return Slos(ttft, itl)


def _arrivals(
    trace: Path | None, limit: int, rate: float | None, *, prompt: int, output: int, seed: int
) -> list[Arrival]:
    """The requests and their times. Raises ValueError if the options or the trace are unusable."""
    if trace is None:
        return synthetic(
            limit, rate=rate or 1.0, prompt_tokens=prompt, output_tokens=output, seed=seed
        )
    arrivals = load_trace(trace, limit=limit)
    return scale(
        arrivals,
        max_prompt_tokens=prompt,
        max_output_tokens=output,
        time_factor=pace(arrivals, rate) if rate else 1.0,
    )


def _calls(arrivals: Sequence[Arrival], seed: int) -> list[Timed]:
    return [
        Timed(
            arrival.at,
            Call(
                tuple(token_ids(arrival, VOCABULARY, seed)),
                max_tokens=arrival.output_tokens,
                ignore_eos=True,
            ),
        )
        for arrival in arrivals
    ]


async def _run(client: Client, calls: Sequence[Timed], max_in_flight: int) -> list[Result]:
    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        # stdout has the table only, so that it can be piped.
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task("waiting", total=len(calls))

        def show(now: Progress) -> None:
            state = f"{now.sent - now.finished} in flight, {now.failed} failed"
            bar.update(task, completed=now.finished, description=state)

        # Entered here, because aiohttp's session needs a running event loop.
        async with client:
            return await run_open_loop(
                client.send, calls, max_in_flight=max_in_flight, on_progress=show
            )


def table(paths: dict[str, PathFigures], total: PathFigures) -> Table:
    """One row per path, and a row for all requests if there is more than one path."""
    rows = Table("path", box=None, collapse_padding=True, caption="times in ms")
    headings = ("requests", "failed", "TTFT p50", "p99", "ITL p50", "p99", "goodput/s")
    for heading in headings if total.goodput is not None else headings[:-1]:
        rows.add_column(heading, justify="right", no_wrap=True)
    for path, row in paths.items():
        rows.add_row(path, *_cells(row))
    if len(paths) > 1:
        rows.add_row("all", *_cells(total), style="bold")
    return rows


def _cells(row: PathFigures) -> list[str]:
    times = (row.ttft_p50, row.ttft_p99, row.itl_p50, row.itl_p99)
    goodput = [] if row.goodput is None else [f"{row.goodput:.2f}"]
    return [str(row.requests), str(row.failed), *map(_millis, times), *goodput]


def _millis(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:.1f}"


def _failure_summary(results: Sequence[Result]) -> str:
    """One line: how many failed, and the most frequent reasons."""
    reasons = Counter(r.error for r in results if r.error)
    summary = "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common(3))
    return f"{reasons.total()} of {len(results)} requests failed: {summary}"
