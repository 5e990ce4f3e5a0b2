"""A real sidecar in front of a real decode engine, and real prefill engines."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from tandem_contract import endpoints, metrics
from tandem_contract.commandline import HostPort
from tandem_contract.paths import ErrorPhase, RoutingPath
from tandem_loadtest.calls import Call

from ...engine.engines import expected, prompt
from ..processes import Sidecar, sidecar
from .client import ClientResult, ask, open_response
from .engine import Engine
from .page import figure, figures

SPLIT: Final = RoutingPath.PREFILL_THEN_DECODE
FALLBACK: Final = RoutingPath.FALLBACK
TOKENS: Final = 6
LONG: Final = 2000
"""More tokens than an engine generates before the test has acted."""


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition is true; fail after 60 s."""
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.01)


def call(seed: int, *, tokens: int = TOKENS, length: int = 100, stream: bool = False) -> Call:
    """A distinct prompt for each seed."""
    return Call(prompt(length, seed), max_tokens=tokens, stream=stream, ignore_eos=True)


def expected_tokens(request: Call) -> list[int]:
    """The answer of a model that computed the whole prompt itself."""
    ids = [int(str(token)) for token in request.prompt]
    return expected(tuple(ids), request.max_tokens)


@dataclass
class Pair:
    """The processes of one test."""

    sidecar: Sidecar
    decode: Engine
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.sidecar.url("")

    async def ask(self, request: Call, *prefills: HostPort, request_id: str = "") -> ClientResult:
        return await ask(self.http, self.url, request, prefills, request_id)

    def open_response(
        self, request: Call, *prefills: HostPort, request_id: str = ""
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return open_response(self.http, self.url, request, prefills, request_id)

    async def figure(self, name: str, **labels: str) -> float:
        page = await figures(self.sidecar.admin_url(endpoints.METRICS))
        return figure(page, name, **labels)

    async def errors(self) -> dict[str, int]:
        """Failures counted so far, by phase; without those that are zero."""
        page = await figures(self.sidecar.admin_url(endpoints.METRICS))
        counts = {p.value: int(figure(page, metrics.ERRORS, phase=p.value)) for p in ErrorPhase}
        return {phase: count for phase, count in counts.items() if count}

    async def wait_for_errors(self, **errors: int) -> None:
        """Return once `errors` are the failures counted; the engines' counts arrive later."""

        async def has_errors() -> bool:
            return await self.errors() == errors

        await until(has_errors)

    async def finished_on(self, path: RoutingPath) -> float:
        """How many requests ended on the routing path."""
        return await self.figure(metrics.REQUESTS, routing_path=path.value)

    async def phases(self) -> list[str]:
        """The phase of each request in flight."""
        async with self.http.get(self.sidecar.admin_url(endpoints.STATE)) as answer:
            state: dict[str, Any] = await answer.json()
        return [work["phase"] for work in state["in_flight"]]

    async def wait_for_phase(self, phase: str) -> None:
        """Return once a request is at `phase`."""

        async def has_phase() -> bool:
            return phase in await self.phases()

        await until(has_phase)

    async def wait_until_idle(self, *engines: Engine) -> None:
        """Return once the sidecar and `engines` run no request, and `engines` hold no KV."""

        async def is_idle() -> bool:
            idle = [await engine.idle() for engine in engines]
            return all(idle) and await self.figure("tandem_sidecar_in_flight") == 0

        await until(is_idle)


@asynccontextmanager
async def start_pair(decode: Engine, *flags: str) -> AsyncIterator[Pair]:
    """A sidecar with `flags` in front of `decode`; any local address may be a prefill pod."""
    fixed = ("--engine", decode.url, "--prefill-allow", "127.0.0.0/8", "--pod-name", "decode-0")
    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        sidecar(*fixed, *flags) as process,
        aiohttp.ClientSession(timeout=timeout) as http,
    ):
        yield Pair(process, decode, http)
