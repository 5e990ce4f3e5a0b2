"""Runs probe and lifecycle handlers once: httpGet, tcpSocket, exec, sleep."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import aiohttp

from .pod_spec import Exec, Handler, HttpGet, Sleep, TcpSocket
from .process import Process


class HandlerRunner:
    """Runs handlers with the environment and log file of one container."""

    def __init__(self, http: aiohttp.ClientSession, env: Mapping[str, str], log: Path) -> None:
        self._http = http
        self._env = env
        self._log = log

    async def run(self, handler: Handler, timeout: float) -> bool:
        """Whether `handler` succeeded within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                return await self._run(handler)
        except (OSError, aiohttp.ClientError, TimeoutError):
            return False

    async def _run(self, handler: Handler) -> bool:
        match handler:
            case HttpGet():
                return await self._http_get(handler)
            case TcpSocket(host, port):
                _, writer = await asyncio.open_connection(host, port)
                writer.close()
                return True
            case Exec(command):
                return await self._exec(command)
            case Sleep(seconds):
                await asyncio.sleep(seconds)
                return True

    async def _http_get(self, handler: HttpGet) -> bool:
        url = f"{handler.scheme}://{handler.host}:{handler.port}{handler.path}"
        # The kubelet does not verify the certificate of a probed server either.
        async with self._http.get(
            url, headers=handler.headers, ssl=False, allow_redirects=False
        ) as response:
            # A redirect counts as success and is not followed: it may lead to another host.
            return 200 <= response.status < 400

    async def _exec(self, command: tuple[str, ...]) -> bool:
        process = await Process.start(command, env=self._env, cwd=None, log=self._log)
        try:
            return await process.wait() == 0
        except asyncio.CancelledError:
            # The timeout cancels this task: the command must not keep running beside the container.
            process.kill()
            await process.wait()
            raise
