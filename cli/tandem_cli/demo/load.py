"""The demo's requests: the built-in conversations, or a trace scaled to the model."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tandem_contract.request_kinds import RequestKind
from tandem_loadtest.calls import Answer, Call, Result
from tandem_loadtest.drivers import Send, Timed, converse
from tandem_loadtest.workload.conversations import Script, Shape, workload
from tandem_loadtest.workload.prompts import PromptWriter
from tandem_loadtest.workload.settings import Prompts
from tandem_loadtest.workload.traces import load_trace, scale, to_session

OnResult = Callable[[Result], None]

CONCURRENCY = 4
"""Conversations, or requests to the single engine, at a time."""


@dataclass(frozen=True, slots=True)
class Model:
    """The properties of the model on which the workload depends."""

    context: int
    """Maximum tokens of prompt and answer together."""
    has_chat_template: bool


def scripts_for(model: Model, shape: Shape, seed: int) -> list[Script]:
    """The built-in workload; only completions for a model without a chat template."""
    scripts = workload(shape, seed=seed)
    return [replace(script, chat=script.chat and model.has_chat_template) for script in scripts]


async def run_scripts(send: Send, scripts: Sequence[Script], on_result: OnResult) -> list[Result]:
    """Hold every conversation, `CONCURRENCY` at a time; results in the order of `scripts`."""
    limit = asyncio.Semaphore(CONCURRENCY)

    async def run(script: Script) -> list[Result]:
        async with limit:
            return await converse(send, script, on_result=on_result)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(script)) for script in scripts]
    return [result for task in tasks for result in task.result()]


def trace_calls(file: Path, limit: int | None, model: Model, seed: int) -> list[Timed]:
    """The trace's requests as calls of token ids, lengths and prefixes scaled to the model.

    Prompts get at most three quarters of the context. Raises TraceError for an invalid file.
    """
    arrivals = scale(
        load_trace(file, limit=limit),
        # The rest is for the answer and for what a chat template adds.
        max_prompt_tokens=model.context * 3 // 4,
        max_output_tokens=model.context // 16,
    )
    writer = PromptWriter(Prompts(style="token-ids"), kind=RequestKind.COMPLETIONS, seed=seed)
    return [Timed(a.at, writer.call(to_session(a, a.at), 0, ())) for a in arrivals]


def unstreamed(call: Call) -> Call:
    """The call as it is sent to the single engine: the same tokens, not streamed."""
    return replace(call, stream=False)


async def expected_answers(
    send: Send, calls: Sequence[Call], on_result: OnResult
) -> dict[Call, Answer | None]:
    """The single engine's answers to `calls`, which are all different; None where it failed."""
    limit = asyncio.Semaphore(CONCURRENCY)

    async def ask(call: Call) -> Answer | None:
        async with limit:
            result = await send(call)
        on_result(result)
        return result.answer if result.ok else None

    async with asyncio.TaskGroup() as group:
        tasks = {call: group.create_task(ask(call)) for call in calls}
    return {call: task.result() for call, task in tasks.items()}
