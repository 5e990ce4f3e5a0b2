"""Flow control at overload, live: clients, Envoy and EPPs are real, engines as `flow_engines`.

Four engines of one process take each step's time and compute nothing. Clients have API keys, whose
settings say priority and tenant, and send streams of 400 prompt tokens and 20 answer tokens on
average as Poisson processes. Everything shares this machine's cores.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import aiohttp
from tests.epp.real import Epp, envoy, envoy_settings, epp, until
from tests.epp.simulation.flow import jain

from tandem_contract import headers as wire
from tandem_loadtest.figures.distributions import percentile
from tandem_local.ports import free_port
from tandem_operator.routing.api_keys import filter_config

from .figures import Figure, at_least, at_most, progress, without_target
from .flow_engines import BUDGET, REQUESTS
from .paced_engine import PER_TOKEN, STEP

ENGINES: Final = 4
PROMPT: Final = 400
OUTPUT: Final = 20
TENANTS: Final = 50
SECONDS: Final = 30.0
_WARM: Final = 10.0
"""Seconds until the engines are full, which are not counted."""
HIGH: Final = "interactive"
LOW: Final = "batch"
_QUICK: Final = 0.005
_HOST: Final = "127.0.0.1"
_HANG: Final = 60.0
_KEPT: Final = 5000
_KEPT_BYTES: Final = 100_000
_KILLED: Final = 1000


def capacity() -> float:
    """Requests per second that the engines compute: what a full batch takes of a step's time."""
    step = STEP / REQUESTS * OUTPUT + STEP * PROMPT / BUDGET
    return ENGINES / (step + PER_TOKEN * (PROMPT + OUTPUT))


@dataclass
class Answer:
    """What became of a request."""

    client: str
    sent: float
    status: int = 0
    """0: the connection broke."""
    ttft: float = 0.0
    ended: float = 0.0
    reason: str = ""
    """Why it was refused, as the header says."""


