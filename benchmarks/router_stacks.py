"""Starts what `benchmarks.router` compares: a router; a router and a sidecar; Envoy, EPP and
sidecar; and Envoy alone."""

import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tandem_local.ports import free_port
from tandem_local.router import find_envoy, write_plan_key
from tandem_operator.routing.envoy.bootstrap import EnvoySettings, envoy_bootstrap

from .proxies import Server, bare_proxy, server

HOST: Final = "127.0.0.1"
_PREFILL_HOST: Final = "127.0.0.2"
"""The same engine under another address."""
_BODY_LIMIT: Final = 4 << 20
SPLIT, PLAIN = "hand-off", "plain"


@dataclass(frozen=True, slots=True)
class Stack:
    """Something that clients connect to: its processes, the first of which listens."""

    name: str
    servers: tuple[Server, ...]

    def cpu(self) -> float:
        """CPU time used so far in seconds, of all processes together."""
        return sum(server.cpu() for server in self.servers)

    def resident(self) -> float:
        """Resident memory of all processes together, in MB."""
        return sum(server.resident() for server in self.servers)


@dataclass(frozen=True, slots=True)
class Stacks:
    """Everything that runs. The mappings have one stack that splits every request, SPLIT, and one
    that splits none, PLAIN."""

    engine: Server
    bare: Stack
    routers: Mapping[str, Stack]
    fronts: Mapping[str, Stack]
    """A router as the front of an endpoint, which signs plans, and a sidecar."""
    three: Mapping[str, Stack]
    """Envoy, the EPP and a sidecar."""


@asynccontextmanager
async def running(scratch: Path, chunks: int, workers: int) -> AsyncIterator[Stacks]:
    """Start the servers, and end them afterwards; the engine streams `chunks` events, and a router
    has so many `workers`. Raises SetupError, RuntimeError."""
    find_envoy()
    write_plan_key(scratch / "keys")
    async with AsyncExitStack() as stack:
        starter = _Starter(stack, scratch)
        port = free_port(HOST)
        hosts = ("--host", HOST, "--host", _PREFILL_HOST)
        fake = (sys.executable, "-m", "benchmarks.fake_engine", str(port))
        engine = await starter.start("engine", port, *fake, *hosts, "--chunks", str(chunks))
        starter.engine = port
        front = free_port(HOST)
        bare = Stack("Envoy alone", (await starter.envoy("bare", front, bare_proxy(front, port)),))
        kinds = PLAIN, SPLIT
        routers = {kind: await starter.router(kind, workers) for kind in kinds}
        fronts = {kind: await starter.front(kind) for kind in kinds}
        three = {kind: await starter.three(kind) for kind in kinds}
        yield Stacks(engine, bare, routers, fronts, three)


class _Starter:
    """Starts processes that end with `stack`."""

    engine: int
    """The port of the fake engine."""

    def __init__(self, stack: AsyncExitStack, scratch: Path) -> None:
        self._stack, self._scratch = stack, scratch

    async def start(self, name: str, port: int, *command: str) -> Server:
        """Start a process that listens on `port`."""
        log = self._scratch / f"{name}.log"
        return await self._stack.enter_async_context(server(name, port, command, log))

    async def envoy(self, name: str, port: int, bootstrap: object) -> Server:
        """Start an Envoy with one worker thread: the other processes have one, too."""
        file = self._scratch / f"{name}.json"
        file.write_text(json.dumps(bootstrap))
        flags = ("--concurrency", "1", "--use-dynamic-base-id", "-l", "error")
        return await self.start(f"envoy-{name}", port, str(find_envoy()), "-c", str(file), *flags)

    async def router(self, kind: str, workers: int) -> Stack:
        """Start a router in front of the engine."""
        port, file = free_port(HOST), self._config(f"router-{kind}", kind, self.engine)
        command = (
            *(sys.executable, "-m", "tandem_router.main", "--config", str(file)),
            *("--listen", f"{HOST}:{port}", "--admin", f"{HOST}:{free_port(HOST)}"),
            *("--log-format", "json", "--workers", str(workers)),
        )
        return Stack("tandem-router", (await self.start(f"router-{kind}", port, *command),))

    async def front(self, kind: str) -> Stack:
        """Start a sidecar in front of the engine, and a router that signs plans for it."""
        sidecar, port = await self.sidecar(f"front-{kind}"), free_port(HOST)
        file, keys = self._config(f"front-{kind}", kind, sidecar.port), self._scratch / "keys"
        program = (sys.executable, "-m", "benchmarks.planning_router")
        command = (*program, str(file), str(keys), f"{HOST}:{port}")
        return Stack(
            "router, sidecar", (await self.start(f"front-{kind}", port, *command), sidecar)
        )

    async def sidecar(self, name: str) -> Server:
        """Start a sidecar in front of the engine."""
        port = free_port(HOST)
        command = (
            *(sys.executable, "-m", "tandem_sidecar.main", "--pod-name", "decode"),
            *("--plan-key-dir", str(self._scratch / "keys")),
            *("--listen", f"{HOST}:{port}", "--admin", f"{HOST}:{free_port(HOST)}"),
            *("--engine", f"http://{HOST}:{self.engine}", "--log-format", "json"),
        )
        return await self.start(f"sidecar-{name}", port, *command)

    async def three(self, kind: str) -> Stack:
        """Start a sidecar in front of the engine, an EPP that knows it, and an Envoy."""
        sidecar, epp_port = await self.sidecar(kind), free_port(HOST)
        keys = ("--plan-key-dir", str(self._scratch / "keys"))
        file = self._config(f"epp-{kind}", kind, sidecar.port)
        epp = (
            *(sys.executable, "-m", "tandem_epp", "--config", str(file), *keys, "--no-warm-up"),
            *("--listen", f"{HOST}:{epp_port}", "--health", f"{HOST}:{free_port(HOST)}"),
            *("--metrics", f"{HOST}:{free_port(HOST)}", "--max-body", str(_BODY_LIMIT)),
        )
        settings = EnvoySettings(
            epp_address=HOST,
            epp_port=epp_port,
            fallback=(f"{HOST}:{sidecar.port}",),
            listen_address=HOST,
            listen_port=free_port(HOST),
            admin_port=free_port(HOST),
            body_mode="BUFFERED",
            body_limit=_BODY_LIMIT,
        )
        picker = await self.start(f"epp-{kind}", epp_port, *epp)
        front = await self.envoy(kind, settings.listen_port, envoy_bootstrap(settings))
        return Stack("Envoy, EPP, sidecar", (front, sidecar, picker))

    def _config(self, name: str, kind: str, decode_port: int) -> Path:
        """The file of a router or an EPP: every request is split, or none, by the same plugins."""
        decode = {"name": "decode", "url": f"http://{HOST}:{decode_port}", "role": "decode"}
        prefill = f"http://{_PREFILL_HOST}:{self.engine}"
        data = {
            "disaggregated_serving": {"enabled": kind == SPLIT},
            "backends": [decode, {"name": "prefill", "url": prefill, "role": "prefill"}],
            "plugins": [
                {"type": "active-request-scorer"},
                {"type": "prefix-cache-scorer"},
                {"type": "always-disagg-pd-decider"},
            ],
        }
        file = self._scratch / f"{name}.yaml"
        file.write_text(json.dumps(data))
        return file
