"""The demo's sequence: start the stack, send requests, check the answers, report."""

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tandem_contract import metrics, ports
from tandem_engine.chat import ChatTemplate
from tandem_loadtest.calls import Answer, Result
from tandem_loadtest.client import Client, ClientSettings
from tandem_loadtest.drivers import Timed, run_open_loop
from tandem_loadtest.scrape import Counters, scrape
from tandem_loadtest.workload.conversations import Script, Shape
from tandem_local.errors import SetupError
from tandem_local.router import write_plan_key
from tandem_local.runner import Runner
from tandem_local.stack import Stack
from tandem_operator.pods.manifests import plan_key_secrets, pods
from tandem_operator.resources.pool_files import parse_pools

from . import load, outcome, pools

T = TypeVar("T")

SHAPE: Final = Shape(groups=6, users=2, turns=3, document=1600, question=60, shorts=8, short=40)
"""The built-in workload: 56 requests of up to about 1,900 tokens."""

MIN_CONTEXT: Final = 2048
"""Tokens that the longest request of the built-in workload may need."""

WARM_UP: Final = 10.0
"""Maximum seconds to wait for the EPP's warm-up requests to end."""
_WARMED_UP: Final = f"{metrics.EPP_WARMING} 0.0"
"""The line of the EPP's metrics page when no warm-up request is running."""

MAX_CONTEXT: Final = 4096
"""Maximum context of the demo's engines in tokens, whatever the model supports."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command's flags."""

    model: Path | None
    trace: Path | None
    limit: int | None
    seed: int
    port: int
    json_file: Path | None
    run_dir: Path | None


async def run(options: Options) -> int:
    """Run the demo; returns the exit status. `demo` handles the errors."""
    console = Console()
    # Ends in reverse order: engines stop before the directory with their model is removed.
    async with AsyncExitStack() as resources:
        scratch = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="tandem-demo-")))
        directory = options.model or _make_tiny_model(scratch / "model", options.seed, console)
        model = _describe(directory)
        # Before the stack starts: an unusable trace fails at once.
        calls = _trace_calls(options, model)
        scripts = load.scripts_for(model, SHAPE, options.seed)
        console.print("Starting 1 prefill pod, 2 decode pods, the endpoint picker and Envoy")
        stack = await resources.enter_async_context(
            Stack(
                parse_pools(pools.pair(directory, model.context)),
                port=options.port,
                run_dir=options.run_dir,
                console=console,
            )
        )
        results, counters = await _send_workload(stack, scripts, calls, console)
        console.print("Sending the same requests to a single engine")
        single_engine = await resources.enter_async_context(
            # After the workload: it would compete with the stack for the CPU.
            _single_engine(directory, model.context, scratch)
        )
        expected = await _expected_answers(single_engine, results, console)
    required = outcome.REQUIRED_PATHS if calls is None else ()
    result = outcome.judge(results, expected, counters, required=required)
    console.print(outcome.table(result))
    for line in outcome.verdict(result):
        console.print(line, markup=False, soft_wrap=True)
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(result.to_json(), indent=1) + "\n")
    return result.status


def _make_tiny_model(directory: Path, seed: int, console: Console) -> Path:
    console.print(
        "No --model given: making a tiny Llama with random weights. Its output is meaningless;"
        " prefill, KV cache, KV transfer and decode are real."
    )
    # Imported here, because torch takes seconds: --help does not need it.
    from tandem_engine.tiny import make_tiny_model  # noqa: PLC0415

    make_tiny_model(directory, seed=seed, max_position=MAX_CONTEXT)
    return directory


def _describe(directory: Path) -> load.Model:
    from tandem_engine.weights import load_config  # noqa: PLC0415 - as above

    config = load_config(directory)
    context = min(MAX_CONTEXT, config.max_position)
    return load.Model(context, ChatTemplate(directory).exists)