@dataclass
class Stack:
    """Engines, EPPs and Envoy."""

    url: str
    engines: Sequence[int]
    epps: Sequence[Epp]
    http: aiohttp.ClientSession
    random: Random = field(default_factory=lambda: Random(1))

    async def send(self, client: str, body: bytes = b"", **headers: str) -> Answer:
        """One request, to its end."""
        body = body or self._body()
        answer = Answer(client, time.monotonic())
        sent = {"x-api-key": f"key-of-{client}", "content-type": "application/json"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            url = f"{self.url}/v1/completions"
            async with self.http.post(url, data=body, headers=sent) as response:
                async for _ in response.content.iter_any():
                    answer.ttft = answer.ttft or time.monotonic() - answer.sent
                answer.status = response.status
                answer.reason = response.headers.get(wire.REQUEST_DROPPED_REASON, "")
        except aiohttp.ClientError:
            answer.status = 0
        answer.ended = time.monotonic()
        return answer

    async def load(self, rates: dict[str, float], seconds: float = SECONDS) -> list[Answer]:
        """Send requests of each client at its rate for `seconds`; returns all that ended by then,
        and cancels the others."""
        tasks: list[asyncio.Task[Answer]] = []

        async def clients(client: str, rate: float) -> None:
            while True:
                await asyncio.sleep(self.random.expovariate(rate))
                tasks.append(asyncio.create_task(self.send(client)))

        senders = [asyncio.create_task(clients(*each)) for each in rates.items()]
        await asyncio.sleep(seconds)
        for task in (*senders, *tasks):
            task.cancel()
        await asyncio.gather(*senders, *tasks, return_exceptions=True)
        return [task.result() for task in tasks if not task.cancelled() and not task.exception()]

    async def engine_figures(self) -> list[dict[str, float]]:
        """Of each engine, since the last call."""
        found = []
        for port in self.engines:
            async with self.http.get(f"http://{_HOST}:{port}/figures") as answer:
                found.append(await answer.json())
        return found

    async def switch(self, name: str) -> None:
        """`stall` or `hang` all engines, or end it."""
        async with self.http.post(f"http://{_HOST}:{self.engines[0]}/{name}") as answer:
            answer.raise_for_status()

    async def held(self) -> float:
        """Requests that wait in all EPPs."""
        figures = [await each.figures() for each in self.epps if each.process.returncode is None]
        waiting = "tandem_epp_flow_held{"
        return sum(v for page in figures for k, v in page.items() if k.startswith(waiting))

    def _body(self) -> bytes:
        words = 1 + round(self.random.expovariate(1 / PROMPT))
        output = 1 + round(self.random.expovariate(1 / OUTPUT))
        prompt = " ".join(str(self.random.randrange(10_000)) for _ in range(words))
        body = {"model": "m", "prompt": prompt, "max_tokens": output, "stream": True}
        return json.dumps(body).encode()


@asynccontextmanager
async def stack(
    flow: dict[str, Any] | None,
    *,
    clients: dict[str, int] | None = None,
    replicas: int = 1,
    flags: Sequence[str] = (),
) -> AsyncIterator[Stack]:
    """A stack with flow control as `flow`; None: off. `clients`: each with its priority."""
    clients = clients or {HIGH: 10, LOW: 0}
    async with AsyncExitStack() as parts:
        directory = Path(parts.enter_context(tempfile.TemporaryDirectory()))
        engines = [free_port(_HOST) for _ in range(ENGINES)]
        await parts.enter_async_context(_engines(engines))
        config = {"backends": [
            {"name": f"e{i}", "url": f"http://{_HOST}:{port}"} for i, port in enumerate(engines)
        ]}  # fmt: skip
        if flow is not None:
            listed = [{"name": name, "priority": number} for name, number in clients.items()]
            config["flow_control"] = {"enabled": True, "clients": listed, **flow}  # type: ignore[assignment]
        file = directory / "router.yaml"
        file.write_text(json.dumps(config))
        pickers = [
            await parts.enter_async_context(epp(file, *own, *flags))
            for own in _replica_flags(directory, replicas)
        ]
        keys = directory / "keys"
        keys.mkdir()
        listed_keys = {name: f"key-of-{name}" for name in clients}
        (keys / "keys.json").write_text(json.dumps(filter_config(listed_keys)))
        settings = replace(
            envoy_settings(pickers[0].grpc, body_mode="FULL_DUPLEX_STREAMED"),
            api_key_file=str(keys / "keys.json"),
        )
        others = [each.grpc for each in pickers[1:]]
        url = await parts.enter_async_context(envoy(directory, settings, others))
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=300)
        http = aiohttp.ClientSession(connector=connector, timeout=timeout)
        await parts.enter_async_context(http)
        made = Stack(url, engines, pickers, http)
        # The EPP learns how fast the engines are, and how long answers.
        await made.load({next(iter(clients)): 0.3 * capacity()}, 5.0)
        await made.engine_figures()
        yield made


