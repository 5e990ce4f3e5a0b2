"""Two engines and the sidecar between them."""

import asyncio
import os
import signal
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from tandem_contract import endpoints, headers, metrics, ports
from tandem_contract.paths import RoutingPath
from tandem_local.process import tail

from .api_requests import KINDS, Answer, RequestKind, ask
from .engines import LEASE, Spawned, Vllm, make_pair, metric


class Pair:
    """A prefill engine, a decode engine and its sidecar, all running."""

    def __init__(self, prefill: Vllm, decode: Vllm, directory: Path) -> None:
        self.prefill = prefill
        self.decode = decode
        self._log = directory / "sidecar.log"
        self._sidecar: Spawned | None = None
        self._warm = False
        self._failures = 0

    def start(self) -> None:
        """Start engines and sidecar at the same time and wait until all are ready."""
        self.prefill.start()
        self.decode.start()
        self._start_sidecar()
        self.prefill.wait_ready()
        self.decode.wait_ready()
        self._wait_sidecar()

    def _start_sidecar(self) -> None:
        """Start the sidecar with the operator's flags, but an allow list instead of plan keys.

        `--silence-timeout` and `--prefill-grace` are longer, because an engine on a busy machine
        may send nothing for seconds.
        """
        _, *rendered = self.decode.container("sidecar").command
        index = rendered.index("--plan-key-dir")
        del rendered[index : index + 2]
        command = (sys.executable, "-m", "tandem_sidecar.main", *rendered)
        times = ("--silence-timeout", "30s", "--prefill-grace", "10s")
        flags = ("--prefill-allow", str(self.prefill.address), *times)
        env = {name: v for name, v in os.environ.items() if not name.startswith("TANDEM_")}
        self._sidecar = Spawned((*command, *flags), env, self._log)

    async def restore(self, http: aiohttp.ClientSession, failures: int) -> None:
        """Start engines that a test killed again; wait until a hand-off works.

        `failures`: tests of the session that have failed. After another one, also wait until the
        pair is idle; if it does not become idle, restart it.
        """
        dead = [engine for engine in (self.prefill, self.decode) if engine.process.ended()]
        for engine in dead:
            engine.start()
        for engine in dead:
            engine.wait_ready()
        if self._failures != failures:
            self._failures, self._warm = failures, False
            await self._become_idle(http)
        if dead or not self._warm:
            await self.shake_hands(http)
            self._warm = True

    async def _become_idle(self, http: aiohttp.ClientSession) -> None:
        async def is_idle() -> bool:
            pages = [
                await page(http, e.url(endpoints.METRICS)) for e in (self.prefill, self.decode)
            ]
            held = sum(metric(text, metrics.ENGINE_KV_USAGE) for text in pages)
            return held == 0 and await phases(self, http) == []

        try:
            await until(is_idle, 2 * LEASE)
        except (TimeoutError, aiohttp.ClientError):
            self.end()
            await asyncio.to_thread(self.start)

    async def shake_hands(self, http: aiohttp.ClientSession) -> None:
        """Wait until a hand-off works: NIXL handshake done, and the circuit breaker closed."""
        warm = KINDS["completions"]

        async def split() -> bool:
            body = warm.body("Hello. " * 20, cache_salt=f"warm-{time.monotonic_ns()}")
            answer = await self.handed_off(http, warm, body)
            return answer.headers[headers.ROUTING_PATH] == RoutingPath.PREFILL_THEN_DECODE

        await until(split, 120)

    def end(self) -> None:
        for process in (self._sidecar, self.prefill, self.decode):
            if process is not None:
                process.end()

    @property
    def split(self) -> dict[str, str]:
        """The header that selects the prefill engine."""
        return {headers.PREFILLER_HOST_PORT: str(self.prefill.address)}

    def url(self, path: str) -> str:
        """URL of the sidecar."""
        return f"http://{self.decode.address.host}:{ports.SIDECAR}{path}"

    def admin(self, path: str) -> str:
        return f"http://{self.decode.address.host}:{ports.SIDECAR_ADMIN}{path}"

    async def handed_off(
        self,
        http: aiohttp.ClientSession,
        request_kind: RequestKind,
        body: dict[str, Any],
        sent: Mapping[str, str] | None = None,
    ) -> Answer:
        """Response to a request routed to prefill then decode; `sent` are additional headers."""
        return await ask(http, self.url(request_kind.path), body, {**self.split, **(sent or {})})

    async def alone(
        self, http: aiohttp.ClientSession, request_kind: RequestKind, body: dict[str, Any]
    ) -> Answer:
        """Response of the decode engine without a hand-off; the salt prevents prefix-cache hits."""
        salted = {**body, "cache_salt": f"alone-{time.monotonic_ns()}"}
        return await ask(http, self.decode.url(request_kind.path), salted)

    def _wait_sidecar(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with suppress(OSError), urllib.request.urlopen(self.admin(endpoints.READY), timeout=5):
                return
            if self._sidecar is None or self._sidecar.ended():
                break
            time.sleep(0.1)
        raise AssertionError("\n".join(["the sidecar did not become ready:", *tail(self._log)]))


@contextmanager
def running_pair(model: Path, directory: Path, **settings: Any) -> Iterator[Pair]:
    """Run a pair with the `settings` of `make_pair`."""
    pair = Pair(*make_pair(model, directory, **settings), directory)
    try:
        pair.start()
        yield pair
    finally:
        pair.end()


async def page(http: aiohttp.ClientSession, url: str) -> str:
    """A /metrics page."""
    async with http.get(url) as answer:
        return await answer.text()


class Moved:
    """Increase of an engine's counters since `begin`."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self._before = ""

    async def begin(self) -> "Moved":
        self._before = await page(self._http, self._url)
        return self

    async def by(self, name: str, **labels: str) -> float:
        now = await page(self._http, self._url)
        return metric(now, name, **labels) - metric(self._before, name, **labels)


async def until(condition: Callable[[], Awaitable[bool]], within: float) -> float:
    """Wait until `condition` holds; returns the seconds it took, fails after `within` seconds."""
    start = time.monotonic()
    async with asyncio.timeout(within):
        while not await condition():
            await asyncio.sleep(0.02)
    return time.monotonic() - start


@asynccontextmanager
async def stopped(engine: Vllm) -> AsyncIterator[None]:
    """Suspend the engine; the kernel still accepts its connections and data."""
    engine.process.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        engine.process.signal(signal.SIGCONT)


async def in_phase(pair: Pair, http: aiohttp.ClientSession, phase: str, count: int) -> None:
    """Wait until the sidecar has `count` requests in `phase`, ignoring releases and aborts."""
    cleanup = ("release", "aborting")

    async def reached() -> bool:
        return [p for p in await phases(pair, http) if p not in cleanup] == [phase] * count

    await until(reached, 60)


async def at_rest(pair: Pair, http: aiohttp.ClientSession) -> None:
    """Wait until the sidecar has nothing in flight, releases and aborts included."""

    async def reached() -> bool:
        return await phases(pair, http) == []

    await until(reached, 60)


async def phases(pair: Pair, http: aiohttp.ClientSession) -> list[str]:
    """Phases of everything that the sidecar has in flight."""
    async with http.get(pair.admin(endpoints.STATE)) as answer:
        return [work["phase"] for work in (await answer.json())["in_flight"]]
