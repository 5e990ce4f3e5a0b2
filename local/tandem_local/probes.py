"""Asks a handler once: of a probe, whether it succeeds; of a hook, that it has run."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import aiohttp

from .podspec import Exec, Handler, HttpGet, Sleep, TcpSocket
from .process import Process


class Asker:
    """Asks handlers in the surroundings of one container."""

    def __init__(self, http: aiohttp.ClientSession, env: Mapping[str, str], log: Path) -> None:
        self._http = http
        self._env = env
        self._log = log

    async def ask(self, handler: Handler, timeout: float) -> bool:
        """Whether `handler` succeeded within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                return await self._ask(handler)
        except (OSError, aiohttp.ClientError, TimeoutError):
            return False

    async def _ask(self, handler: Handler) -> bool:
        match handler:
            case HttpGet():
                return await self._get(handler)
            case TcpSocket(host, port):
                _, writer = await asyncio.open_connection(host, port)
                writer.close()
                return True
            case Exec(command):
                return await self._run(command)
            case Sleep(seconds):
                await asyncio.sleep(seconds)
                return True

    async def _get(self, handler: HttpGet) -> bool:
        url = f"{handler.scheme}://{handler.host}:{handler.port}{handler.path}"
        # Kubernetes verifies no certificate of a probe's target either.
        async with self._http.get(
            url, headers=handler.headers, ssl=False, allow_redirects=False
        ) as response:
            return 200 <= response.status < 400

    async def _run(self, command: tuple[str, ...]) -> bool:
        process = await Process.start(command, env=self._env, cwd=None, log=self._log)
        try:
            return await process.wait() == 0
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
