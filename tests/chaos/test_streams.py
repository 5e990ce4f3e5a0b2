"""Many streams behind a router with `--resume`, while its engines are killed all the time.

The engines are scripted and compute nothing (`benchmarks.counting`), so that a thousand streams run
at once on a small machine. Each stream counts from a number of its own: a token that is lost,
repeated or another stream's shows.
"""

import asyncio
import itertools
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
import pytest
import yaml
from benchmarks.counting import PROMPT, Client, Front, open_session, start_engine

from tandem_local.ports import free_port

from ..router.processes import router
from ..sidecar.processes import Sidecar

SECONDS: Final = float(os.environ.get("TANDEM_CHAOS_SECONDS", "180"))
"""For how long streams begin."""
STREAMS: Final = int(os.environ.get("TANDEM_CHAOS_STREAMS", "1000"))
"""How many run at once."""
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SECONDS + 300)]
ENGINES: Final = 8
BETWEEN_KILLS: Final = 2.0
"""Seconds."""
TOKENS: Final = 20
INTERVAL: Final = 1.0
"""Seconds between two tokens of a stream."""
SEED: Final = 35
_HOST: Final = "127.0.0.1"


class Engine:
    """A process, started again at the same port."""

    def __init__(self) -> None:
        self.port = free_port(_HOST)
        self._process: asyncio.subprocess.Process

    async def start(self) -> None:
        """Start it; returns when it accepts connections."""
        self._process = await start_engine(_HOST, self.port, interval=INTERVAL)

    async def kill(self) -> None:
        """SIGKILL."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


class Load:
    """The streams, and how they ended."""

    def __init__(self, http: aiohttp.ClientSession, front: Front) -> None:
        self._http, self._front = http, front
        self._numbers = itertools.count()
        self._ends = asyncio.get_running_loop().time() + SECONDS
        self.ended = Counter[str]()

    async def ask(self) -> None:
        """One stream after the other."""
        while asyncio.get_running_loop().time() < self._ends:
            number = next(self._numbers)
            client = Client(TOKENS, [*PROMPT[:-1], 1000 * number])
            try:
                await client.ask(self._http, self._front, number)
            except aiohttp.ClientError as err:
                self.ended[type(err).__name__] += 1
            else:
                self.ended["whole" if client.is_complete else client.error or "wrong"] += 1


async def kill_all_the_time(engines: list[Engine], killed: list[Engine]) -> None:
    """Kill an engine at random, note it in `killed`, and start it again."""
    chooser = random.Random(SEED)
    async with asyncio.TaskGroup() as starting:
        up = list(engines)

        async def start(engine: Engine) -> None:
            await engine.start()
            up.append(engine)

        while True:
            await asyncio.sleep(BETWEEN_KILLS)
            # One is left to go on with the streams of the others.
            if len(up) > 1:
                victim = up.pop(chooser.randrange(len(up)))
                await victim.kill()
                killed.append(victim)
                starting.create_task(start(victim))


@asynccontextmanager
async def log_read(server: Sidecar) -> AsyncIterator[None]:
    """Read what `server` logs, of which a pipe holds a part only: then it would wait."""

    async def read() -> None:
        assert server.process.stderr is not None
        while await server.process.stderr.read(65536):
            pass

    reading = asyncio.create_task(read())
    try:
        yield
    finally:
        reading.cancel()
        await asyncio.wait([reading])


async def test_no_stream_is_lost_repeated_or_wrong(tmp_path: Path) -> None:
    engines = [Engine() for _ in range(ENGINES)]
    listed = [
        {"name": f"d-{number}", "url": f"http://{_HOST}:{engine.port}", "role": "unified"}
        for number, engine in enumerate(engines)
    ]
    # A stream is at an engine that is killed more often than the default allows.
    resume = {"enabled": True, "max_moves": 100}
    checks = {"path": "/health", "interval": "500ms"}
    serving = {"enabled": False}
    file = tmp_path / "router.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "backends": listed,
                "disaggregated_serving": serving,
                "health_checks": checks,
                "resume": resume,
            }
        )
    )
    killed: list[Engine] = []
    async with AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.kill)
        process = await stack.enter_async_context(router(file, "--no-warm-up"))
        await stack.enter_async_context(log_read(process))
        http = await stack.enter_async_context(open_session())
        load = Load(http, Front(process.url(), lambda _: {}, process.admin))
        killing = asyncio.create_task(kill_all_the_time(engines, killed))
        try:
            await asyncio.gather(*(load.ask() for _ in range(STREAMS)))
        finally:
            killing.cancel()
            await asyncio.wait([killing])
    print(f"\n{len(killed)} kills; streams: {dict(load.ended)}")
    assert len(killed) > 1
    assert set(load.ended) == {"whole"}
