"""One worker process, as its supervisor sees it.

Errors: `WorkerFailed`: it ended before it served. `WorkerSilent`: it does not answer.
"""

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from typing import Final

import aiohttp

from .aggregate import Families
from .listen import listen_privately
from .run import Place

ASK_SECONDS: Final = 5.0
"""For a question that asks the worker to do nothing."""


class WorkerFailed(RuntimeError):
    """Why stands in the log, in the worker's words."""


class WorkerSilent(RuntimeError):
    """It ended, or hangs."""


class Worker:
    """A started process; `page` is its `/metrics` as last seen."""

    def __init__(self, number: int, process: Process, name: str) -> None:
        self.number = number
        self.pid = process.pid
        self.page: Families = {}
        self._process = process
        # Connections are not kept: a worker that ends must not leave one half used.
        connector = aiohttp.UnixConnector(name, force_close=True)
        self._session = aiohttp.ClientSession("http://worker", connector=connector)

    @classmethod
    async def spawn(
        cls, number: int, clients: tuple[int, ...], arguments: Sequence[str]
    ) -> "Worker":
        """Start this command again as a worker. Raises OSError."""
        with listen_privately() as private:
            place = Place(number, clients, private.fileno())
            name: str = private.getsockname().decode()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "tandem_sidecar.main"),
                *arguments,
                *("--place", str(place)),
                stdin=PIPE,
                stdout=PIPE,
                pass_fds=(*clients, private.fileno()),
                # What a terminal sends is for the supervisor.
                process_group=0,
            )
        return cls(number, process, name)

    async def ready(self) -> None:
        """Return when it serves. Raises WorkerFailed."""
        said = self._process.stdout
        if said is None or not await said.read(1):
            raise WorkerFailed(f"worker {self.number} (pid {self.pid}) ended before it served")

    async def ask(
        self, path: str, *, method: str = "GET", seconds: float = ASK_SECONDS
    ) -> tuple[int, bytes]:
        """Status and body of its answer. Raises WorkerSilent."""
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.request(method, path, timeout=timeout) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, RuntimeError) as err:
            raise WorkerSilent(f"worker {self.number} (pid {self.pid}): {err}") from err

    def tell(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def ended(self) -> int:
        """Its exit status, once it has one."""
        status = await self._process.wait()
        await self._session.close()
        return status