@asynccontextmanager
async def _engines(ports: Sequence[int]) -> AsyncIterator[None]:
    command = [sys.executable, "-m", "benchmarks.flow_engines", *map(str, ports)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        if not await process.stdout.readline():
            raise RuntimeError("the engines did not start")
        yield
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _replica_flags(directory: Path, replicas: int) -> list[list[str]]:
    if replicas == 1:
        return [[]]
    keys = directory / "plan-keys"
    keys.mkdir()
    (keys / "k1").write_bytes(b"0123456789abcdef")
    ports = [free_port(_HOST) for _ in range(replicas)]
    shared = ["--plan-key-dir", str(keys)]
    for port in ports:
        shared += ["--peers", f"{_HOST}:{port}"]
    return [[*shared, "--peer-listen", f"{_HOST}:{port}"] for port in ports]


async def overload() -> list[Figure]:
    """Twice the capacity, a tenth of it more important."""
    rate = 2 * capacity()
    rates = {HIGH: 0.1 * rate, LOW: 0.9 * rate}
    async with stack(None) as off:
        alone = _p99(await off.load({HIGH: rates[HIGH]}))
        await off.engine_figures()
        without = await _overloaded(off, rates)
    async with stack({"ttl": "60s"}) as on:
        gated = await _overloaded(on, rates)
    return [
        without_target("live: p99 TTFT of the important alone", alone, "s"),
        at_most("live: p99 TTFT of the important, over that alone", gated.ttft / alone, "x", 1.3),
        without_target("live: the same without flow control", without.ttft / alone, "x"),
        at_least("live: tokens over those without", gated.tokens / without.tokens, "x", 0.98),
        at_most("live: requests in an engine's own queue, mean", gated.queue, "", 2),
        without_target("live: the same without flow control", without.queue, ""),
    ]


@dataclass
class _Overloaded:
    ttft: float
    tokens: float
    queue: float


async def _overloaded(made: Stack, rates: dict[str, float]) -> _Overloaded:
    async def window() -> list[dict[str, float]]:
        await asyncio.sleep(_WARM)
        await made.engine_figures()
        await asyncio.sleep(SECONDS)
        return await made.engine_figures()

    answers, engines = await asyncio.gather(made.load(rates, _WARM + SECONDS + 1.0), window())
    began = min(each.sent for each in answers) + _WARM
    late = [each for each in answers if each.sent > began]
    seconds = sum(each["seconds"] for each in engines)
    return _Overloaded(
        _p99(late),
        sum(each["tokens"] for each in engines),
        sum(each["queued"] for each in engines) / seconds,
    )


def _p99(answers: Sequence[Answer]) -> float:
    important = [each.ttft for each in answers if each.client == HIGH and each.status == 200]
    return percentile(sorted(important), 99)


async def tenants() -> list[Figure]:
    """Fifty tenants, one of which sends ten times as much; one EPP, and three."""
    figures = []
    unit = 2 * capacity() / (TENANTS + 9)
    names = [f"tenant-{number}" for number in range(1, TENANTS)]
    rates = {"noisy": 10 * unit, **dict.fromkeys(names, unit)}
    clients = dict.fromkeys(rates, 0)
    for replicas in (1, 3):
        async with stack({"ttl": "15s"}, clients=clients, replicas=replicas) as made:
            answers = await made.load(rates, _WARM + 2 * SECONDS)
        began = min(each.sent for each in answers) + _WARM
        got = Counter(a.client for a in answers if a.status == 200 and a.ended > began)
        index = jain([got[name] for name in rates])
        name = f"live: Jain's index of 50 tenants, {replicas} EPP"
        figures.append(at_least(name, index, "", 0.95))
    return figures


async def idle() -> list[Figure]:
    """At 70 % of the capacity."""
    costs, figures = {}, []
    for name, flow in (("off", None), ("on", {})):
        async with stack(flow) as made:
            cpu = _cpu(made.epps[0])
            answers = await made.load({HIGH: 0.7 * capacity()})
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
        await made.load(rate, _WARM + SECONDS)
        usual = sum(each["tokens"] for each in await made.engine_figures()) / (_WARM + SECONDS)
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
            *(made.send(LOW, x_llm_d_inference_ttl="5s") for _ in range(20))
        )
        tasks = [asyncio.create_task(made.send(LOW)) for _ in range(100)]
        await asyncio.sleep(25)
        await made.switch("hang")
        answers = await asyncio.gather(*tasks)
    late = max(abs(each.ended - each.sent - 5.0) for each in short)
    answered = sum(each.status == 200 for each in answers) / len(answers)
    return [
        at_least("live: answered after 25 s without a pod", answered, "", 1),
        at_most("live: largest error of a TTL of 5 s", 1000 * late, "ms", 100),
    ]


PARTS: Final[dict[str, Callable[[], Awaitable[list[Figure]]]]] = {
    "overload": overload,
    "tenants": tenants,
    "idle": idle,
    "scrapes": scrapes,
    "memory": memory,
    "killed": killed,
    "zero": from_zero,
}


def measure(parts: Sequence[str]) -> list[Figure]:
    """The figures of `parts`; none: of all. Prints which are left out."""
    figures = []
    for name in parts or PARTS:
        progress(f"live: {name}")
        figures += asyncio.run(PARTS[name]())
    directory = os.environ.get("TANDEM_LLMD_BIN")
    missing = "is not set" if directory is None else "is not driven behind Envoy yet"
    progress(f"left out: llm-d's EPP beside it (TANDEM_LLMD_BIN {missing})")
    return figures
