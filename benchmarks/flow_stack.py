"""What `flow_live` loads: clients, Envoy and EPPs are real; engines take each step's time.

async with stack(flow) as made:       paced engines behind Tandem's EPP
    answers = await made.load({client: requests per second}, seconds)
    figures = await made.engine_figures()
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import aiohttp
from tests.epp.real import Epp, envoy, envoy_settings, epp
from tests.llmd.programs import FOLDER, Configuration, llmd_epp

from tandem_contract import headers as wire
from tandem_contract.commandline import HostPort
from tandem_local.ports import free_port
from tandem_operator.routing.api_keys import filter_config

from .flow_engines import BUDGET, REQUESTS
from .flow_torch import torch_engines
from .paced_engine import PER_TOKEN, STEP

PROMPT: Final = 400
OUTPUT: Final = 20
HIGH: Final = "interactive"
LOW: Final = "batch"
HOST: Final = "127.0.0.1"
_ENGINES: Final = 4
_TORCH_ENGINES: Final = 2
_LONGEST: Final = 4000
"""Tokens of a prompt."""
_VOCABULARY: Final = 200

LLMD: Final[Configuration] = {
    "types": {
        **{name: {} for name in ("queue-scorer", "max-score-picker", "single-profile-handler")},
        **{name: {} for name in ("utilization-detector", "round-robin-fairness-policy")},
    },
    "profiles": {"default": ("queue-scorer", "max-score-picker")},
    "sections": {
        "featureGates": ["flowControl"],
        "flowControl": {
            "defaultRequestTTL": "15s",
            "defaultPriorityBand": {"fairnessPolicyRef": "round-robin-fairness-policy"},
            "saturationDetector": {"pluginRef": "utilization-detector"},
        },
    },
}
"""llm-d's EPP with its flow control, its own detector and its defaults."""


def capacity(engines: int = _ENGINES) -> float:
    """Requests per second that the engines compute: what a full batch takes of a step's time."""
    step = STEP / REQUESTS * OUTPUT + STEP * PROMPT / BUDGET
    return engines / (step + PER_TOKEN * (PROMPT + OUTPUT))


@dataclass
class Engines:
    """Running engines."""

    ports: Sequence[int]
    read: Callable[[aiohttp.ClientSession], Awaitable[list[dict[str, float]]]]
    """`Stack.engine_figures`."""
    has_tokens: bool = False
    """Whether prompts are lists of tokens."""

    @property
    def capacity(self) -> float:
        """Requests per second that they compute."""
        return capacity(len(self.ports))


MakeEngines = Callable[[Path], AbstractAsyncContextManager[Engines]]


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
    engines: Engines
    epps: Sequence[Epp]
    http: aiohttp.ClientSession
    random: Random = field(default_factory=lambda: Random(1))

    async def send(self, client: str, body: bytes = b"", **headers: str) -> Answer:
        """One request, to its end."""
        body = body or self._body()
        answer = Answer(client, time.monotonic())
        sent = {"x-api-key": f"key-of-{client}", "content-type": "application/json"}
        # llm-d's EPP knows tenants by this header; with API keys Tandem's does not read it.
        sent[wire.FAIRNESS] = client
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

    async def load(self, rates: dict[str, float], seconds: float) -> list[Answer]:
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
        """Of each engine, since the last call: `tokens`, `seconds`, and `queued`: requests in its
        own queue × seconds."""
        return await self.engines.read(self.http)

    async def switch(self, name: str) -> None:
        """`stall` or `hang` all engines, or end it."""
        async with self.http.post(f"http://{HOST}:{self.engines.ports[0]}/{name}") as answer:
            answer.raise_for_status()

    async def held(self) -> float:
        """Requests that wait in all EPPs."""
        figures = [await each.figures() for each in self.epps if each.process.returncode is None]
        waiting = "tandem_epp_flow_held{"
        return sum(v for page in figures for k, v in page.items() if k.startswith(waiting))

    def _body(self) -> bytes:
        words = 1 + round(self.random.expovariate(1 / PROMPT))
        output = 1 + round(self.random.expovariate(1 / OUTPUT))
        number = self.random.randrange
        if self.engines.has_tokens:
            prompt: Any = [number(_VOCABULARY) for _ in range(min(_LONGEST, words))]
        else:
            prompt = " ".join(str(number(10_000)) for _ in range(words))
        body = {"model": "m", "prompt": prompt, "max_tokens": output, "stream": True}
        return json.dumps(body).encode()


