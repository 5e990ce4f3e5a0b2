"""Asks the decode engine whether it is well, for readiness."""

import asyncio
from typing import Final

from tandem_contract.commandline import HostPort

from ..http.collect import Answer, Collector, NoAnswer
from ..http.messages import request_bytes
from ..http.upstream import Pool

HEALTHY_SECONDS: Final = 2.0
"""Between checks of a healthy engine: how stale readiness may be."""
UNHEALTHY_SECONDS: Final = 0.2
"""Between checks of one that starts: how late readiness may be."""
_TIMEOUT: Final = 5.0


class EngineHealth:
    """Whether the engine's last `/health` answered 200."""

    def __init__(self, pool: Pool, engine: HostPort) -> None:
        self.healthy = False
        self._pool = pool
        self._engine = engine

    async def watch(self) -> None:
        """Check for ever."""
        while True:
            self.healthy = await self._check()
            await asyncio.sleep(HEALTHY_SECONDS if self.healthy else UNHEALTHY_SECONDS)

    async def _check(self) -> bool:
        result: asyncio.Future[Answer | NoAnswer] = asyncio.get_running_loop().create_future()

        def done(answer: Answer | NoAnswer) -> None:
            if not result.done():
                result.set_result(answer)

        request = request_bytes(b"GET", b"/health", [(b"host", str(self._engine).encode())], b"")
        call = self._pool.send(self._engine, b"GET", request, Collector(done))
        try:
            async with asyncio.timeout(_TIMEOUT):
                answer = await result
        except TimeoutError:
            return False
        finally:
            call.abort()
        return isinstance(answer, Answer) and answer.head.status == 200
