"""One real vLLM without a hand-off, for tests of what the EPP learns from engines."""

import asyncio
import os
import signal
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp

from tandem_contract import endpoints
from tandem_contract.commandline import HostPort
from tandem_local.ports import free_port
from tandem_local.process import tail

from .engines import MODEL_NAME, ON_A_CPU, STARTS_WITHIN, Spawned, metric, server_command

BLOCK = 32
"""Tokens of a KV block: the CPU's attention kernel needs a multiple of 32."""


class SingleVllm:
    """A process group; with data parallelism it has several engines behind its port."""

    def __init__(self, process: Spawned, address: HostPort) -> None:
        self.address, self.url, self._process = address, f"http://{address}", process
        self.log = process.log

    async def ready(self) -> None:
        """Wait until /health answers; on failure show the end of the log."""
        async with asyncio.timeout(STARTS_WITHIN):
            while not self._is_healthy():
                assert not self._process.ended(), "\n".join(tail(self._process.log))
                await asyncio.sleep(0.2)

    def signal(self, number: signal.Signals) -> None:
        """Send the signal to all its processes."""
        self._process.signal(number)

    async def metrics(self, http: aiohttp.ClientSession) -> str:
        """The page of metrics."""
        async with http.get(self.url + endpoints.METRICS) as answer:
            return await answer.text()

    async def metric_reaches(
        self, http: aiohttp.ClientSession, name: str, least: float, **labels: str
    ) -> None:
        """Wait until a metric is at least `least`."""
        while metric(page := await self.metrics(http), name, **labels) < least:
            assert not self._process.ended(), "\n".join(tail(self._process.log))
            await asyncio.sleep(0.1)
        assert page

    def _is_healthy(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(self.url + endpoints.HEALTH, timeout=30):
            return True
        return False


@contextmanager
def single_vllm(
    model: Path,
    directory: Path,
    *flags: str,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    host: str = "127.0.0.1",
    imports_anew: bool = False,
) -> Iterator[SingleVllm]:
    """Start vLLM with `flags` and the variables `env` in addition to those that all tests need, and
    end it afterwards. `prefix`: a command that starts it, for instance `taskset`.
    `imports_anew`: see `server_command`."""
    address = HostPort(host, free_port(host))
    arguments = (
        *("--model", str(model), "--served-model-name", MODEL_NAME, "--dtype", "float32"),
        *("--host", host, "--port", str(address.port), "--block-size", str(BLOCK)),
        *("--max-model-len", "4096", "--enforce-eager", "--num-gpu-blocks-override", "256"),
        *("--enable-prompt-tokens-details", *flags),
    )
    variables = {"PATH": os.environ["PATH"], "USER": "tandem", **ON_A_CPU, **(env or {})}
    command = (*prefix, *server_command(*arguments, imports_anew=imports_anew))
    process = Spawned(command, variables, directory / "vllm.log")
    try:
        yield SingleVllm(process, address)
    finally:
        process.end()