@asynccontextmanager
async def paced_engines(_directory: Path) -> AsyncIterator[Engines]:
    """Four engines of one process that compute nothing: `flow_engines`."""
    ports = [free_port(HOST) for _ in range(_ENGINES)]

    async def read(http: aiohttp.ClientSession) -> list[dict[str, float]]:
        found = []
        for port in ports:
            async with http.get(f"http://{HOST}:{port}/figures") as answer:
                found.append(await answer.json())
        return found

    command = [sys.executable, "-m", "benchmarks.flow_engines", *map(str, ports)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        if not await process.stdout.readline():
            raise RuntimeError("the engines did not start")
        yield Engines(ports, read)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def torch_pair(directory: Path) -> AsyncIterator[Engines]:
    """Two torch engines whose steps take the paced engines' time: tokens, KV cache and scheduler
    are real."""
    async with torch_engines(directory, _TORCH_ENGINES) as started:
        yield Engines(started.ports, started.read, has_tokens=True)


@asynccontextmanager
async def stack(
    flow: dict[str, Any] | None,
    *,
    clients: dict[str, int] | None = None,
    replicas: int = 1,
    flags: Sequence[str] = (),
    engines: MakeEngines = paced_engines,
) -> AsyncIterator[Stack]:
    """A stack with flow control as `flow`; None: off. `clients`: each with its priority."""
    clients = clients or {HIGH: 10, LOW: 0}
    async with AsyncExitStack() as parts:
        directory = Path(parts.enter_context(tempfile.TemporaryDirectory()))
        started = await parts.enter_async_context(engines(directory))
        config = {"backends": [
            {"name": f"e{i}", "url": f"http://{HOST}:{port}"}
            for i, port in enumerate(started.ports)
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
        ports = [each.grpc for each in pickers]
        url = await parts.enter_async_context(_front(directory, ports, clients))
        yield await _warmed(parts, url, started, pickers, clients)


def llmd_program() -> Path | None:
    """llm-d's EPP; None: the folder that the variable names has none."""
    program = Path(os.environ.get(FOLDER, "/nonexistent")) / "epp"
    return program if os.access(program, os.X_OK) else None


@asynccontextmanager
async def llmd_stack(program: Path, clients: dict[str, int]) -> AsyncIterator[Stack]:
    """The same behind llm-d's EPP. It reads priorities from InferenceObjectives of a cluster, which
    there is none of, so all have 0."""
    async with AsyncExitStack() as parts:
        directory = Path(parts.enter_context(tempfile.TemporaryDirectory()))
        started = await parts.enter_async_context(paced_engines(directory))
        pods = [(f"e{i}", "both", HostPort(HOST, port)) for i, port in enumerate(started.ports)]
        grpc = await parts.enter_async_context(llmd_epp(program, directory, pods, LLMD))
        url = await parts.enter_async_context(_front(directory, [grpc], clients))
        yield await _warmed(parts, url, started, (), clients)


def _front(
    directory: Path, ports: Sequence[int], clients: dict[str, int]
) -> AbstractAsyncContextManager[str]:
    """Envoy before the EPPs at `ports`, with an API key for each client."""
    keys = directory / "keys"
    keys.mkdir()
    listed_keys = {name: f"key-of-{name}" for name in clients}
    (keys / "keys.json").write_text(json.dumps(filter_config(listed_keys)))
    settings = replace(
        envoy_settings(ports[0], body_mode="FULL_DUPLEX_STREAMED"),
        api_key_file=str(keys / "keys.json"),
    )
    return envoy(directory, settings, ports[1:])


async def _warmed(
    parts: AsyncExitStack,
    url: str,
    engines: Engines,
    pickers: Sequence[Epp],
    clients: dict[str, int],
) -> Stack:
    connector = aiohttp.TCPConnector(limit=0)
    http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300))
    await parts.enter_async_context(http)
    made = Stack(url, engines, pickers, http)
    # The EPP learns how fast the engines are, and how long answers.
    await made.load({next(iter(clients)): 0.3 * engines.capacity}, 5.0)
    await made.engine_figures()
    return made


def _replica_flags(directory: Path, replicas: int) -> list[list[str]]:
    if replicas == 1:
        return [[]]
    keys = directory / "plan-keys"
    keys.mkdir()
    (keys / "k1").write_bytes(b"0123456789abcdef")
    ports = [free_port(HOST) for _ in range(replicas)]
    shared = ["--plan-key-dir", str(keys)]
    for port in ports:
        shared += ["--peers", f"{HOST}:{port}"]
    return [[*shared, "--peer-listen", f"{HOST}:{port}"] for port in ports]
