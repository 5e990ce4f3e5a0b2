"""Flow control at overload, live: clients, Envoy and EPPs are real, engines as `flow_engines`.

Four engines of one process take each step's time and compute nothing. Clients have API keys, whose
settings say priority and tenant, and send streams of 400 prompt tokens and 20 answer tokens on
average as Poisson processes. Everything shares this machine's cores. Part `torch` has two torch
engines instead; part `llmd` has llm-d's EPP with its own flow control, where TANDEM_LLMD_BIN is a
folder with its program `epp`.
"""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.epp.real import Epp, until
from tests.epp.simulation.flow import jain
from tests.llmd.programs import FOLDER

from tandem_contract import endpoints
from tandem_loadtest.figures.distributions import percentile

from .figures import Figure, at_least, at_most, progress, without_target
from .flow_stack import (
    HIGH,
    HOST,
    LOW,
    Answer,
    MakeEngines,
    Stack,
    capacity,
    llmd_program,
    llmd_stack,
    paced_engines,
    stack,
    torch_pair,
)

TENANTS: Final = 50
SECONDS: Final = 120.0
_SHORT: Final = 30.0
_WARM: Final = 10.0
"""Seconds until the engines are full, which are not counted."""
_QUICK: Final = 0.005
_HANG: Final = 60.0
_KEPT: Final = 5000
_KEPT_BYTES: Final = 100_000
_KILLED: Final = 1000
_TTL: Final = 5.0


async def overload(
    engines: MakeEngines = paced_engines, name: str = "live", seconds: float = SECONDS
) -> list[Figure]:
    """Twice the capacity, a tenth of it more important."""
    async with stack(None, engines=engines) as off:
        rate = 2 * off.engines.capacity
        rates = {HIGH: 0.1 * rate, LOW: 0.9 * rate}
        alone = _p99(await off.load({HIGH: rates[HIGH]}, seconds))
        await off.engine_figures()
        without = await _overloaded(off, rates, seconds)
    async with stack({"ttl": "60s"}, engines=engines) as on:
        gated = await _overloaded(on, rates, seconds)
        held = await on.epps[0].figures()
    important = 'tandem_epp_flow_seconds_{}{{priority="10"}}'
    waited = held[important.format("sum")] / held[important.format("count")]
    return [
        without_target(f"{name}: p99 TTFT of the important alone", alone, "s"),
        at_most(
            f"{name}: p99 TTFT of the important, over that alone", gated.ttft / alone, "x", 1.3
        ),
        without_target(f"{name}: the same without flow control", without.ttft / alone, "x"),
        without_target(f"{name}: mean hold of the important", waited, "s"),
        at_least(f"{name}: tokens over those without", gated.tokens / without.tokens, "x", 0.98),
        at_most(f"{name}: requests in an engine's own queue, mean", gated.queue, "", 2),
        without_target(f"{name}: the same without flow control", without.queue, ""),
    ]


async def torch() -> list[Figure]:
    """The same with two torch engines, for a short time."""
    return await overload(torch_pair, "live, two torch engines", _SHORT)


@dataclass
class _Overloaded:
    ttft: float
    """p99 of the important."""
    tokens: float
    """Per second."""
    queue: float


async def _overloaded(made: Stack, rates: dict[str, float], seconds: float) -> _Overloaded:
    async def window() -> list[dict[str, float]]:
        await asyncio.sleep(_WARM)
        await made.engine_figures()
        await asyncio.sleep(seconds)
        return await made.engine_figures()

    answers, engines = await asyncio.gather(made.load(rates, _WARM + seconds + 1.0), window())
    began = min(each.sent for each in answers) + _WARM
    late = [each for each in answers if each.sent > began]
    measured = sum(each["seconds"] for each in engines)
    return _Overloaded(
        _p99(late),
        len(engines) * sum(each["tokens"] for each in engines) / measured,
        sum(each["queued"] for each in engines) / measured,
    )


def _p99(answers: Sequence[Answer]) -> float:
    important = [each.ttft for each in answers if each.client == HIGH and each.status == 200]
    return percentile(sorted(important), 99)


async def tenants() -> list[Figure]:
    """Fifty tenants, one of which sends ten times as much; one EPP, and three."""
    figures = []
    rates = _tenant_rates()
    for replicas in (1, 3):
        flow = {"ttl": "15s"}
        async with stack(flow, clients=dict.fromkeys(rates, 0), replicas=replicas) as made:
            index = (await _shared(made, rates)).index
        figures.append(
            at_least(f"live: Jain's index of 50 tenants, {replicas} EPP", index, "", 0.95)
        )
    return figures


