"""Requests of the process's own to its decode engines: health checks, models, and `/metrics`."""

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Final

from tandem_contract import endpoints
from tandem_contract.commandline import HostPort
from tandem_contract.prompt_length import LIST_SECONDS, engine_length
from tandem_http1.answers import Answer, Collector, NoAnswer
from tandem_http1.messages import request_bytes
from tandem_http1.upstream import Pool

from ..settings import HealthChecks

UNHEALTHY_SECONDS: Final = 0.2
"""Seconds between checks of an engine that starts: readiness may be late by this much."""
LATE_CHECKS: Final = 10
"""Checks in a row without an answer in time that make an engine unhealthy. The event loop of a busy
engine answers late; that one hangs is told by its requests (`handoff.liveness`). Fewer: a pool is
empty when it is busiest."""
METRICS_TIMEOUT: Final = 1.0
"""Seconds that a scrape of the sidecar waits for a busy engine's metrics."""


class EngineHealth:
    """Whether the engine answers health checks with 200: a refused connection or another status
    tells at once that it does not, late answers only when there are several in a row."""

    def __init__(self, pool: Pool, engine: HostPort, checks: HealthChecks) -> None:
        self.healthy = False
        self.max_model_len: int | None = None
        """Tokens of the longest prompt that the engine takes, by its list of models; None: not
        known."""
        self._listed_at = -LIST_SECONDS
        self._pool = pool
        self._engine = engine
        self._checks = checks

    async def follow(self) -> None:
        """Check again and again, forever."""
        path, interval, timeout = self._checks.path, self._checks.interval, self._checks.timeout
        late = 0
        while True:
            try:
                page = await _get(self._pool, self._engine, path, timeout=timeout)
                self.healthy, late = page is not None, 0
            except TimeoutError:
                late += 1
                self.healthy = self.healthy and late < LATE_CHECKS
            await self._read_models(timeout)
            await asyncio.sleep(interval if self.healthy else min(interval, UNHEALTHY_SECONDS))

    async def _read_models(self, timeout: float) -> None:
        """Ask for the list of models: once the engine is healthy, and seldom again."""
        now = asyncio.get_running_loop().time()
        if not self.healthy:
            # An engine with another length may start in its place.
            self.max_model_len, self._listed_at = None, -LIST_SECONDS
        elif now - self._listed_at >= LIST_SECONDS:
            self._listed_at = now
            with contextlib.suppress(TimeoutError):
                models = await _get(self._pool, self._engine, endpoints.MODELS, timeout=timeout)
                self.max_model_len = None if models is None else engine_length(models)


async def fetch_metrics(
    pool: Pool, engine: HostPort, *, timeout: float = METRICS_TIMEOUT
) -> bytes | None:
    """The engine's metrics page; None: no 200 within `timeout` seconds."""
    try:
        return await _get(pool, engine, endpoints.METRICS, timeout=timeout)
    except TimeoutError:
        return None


async def fetch_all_metrics(
    pool: Pool, engines: Iterable[HostPort]
) -> dict[HostPort, bytes | None]:
    """`fetch_metrics` of each engine, all at once, by its address."""
    asked = tuple(engines)
    pages = await asyncio.gather(*(fetch_metrics(pool, engine) for engine in asked))
    return dict(zip(asked, pages, strict=True))


async def _get(pool: Pool, engine: HostPort, path: str, *, timeout: float) -> bytes | None:
    """The body of a 200 answer; None: another status or no connection. Raises TimeoutError."""
    result: asyncio.Future[Answer | NoAnswer] = asyncio.get_running_loop().create_future()

    def done(answer: Answer | NoAnswer) -> None:
        # `result` is cancelled already when the timeout and the answer arrive together.
        if not result.done():
            result.set_result(answer)

    request = request_bytes(b"GET", path.encode(), [(b"host", str(engine).encode())], b"")
    call = pool.send(engine, b"GET", request, Collector(done), connect_timeout=timeout)
    try:
        async with asyncio.timeout(timeout):
            answer = await result
    finally:
        # Frees the connection after a timeout or a cancellation; after an answer it does nothing.
        call.abort()
    return answer.body if isinstance(answer, Answer) and answer.head.status == 200 else None
