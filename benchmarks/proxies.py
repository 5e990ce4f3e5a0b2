"""Starts what `benchmarks.sidecar` compares: a fake engine, Envoy and aiohttp as bare proxies, the
sidecar."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from tandem_local.ports import free_port
from tandem_local.router import find_envoy, write_plan_key

from .process_tree import descendants

_HOST: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Server:
    """A process that answers HTTP on 127.0.0.1."""

    name: str
    port: int
    pid: int
    log: Path

    def cpu(self) -> float:
        """CPU time used so far in seconds, of all threads, and of the processes it started."""
        threads = [
            task for pid in self._processes() for task in Path(f"/proc/{pid}/task").iterdir()
        ]
        # In nanoseconds; /proc/PID/stat has ticks of 10 ms, too coarse for Envoy's 0.1 s. The
        # servers end no thread, whose time would then be missing.
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9

    def last_warnings(self) -> list[str]:
        """The last five lines with a warning or an error in its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if '"level":"warning"' in line or "ERROR" in line][-5:]

    def resident(self) -> float:
        """Resident memory in MB (10^6 bytes), with that of the processes it started."""
        statm = [Path(f"/proc/{pid}/statm").read_text() for pid in self._processes()]
        return sum(int(page.split()[1]) for page in statm) * os.sysconf("SC_PAGESIZE") / 1e6

    def _processes(self) -> list[int]:
        return [self.pid, *descendants(self.pid)]


class Servers(NamedTuple):
    """The servers, and the directory of the plan keys that the sidecar trusts."""

    engine: Server
    envoy: Server
    aiohttp: Server
    sidecar: Server
    keys: Path


@asynccontextmanager
async def running(scratch: Path, chunks: int, *, interval: float = 0.0) -> AsyncIterator[Servers]:
    """Start the servers, and end them afterwards; the engine streams `chunks` events, `interval`
    seconds apart.

    Raises SetupError when Envoy is missing, RuntimeError with the output of a server that did not
    start.
    """
    program = find_envoy()
    keys, config = scratch / "keys", scratch / "envoy.json"
    write_plan_key(keys)
    python = Path(sys.executable)
    # Free now, but not reserved: another process could still take one of them.
    engine, envoy, relay, sidecar, admin = (free_port(_HOST) for _ in range(5))
    config.write_text(json.dumps(bare_proxy(envoy, engine)))
    fake = (
        *(str(python), "-m", "benchmarks.fake_engine", str(engine)),
        *("--chunks", str(chunks), "--interval", f"{interval:g}"),
    )
    # One worker thread, as the sidecar has; a dynamic base id lets other Envoys run here.
    bare = (str(program), "-c", str(config), "--concurrency", "1", "--use-dynamic-base-id")
    relaying = (str(python), "-m", "benchmarks.aiohttp_proxy", str(relay), str(engine))
    ours = (
        str(python.with_name("tandem-sidecar")),
        *("--listen", f"{_HOST}:{sidecar}", "--admin", f"{_HOST}:{admin}"),
        *("--engine", f"http://{_HOST}:{engine}", "--pod-name", "decode-0"),
        *("--plan-key-dir", str(keys), "--log-format", "json"),
    )
    async with AsyncExitStack() as stack:

        async def start(name: str, port: int, command: tuple[str, ...]) -> Server:
            started = server(name, port, command, scratch / f"{name}.log")
            return await stack.enter_async_context(started)

        yield Servers(
            await start("engine", engine, fake),
            await start("Envoy", envoy, (*bare, "-l", "error")),
            await start("aiohttp", relay, relaying),
            await start("tandem-sidecar", sidecar, ours),
            keys,
        )


@asynccontextmanager
async def server(
    name: str, port: int, command: tuple[str, ...], log: Path
) -> AsyncIterator[Server]:
    """Start `command`, wait until it listens on `port`, and end it afterwards.

    Raises RuntimeError with its output when it exits before it listens.
    """
    with log.open("wb") as file:
        child = await asyncio.create_subprocess_exec(*command, stdout=file, stderr=file)
    try:
        # Polls the port: the programs have no common way to say that they are ready.
        while not await _listens(port):
            if child.returncode is not None:
                raise RuntimeError(f"{name} exited with {child.returncode}: {_output(log)}")
            await asyncio.sleep(0.05)
        yield Server(name, port, child.pid, log)
    finally:
        if child.returncode is None:
            child.terminate()
        # Also after a failed start: no process may outlive the benchmark.
        await child.wait()


def _output(log: Path) -> str:
    return log.read_text(errors="replace").strip()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(_HOST, port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


def bare_proxy(port: int, engine: int) -> dict[str, object]:
    """Envoy's bootstrap configuration: one listener, one route, the router filter."""
    filters = "type.googleapis.com/envoy.extensions.filters"
    router = {"@type": f"{filters}.http.router.v3.Router"}
    # No route timeout: Envoy's default of 15 s would cut long streams.
    route = {"match": {"prefix": "/"}, "route": {"cluster": "engine", "timeout": "0s"}}
    manager = {
        "@type": f"{filters}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "bench",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [{"name": "router", "typed_config": router}],
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    endpoints = {"lb_endpoints": [{"endpoint": {"address": _address(engine)}}]}
    cluster = {
        "name": "engine",
        "type": "STATIC",
        "load_assignment": {"cluster_name": "engine", "endpoints": [endpoints]},
    }
    listener = {"address": _address(port), "filter_chains": [chain]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _address(port: int) -> dict[str, object]:
    return {"socket_address": {"address": _HOST, "port_value": port}}
