"""The order of things: bring up, send, check, report."""

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
from tandem_loadtest.client import Client, Timed
from tandem_loadtest.conversations import Script, Shape
from tandem_loadtest.scrape import Counters, scrape
from tandem_local.errors import SetupError
from tandem_local.router import write_plan_key
from tandem_local.runner import Runner
from tandem_local.stack import Stack
from tandem_operator.pods.manifests import plan_key_secrets, pods
from tandem_operator.resources.pool_files import parse_pools

from . import load, outcome, pools

T = TypeVar("T")

SHAPE: Final = Shape(groups=6, users=2, turns=3, document=1600, question=60, shorts=8, short=40)
"""The built-in workload: 56 requests, of up to some 1,900 tokens."""

ENOUGH: Final = 2048
"""Tokens that the longest of them may take."""

WARM_UP: Final = 10.0
"""Seconds to wait at most for what the pods first do among themselves."""
_NONE_WARMING: Final = f"{metrics.EPP_WARMING} 0.0"

CONTEXT: Final = 4096
"""Tokens the demo's engines are given at most, whatever the model could do."""


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
    """Run the demo; the exit status. Raises what `demo` turns into one line."""
    console = Console()
    async with AsyncExitStack() as opened:
        scratch = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="tandem-demo-")))
        directory = options.model or _tiny(scratch / "model", options.seed, console)
        model = _describe(directory)
        calls = _trace(options, model)
        scripts = load.scripts_for(model, SHAPE, options.seed)
        console.print("Bringing up 1 prefill pod, 2 decode pods, the endpoint picker and Envoy")
        stack = await opened.enter_async_context(
            Stack(
                parse_pools(pools.pair(directory, model.context)),
                port=options.port,
                run_dir=options.run_dir,
                console=console,
            )
        )
        results, moved = await _serve(stack, scripts, calls, console)
        console.print("Asking one engine alone for the same answers")
        alone = await opened.enter_async_context(_alone(directory, model.context, scratch))
        expected = await _check(alone, results, console)
    wanted = outcome.WANTED if calls is None else ()
    result = outcome.judge(results, expected, moved, wanted=wanted)
    console.print(outcome.table(result))
    for line in outcome.verdict(result):
        console.print(line, markup=False, soft_wrap=True)
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(result.to_json(), indent=1) + "\n")
    return result.status


def _tiny(directory: Path, seed: int, console: Console) -> Path:
    console.print(
        "No --model given: making a tiny Llama with random weights. Its words mean nothing;"
        " the prefill, the KV cache and everything that moves it are real."
    )
    # Torch takes seconds to import: --help does without.
    from tandem_engine.tiny import make_tiny_model  # noqa: PLC0415

    make_tiny_model(directory, seed=seed, max_position=CONTEXT)
    return directory


def _describe(directory: Path) -> load.Model:
    from tandem_engine.weights import load_config  # noqa: PLC0415 - as above

    config = load_config(directory)
    # The first ids are special tokens in the tokenizers that Llama-family models come with.
    vocabulary = range(min(10, config.vocab_size // 2), config.vocab_size)
    chats = ChatTemplate(directory).exists
    return load.Model(vocabulary, min(CONTEXT, config.max_position), chats)


def _trace(options: Options, model: load.Model) -> list[Timed] | None:
    if options.trace is None:
        if model.context < ENOUGH:
            raise SetupError(
                f"--model {options.model}: its context of {model.context} tokens is too short for"
                f" the built-in conversations, which need {ENOUGH}: give a --trace, it is scaled"
            )
        return None
    return load.trace_calls(options.trace, options.limit, model, options.seed)


async def _serve(
    stack: Stack, scripts: Sequence[Script], calls: Sequence[Timed] | None, console: Console
) -> tuple[list[Result], Counters]:
    """Send the workload through Envoy; the results and what the engines counted meanwhile."""
    urls = [u for pod in stack.pods for u in (pod.engine_metrics, pod.sidecar_metrics) if u]
    async with Client(stack.endpoint, pools.SERVED) as client, aiohttp.ClientSession() as http:
        await _pairs_met(http, stack.epp_metrics)
        before = await scrape(http, urls)

        async def drive(on_result: load.OnResult) -> list[Result]:
            if calls is not None:
                return await load.run_trace(client.send, calls, on_result)
            return await load.run_scripts(client.send, scripts, on_result)

        total = len(calls) if calls is not None else sum(len(s.steps) for s in scripts)
        results = await _shown(console, "Serving", total, drive)
        return results, await scrape(http, urls) - before


async def _pairs_met(http: aiohttp.ClientSession, url: str) -> None:
    """Return when no first hand-off of the picker's is under way, whose KV would be counted as the
    workload's; after WARM_UP seconds in any case."""
    with suppress(TimeoutError):
        async with asyncio.timeout(WARM_UP):
            while True:
                async with http.get(url) as answer:
                    if _NONE_WARMING in (await answer.text()).splitlines():
                        return
                await asyncio.sleep(0.05)


@asynccontextmanager
async def _alone(model: Path, context: int, scratch: Path) -> AsyncIterator[str]:
    """The lone engine; yields its own URL, past the sidecar that its pod has too."""
    alone = parse_pools(pools.lone(model, context))
    keys = scratch / "plan-keys"
    write_plan_key(keys)
    runner = Runner(scratch / "alone", secrets=dict.fromkeys(plan_key_secrets(alone), keys))
    try:
        running = runner.add(pods(alone[0]))
        runner.start(running)
        await runner.wait_ready(running)
        yield f"http://{running[0].spec.address}:{ports.ENGINE_DECODE}"
    finally:
        await runner.stop()


async def _check(url: str, results: Sequence[Result], console: Console) -> list[Answer | None]:
    """The lone engine's answers to the same calls, in the same order."""
    calls = [load.whole(result.call) for result in results]
    distinct = list(dict.fromkeys(calls))
    async with Client(url, pools.SERVED) as client:
        answers = await _shown(
            console, "Checking", len(distinct), partial(load.answers_alone, client.send, distinct)
        )
    return [answers[call] for call in calls]


async def _shown(
    console: Console, what: str, total: int, work: Callable[[load.OnResult], Awaitable[T]]
) -> T:
    """Run `work` under a progress bar that counts routing paths."""
    counts: Counter[str] = Counter()
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[paths]}"),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total, paths="")

        def told(result: Result) -> None:
            if kind := result.routing_path if result.ok else "failed":
                counts[kind] += 1
            shown = "  ".join(f"{path} {count}" for path, count in sorted(counts.items()))
            progress.update(task, advance=1, paths=shown)

        return await work(told)