def _trace_calls(options: Options, model: load.Model) -> list[Timed] | None:
    """The calls of --trace; None without one. Raises SetupError, TraceError."""
    if options.trace is None:
        if model.context < MIN_CONTEXT:
            raise SetupError(
                f"--model {options.model}: its context of {model.context} tokens is too short for"
                f" the built-in conversations, which need {MIN_CONTEXT}; use --trace: a trace is"
                " scaled to the model"
            )
        return None
    return load.trace_calls(options.trace, options.limit, model, options.seed)


async def _send_workload(
    stack: Stack, scripts: Sequence[Script], calls: Sequence[Timed] | None, console: Console
) -> tuple[list[Result], Counters]:
    """Send the workload through Envoy; the results, and what the engines counted meanwhile."""
    urls = [u for pod in stack.pods for u in (pod.engine_metrics, pod.sidecar_metrics) if u]
    async with (
        Client(ClientSettings(url=stack.endpoint, model=pools.SERVED)) as client,
        aiohttp.ClientSession() as http,
    ):
        await _wait_for_warm_up(http, stack.epp_metrics)
        # Counters only grow: what the workload moved is the difference.
        before = await scrape(http, urls)

        async def send_all(on_result: load.OnResult) -> list[Result]:
            if calls is not None:
                return await run_open_loop(client.send, calls, on_result=on_result)
            return await load.run_scripts(client.send, scripts, on_result)

        total = len(calls) if calls is not None else sum(len(s.steps) for s in scripts)
        results = await _with_progress(console, "Serving", total, send_all)
        return results, await scrape(http, urls) - before


async def _wait_for_warm_up(http: aiohttp.ClientSession, url: str) -> None:
    """Return when the EPP has no warm-up hand-off running, or after WARM_UP seconds.

    The KV of warm-up hand-offs would otherwise be counted as the workload's.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(WARM_UP):
            while True:
                async with http.get(url) as answer:
                    if _WARMED_UP in (await answer.text()).splitlines():
                        return
                await asyncio.sleep(0.05)


@asynccontextmanager
async def _single_engine(model: Path, context: int, scratch: Path) -> AsyncIterator[str]:
    """Run a single engine; yields the engine's own URL, which bypasses its pod's sidecar."""
    pool_sets = parse_pools(pools.single_engine(model, context))
    keys = scratch / "plan-keys"
    write_plan_key(keys)
    # The pod's manifest mounts the plan keys, although no plan is sent to this engine.
    secrets = dict.fromkeys(plan_key_secrets(pool_sets), keys)
    runner = Runner(scratch / "single-engine", secrets=secrets)
    try:
        running = runner.add(pods(pool_sets[0]))
        runner.start(running)
        await runner.wait_ready(running)
        yield f"http://{running[0].spec.address}:{ports.ENGINE_DECODE}"
    finally:
        # Also when the engine does not become ready: its processes must end.
        await runner.stop()


async def _expected_answers(
    url: str, results: Sequence[Result], console: Console
) -> list[Answer | None]:
    """The single engine's answers to the calls of `results`, in the same order."""
    calls = [load.unstreamed(result.call) for result in results]
    # Greedy answers to equal calls are equal: ask once.
    distinct = list(dict.fromkeys(calls))
    async with Client(ClientSettings(url=url, model=pools.SERVED)) as client:
        work = partial(load.expected_answers, client.send, distinct)
        answers = await _with_progress(console, "Checking", len(distinct), work)
    return [answers[call] for call in calls]


async def _with_progress(
    console: Console, description: str, total: int, work: Callable[[load.OnResult], Awaitable[T]]
) -> T:
    """Run `work` with a progress bar that counts requests by routing path."""
    counts: Counter[str] = Counter()
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[paths]}"),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(description, total=total, paths="")

        def on_result(result: Result) -> None:
            if path := result.routing_path if result.ok else "failed":
                counts[path] += 1
            text = "  ".join(f"{path} {count}" for path, count in sorted(counts.items()))
            progress.update(task, advance=1, paths=text)

        return await work(on_result)
