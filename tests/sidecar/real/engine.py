"""`tandem-engine` as a process that tests kill, stop and start again at the same address."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import aiohttp

from tandem_contract import endpoints, environment, metrics, ports
from tandem_contract.commandline import HostPort
from tandem_local.addresses import allocate

from ...engine.engines import tiny_model
from . import forked
from .page import figure, figures

SERVED: Final = "tiny"
LEASE: Final = 600.0
"""Seconds: longer than any test, so that free blocks must have been released."""
_START: Final = 240.0
"""Seconds; importing torch takes two, on a loaded machine a hundred."""
BUSY: Final = (
    *(metrics.ENGINE_RUNNING, metrics.ENGINE_WAITING),
    *(metrics.ENGINE_KV_USAGE, metrics.ENGINE_HELD),
)
"""Metrics that are zero for an idle engine; the usage counts blocks that requests hold."""


@dataclass
class Engine:
    """One engine with its own address."""

    host: str
    log: Path
    role: str = "kv_producer"
    lease: float = LEASE
    policy: str = "recompute"
    flags: tuple[str, ...] = ()
    side_channel: bool = True
    """False: no engine can read this one's KV, and it reads that of none."""
    prepare: Callable[[], None] | None = None
    """Called in the engine's process before it starts; a function of a module."""
    process: BaseProcess | None = None
    serves: bool = False
    """Whether the engine served at the last check and was not killed since."""
    failures_before: int = 0
    """Tests of the session that had failed at the last `kill_after_failure`."""

    @property
    def address(self) -> HostPort:
        return HostPort(self.host, ports.ENGINE_PREFILL)

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.is_alive()

    async def up(self) -> None:
        """Start or continue the engine; returns once it serves."""
        if self.runs:
            self.signal(signal.SIGCONT)
        else:
            self.begin()
        async with asyncio.timeout(_START), aiohttp.ClientSession() as http:
            while True:
                assert self.runs, self.log.read_text()
                try:
                    async with http.get(self.url + endpoints.HEALTH) as answer:
                        if answer.status == 200:
                            self.serves = True
                            return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.05)

    def begin(self) -> None:
        """Start; `up` waits until it serves."""
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": self.role,
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": {"kv_lease_duration": self.lease},
        }
        arguments = [
            *("--model", str(tiny_model())),
            *("--served-model-name", SERVED, "--dtype", "float64"),
            *("--host", self.host, "--port", str(self.address.port)),
            *("--num-gpu-blocks-override", "512", "--max-model-len", "4096"),
            *self.flags,
        ]
        if self.side_channel:
            arguments += ("--kv-transfer-config", json.dumps(transfer))
        variables = {environment.SIDE_CHANNEL_HOST: self.host}
        self.process = forked.engine(arguments, variables, self.log, self.prepare)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        """SIGSTOP: the engine keeps its sockets and sends nothing."""
        self.signal(signal.SIGSTOP)

    async def end(self) -> None:
        """SIGTERM, and wait until the process has ended."""
        self.serves = False
        self.signal(signal.SIGTERM)
        assert self.process is not None
        await asyncio.to_thread(self.process.join)
        assert self.process.exitcode == 0, self.log.read_text()

    def kill(self) -> None:
        """SIGKILL, and wait until the process has ended."""
        self.serves = False
        if self.process is not None:
            self.process.kill()
            self.process.join()

    def kill_after_failure(self, failures: int) -> None:
        """Kill the process if a test has failed since the last call, as it may have left it busy.

        `failures`: tests of the session that have failed.
        """
        if self.failures_before != failures:
            self.kill()
            self.failures_before = failures

    async def figure(self, name: str, **labels: str) -> float:
        return figure(await figures(self.url + endpoints.METRICS), name, **labels)

    async def idle(self) -> bool:
        """Whether no request has a block or waits, and no KV waits for a reader."""
        page = await figures(self.url + endpoints.METRICS)
        return not any(figure(page, name) for name in BUSY)


def engines(directory: Path, **kinds: dict[str, Any]) -> list[Engine]:
    """An engine for each name, not started, each with an unused address."""
    ports_by_name = dict.fromkeys(kinds, (ports.ENGINE_PREFILL, ports.SIDE_CHANNEL))
    addresses = allocate(ports_by_name, f"{directory}-{os.getpid()}")
    return [Engine(addresses[name], directory / name, **kind) for name, kind in kinds.items()]