async def llmd() -> list[Figure]:
    """The same load of tenants with llm-d's EPP and its flow control, beside ours. No priorities:
    llm-d's EPP reads them from a cluster."""
    program = llmd_program()
    if program is None:
        progress(f"left out: llm-d's EPP, since {FOLDER} has no program epp")
        return []
    rates = _tenant_rates()
    async with llmd_stack(program, dict.fromkeys(rates, 0)) as theirs:
        llmds = await _shared(theirs, rates)
    async with stack({"ttl": "15s"}, clients=dict.fromkeys(rates, 0)) as made:
        ours = await _shared(made, rates)
    figures = []
    for name, shared in (("llm-d's EPP", llmds), ("ours", ours)):
        figures += [
            without_target(f"live, beside llm-d, {name}: tokens per second", shared.tokens, ""),
            without_target(f"live, beside llm-d, {name}: engines' own queue", shared.queue, ""),
            without_target(f"live, beside llm-d, {name}: Jain's index", shared.index, ""),
            without_target(f"live, beside llm-d, {name}: mean TTFT", shared.ttft, "s"),
        ]
    return figures


def _tenant_rates() -> dict[str, float]:
    unit = 2 * capacity() / (TENANTS + 9)
    return {"noisy": 10 * unit} | {f"tenant-{number}": unit for number in range(1, TENANTS)}


@dataclass
class _Shared:
    index: float
    """Jain's, of the answers that the tenants got."""
    tokens: float
    """Per second."""
    queue: float
    ttft: float
    """Mean."""


async def _shared(made: Stack, rates: dict[str, float]) -> _Shared:
    await made.engine_figures()
    answers = await made.load(rates, _WARM + SECONDS)
    engines = await made.engine_figures()
    began = min(each.sent for each in answers) + _WARM
    late = [each for each in answers if each.status == 200 and each.ended > began]
    got = Counter(each.client for each in late)
    seconds = sum(each["seconds"] for each in engines)
    return _Shared(
        jain([got[name] for name in rates]),
        len(engines) * sum(each["tokens"] for each in engines) / seconds,
        sum(each["queued"] for each in engines) / seconds,
        sum(each.ttft for each in late) / len(late),
    )


async def idle() -> list[Figure]:
    """At 70 % of the capacity."""
    costs, figures = {}, []
    for name, flow in (("off", None), ("on", {})):
        async with stack(flow) as made:
            cpu = _cpu(made.epps[0])
            answers = await made.load({HIGH: 0.7 * capacity()}, SECONDS)
            costs[name] = (_cpu(made.epps[0]) - cpu) / len(answers)
            page = await made.epps[0].figures()
        if flow is not None:
            bucket = 'tandem_epp_flow_seconds_bucket{le="0.005",priority="10"}'
            went = 'tandem_epp_flow_ended_total{priority="10",result="went"}'
            late = page.get(went, 0.0) - page.get(bucket, 0.0)
            share = 100 * late / len(answers)
            figures.append(at_most("live: held over 5 ms at 70 % load", share, "%", 0))
    ratio = costs["on"] / costs["off"]
    figures.append(at_most("live: CPU of a request at 70 % load, over off", ratio, "x", 1.05))
    figures.append(without_target("live: CPU of a request, off", 1e6 * costs["off"], "µs"))
    return figures


def _cpu(picker: Epp) -> float:
    fields = Path(f"/proc/{picker.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def scrapes() -> list[Figure]:
    """No metrics page is answered for a minute, while the load is twice the capacity."""
    rate = {LOW: 2 * capacity()}
    async with stack({"ttl": "20s"}) as made:
        await made.load(rate, _WARM + _SHORT)
        usual = sum(each["tokens"] for each in await made.engine_figures()) / (_WARM + _SHORT)
        await made.switch("hang")
        answers = await made.load(rate, _HANG)
        blind = sum(each["tokens"] for each in await made.engine_figures()) / _HANG
        await made.switch("hang")
    failed = [each for each in answers if each.status == 0 or each.status >= 500]
    return [
        at_least("live: tokens without metrics pages, over those with", blind / usual, "x", 0.8),
        at_most("live: 5xx and broken answers meanwhile", len(failed), "", 0),
    ]


async def memory() -> list[Figure]:
    """Many large requests wait."""
    prompt = "word " * (_KEPT_BYTES // 5)
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1, "stream": True}).encode()
    flags = ("--held-bytes", str(4 * _KEPT * len(body)))
    flow = {"ttl": "60s", "max_requests": 2 * _KEPT}
    async with stack(flow, flags=flags) as made:
        await made.switch("stall")
        before = _resident(made.epps[0])
        began = time.monotonic()
        tasks = []
        for number in range(_KEPT):
            tasks.append(asyncio.create_task(made.send(LOW, body)))
            if number % 50 == 49:
                # As many at a time as the machine takes.
                await asyncio.sleep(0.1)

        async def are_held() -> bool:
            return await made.held() >= 0.97 * _KEPT

        with suppress(TimeoutError):
            await until(are_held, within=max(1.0, began + 55 - time.monotonic()))
        held, page = await made.held(), await made.epps[0].figures()
        size = page["tandem_epp_flow_held_bytes"]
        grown = _resident(made.epps[0]) - before
        await made.switch("stall")
        answers = await asyncio.gather(*tasks)
    said = [each for each in answers if each.status == 200 or each.reason]
    return [
        without_target("live: requests of 100 KB held", held, ""),
        at_most("live: memory over the bytes held", grown / size, "x", 1.3),
        at_least("live: answered, or refused with a reason", len(said) / len(answers), "", 1),
    ]


