"""What the demo sends: the built-in conversations, or a trace scaled to the model."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tandem_loadtest.calls import Answer, Call, Result
from tandem_loadtest.client import Send, Timed, converse, run_open_loop
from tandem_loadtest.conversations import Script, Shape, workload
from tandem_loadtest.traces import load_trace, scale, token_ids

OnResult = Callable[[Result], None]

AT_A_TIME = 4
"""Conversations, or checks against the lone engine, that go on side by side."""


@dataclass(frozen=True, slots=True)
class Model:
    """What a workload must know of the model."""

    vocabulary: range
    """Token ids that stand for text."""
    context: int
    """Tokens of prompt and answer together."""
    chats: bool
    """It has a chat template."""


def scripts_for(model: Model, shape: Shape, seed: int) -> list[Script]:
    """The built-in workload; completions alone for a model that has no chat template."""
    scripts = workload(shape, seed=seed)
    return [replace(script, chat=script.chat and model.chats) for script in scripts]


async def run_scripts(send: Send, scripts: Sequence[Script], on_result: OnResult) -> list[Result]:
    """Every conversation, `AT_A_TIME` side by side; results in the order of `scripts`."""
    places = asyncio.Semaphore(AT_A_TIME)

    async def one(script: Script) -> list[Result]:
        async with places:
            return await converse(send, script, on_result=on_result)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(script)) for script in scripts]
    return [result for task in tasks for result in task.result()]


def trace_calls(file: Path, limit: int | None, model: Model, seed: int) -> list[Timed]:
    """The trace's requests as calls of token ids, lengths and prefixes scaled to the model.

    A quarter of the context is left for answers. Raises TraceError for a bad file.
    """
    arrivals = scale(
        load_trace(file, limit=limit),
        max_prompt_tokens=model.context * 3 // 4,
        max_output_tokens=model.context // 16,
    )
    return [
        Timed(
            arrival.at,
            Call(
                tuple(token_ids(arrival, model.vocabulary, seed)),
                max_tokens=arrival.output_tokens,
                stream=True,
                ignore_eos=True,
            ),
        )
        for arrival in arrivals
    ]


async def run_trace(send: Send, calls: Sequence[Timed], on_result: OnResult) -> list[Result]:
    """Every call at its time, whatever the answers do."""

    async def told(call: Call) -> Result:
        result = await send(call)
        on_result(result)
        return result

    return await run_open_loop(told, calls)


def whole(call: Call) -> Call:
    """The call as the lone engine is asked it: the same tokens, not streamed."""
    return replace(call, stream=False)


async def answers_alone(
    send: Send, calls: Sequence[Call], on_result: OnResult
) -> dict[Call, Answer | None]:
    """The lone engine's answers to `calls`, none of them twice there; None where it failed."""
    places = asyncio.Semaphore(AT_A_TIME)

    async def one(call: Call) -> Answer | None:
        async with places:
            result = await send(call)
        on_result(result)
        return result.answer if result.ok else None

    async with asyncio.TaskGroup() as group:
        tasks = {call: group.create_task(one(call)) for call in calls}
    return {call: task.result() for call, task in tasks.items()}
