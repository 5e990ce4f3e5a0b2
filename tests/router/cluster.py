"""Pods of a real API server, whose sidecars are processes, and a router that watches them."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import trustme
import yaml

from tandem_contract.commandline import HostPort

from ..epp.backends.cluster_pods import Pods
from ..epp.envoy.test_mutual_tls_with_envoy import MountedSecret
from ..epp.real import Backend, until
from ..sidecar.peers import FakeDecode, FakePrefill, Peer, Script, Turn
from ..sidecar.processes import Sidecar, sidecar
from .processes import router


class Cluster:
    """Pods that no kubelet runs, and a router of them."""

    def __init__(self, stack: AsyncExitStack, pods: Pods, folder: Path, kubeconfig: Path) -> None:
        self._stack, self.pods, self._folder = stack, pods, folder
        self._environment = {"KUBECONFIG": str(kubeconfig)}
        self._keys = folder / "keys"
        self._keys.mkdir()
        (self._keys / "k1").write_bytes(b"0123456789abcdef")
        self.sidecars: dict[str, Sidecar] = {}
        self.engines: dict[str, FakeDecode] = {}
        self.turns: dict[str, list[Turn]] = {}
        self.tls: tuple[str, ...] = ()
        """Flags of sidecars and router for mutual TLS."""
        self.http: aiohttp.ClientSession

    def use_mutual_tls(self) -> None:
        secret = MountedSecret(self._folder / "tls")
        secret.write(trustme.CA(), "chat.default.svc")
        self.tls = ("--mutual-tls", str(secret.directory))

    async def decode(self, name: str) -> None:
        """A decode pod with a scripted engine."""
        engine = await self._stack.enter_async_context(FakeDecode())
        self.engines[name], self.turns[name] = engine, []
        await self.add_decode(name, engine.url)

    async def add_decode(self, name: str, engine: str, model: str = "m") -> None:
        """A decode pod: the engine with this URL and a sidecar."""
        flags = ("--engine", engine, "--plan-key-dir", str(self._keys), "--pod-name", name)
        process = await self._stack.enter_async_context(sidecar(*flags, *self.tls))
        self.sidecars[name] = process
        await self._add(name, process.listen, "decode", model)

    async def prefill(self, name: str) -> Peer:
        """A prefill pod with a scripted engine."""
        peer = await self._stack.enter_async_context(FakePrefill())
        await self.add_prefill(name, peer.address)
        return peer

    async def add_prefill(self, name: str, engine: HostPort, model: str = "m") -> None:
        await self._add(name, engine, "prefill", model)

    async def _add(self, name: str, server: HostPort, role: str, model: str) -> None:
        backend = Backend(name, port=server.port)
        await self.pods.create(backend, role, models=(model,), host=server.host)

    def script(self, *scripts: Script) -> None:
        """How the next requests are answered, wherever they come to."""
        left = list(scripts)
        for name, engine in self.engines.items():

            async def script(turn: Turn, name: str = name, engine: FakeDecode = engine) -> None:
                if turn.request.method == "GET":
                    # The router's own questions, by way of the sidecar.
                    await engine.complete(turn)
                    return
                self.turns[name].append(turn)
                await left.pop(0)(turn)

            engine.generate = script

    @asynccontextmanager
    async def router(
        self, *expected: str, flags: tuple[str, ...] = (), **sections: Any
    ) -> AsyncIterator[Sidecar]:
        """A router that knows the pods `expected`; `sections`: of its file."""
        file = self._folder / "router.yaml"
        file.write_text(yaml.safe_dump(sections))
        flags = (
            *("--discovery", "kubernetes", "--no-warm-up", *self.tls),
            *("--namespace", self.pods.namespace, "--endpoint", "chat"),
            *("--plan-key-dir", str(self._keys)),
            *flags,
        )
        async with (
            router(file, *flags, environment=self._environment) as process,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as self.http,
        ):
            await until(lambda: self.serves(process, *expected))
            yield process

    async def serves(self, process: Sidecar, *expected: str) -> bool:
        backends = await self.backends(process)
        return {each["name"] for each in backends if each["ready"]} == {*expected}

    async def backends(self, process: Sidecar) -> list[dict[str, Any]]:
        """The pods as the router knows them."""
        async with self.http.get(process.admin_url("/state")) as answer:
            backends: list[dict[str, Any]] = (await answer.json())["backends"]
        return backends

    async def running(self, name: str) -> int:
        """How many requests a pod's sidecar serves."""
        async with self.http.get(self.sidecars[name].admin_url("/state")) as answer:
            return len((await answer.json())["in_flight"])

    async def is_ready(self, process: Sidecar) -> bool:
        async with self.http.get(process.admin_url("/readyz")) as answer:
            return answer.status == 200