def _resident(picker: Epp) -> int:
    pages = int(Path(f"/proc/{picker.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def killed() -> list[Figure]:
    """One EPP of two is killed while both hold requests."""
    async with stack({"ttl": "60s"}, replicas=2) as made:
        await made.switch("stall")
        tasks = [asyncio.create_task(made.send(LOW)) for _ in range(_KILLED)]

        async def are_held() -> bool:
            return await made.held() >= 0.9 * _KILLED

        await until(are_held, within=60)
        held = await made.held()
        made.epps[0].process.send_signal(signal.SIGKILL)
        await made.epps[0].process.wait()
        await made.switch("stall")
        _, hanging = await asyncio.wait(tasks, timeout=90)
        statuses = Counter(task.result().status for task in tasks if task.done())
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
    progress(f"one EPP killed: {dict(statuses)}, {len(hanging)} without an end")
    wrong = sum(count for status, count in statuses.items() if status not in (200, 429, 503))
    return [
        without_target("live: requests held when one EPP of two is killed", held, ""),
        at_most("live: of these without an end after 90 s", len(hanging), "", 0),
        at_most("live: of these with another end than 200, 429, 503", wrong, "", 0),
    ]


async def from_zero() -> list[Figure]:
    """The first pod comes while requests wait for it; and how exact their time is."""
    # The pages hang until then, so no pod is ready.
    async with stack({"ttl": "60s", "no_endpoint_ttl": "60s"}) as made:
        await made.switch("hang")

        async def are_gone() -> bool:
            return await made.epps[0].serves()

        await until(are_gone, within=60)
        short = await asyncio.gather(
            *(made.send(LOW, x_llm_d_inference_ttl=f"{_TTL:g}s") for _ in range(20))
        )
        timed = [held for held in await _held_seconds(made, len(short)) if held > _TTL / 2]
        tasks = [asyncio.create_task(made.send(LOW)) for _ in range(100)]
        await asyncio.sleep(25)
        await made.switch("hang")
        answers = await asyncio.gather(*tasks)
    late = max(abs(each.ended - each.sent - _TTL) for each in short)
    late_there = max(abs(held - _TTL) for held in timed)
    answered = sum(each.status == 200 for each in answers) / len(answers)
    return [
        at_least("live: answered after 25 s without a pod", answered, "", 1),
        at_most("live: largest error of a TTL of 5 s", 1000 * late, "ms", 100),
        without_target("live: the same, as the EPP measures it", 1000 * late_there, "ms"),
    ]


async def _held_seconds(made: Stack, number: int) -> list[float]:
    """How long the EPP held the latest requests."""
    port = made.epps[0].metrics
    url = f"http://{HOST}:{port}{endpoints.DEBUG_DECISIONS}?limit={number}"
    async with made.http.get(url) as answer:
        return [float(decision["held"]) for decision in await answer.json()]


PARTS: Final[dict[str, Callable[[], Awaitable[list[Figure]]]]] = {
    "overload": overload,
    "tenants": tenants,
    "idle": idle,
    "scrapes": scrapes,
    "memory": memory,
    "killed": killed,
    "zero": from_zero,
    "torch": torch,
    "llmd": llmd,
}


def measure(parts: Sequence[str]) -> list[Figure]:
    """The figures of `parts`; none: of all. Prints which are left out."""
    figures = []
    for name in parts or PARTS:
        progress(f"live: {name}")
        figures += asyncio.run(PARTS[name]())
    return figures
