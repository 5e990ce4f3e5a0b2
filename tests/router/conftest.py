"""A router in the test's process, with scripted engines on real sockets."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import yaml

from tandem_contract.api_keys import ApiKeys
from tandem_contract.commandline import HostPort
from tandem_kube.client import connect
from tandem_router.configuration import load
from tandem_router.main import epp_settings
from tandem_router.run import RunningRouter, start
from tandem_sidecar.settings import Settings

from ..cluster.control_plane import ControlPlane
from ..epp.backends.cluster_pods import Pods
from ..sidecar.peers import FakeDecode, FakePrefill, Peer, Script, Turn
from .cluster import Cluster

LOOPBACK: Final = HostPort("127.0.0.1", 0)
PROMPT: Final = list(range(100, 200))
"""Token ids: their length is exact."""
PATH: Final = "x-continuum-routing-path"
PREFILL: Final = "x-continuum-prefill-backend"
DECODE: Final = "x-continuum-decode-backend"


class FakeUnified(FakeDecode):
    """Answers prefill legs as a NIXL producer does, and others as a decode engine does."""

    async def default(self, turn: Turn) -> None:
        body = turn.request.json if turn.request.body else {}
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            await FakePrefill.default(FakePrefill(), turn)
        else:
            await super().default(turn)


class Harness:
    """One router and its engines."""

    def __init__(self, stack: AsyncExitStack, directory: Path) -> None:
        self._stack = stack
        self.file = directory / "router.yaml"
        self.backends: list[dict[str, Any]] = []
        self.router: RunningRouter
        self.http: aiohttp.ClientSession

    async def prefill(self, name: str, script: Script | None = None, **fields: Any) -> FakePrefill:
        peer = FakePrefill(script)
        await self.add(name, peer, role="prefill", **fields)
        return peer

    async def decode(self, name: str, script: Script | None = None, **fields: Any) -> FakeDecode:
        peer = FakeDecode(script)
        await self.add(name, peer, **{"role": "decode", **fields})
        return peer

    async def unified(self, name: str, **fields: Any) -> "FakeUnified":
        peer = FakeUnified()
        await self.add(name, peer, role="unified", **fields)
        return peer

    async def add(self, name: str, peer: Peer, **fields: Any) -> None:
        """Start `peer` and list it as a backend."""
        await self._stack.enter_async_context(peer)
        self.backends.append({"name": name, "url": f"http://{peer.address}", **fields})

    def write(self, serving: Mapping[str, Any] | None = None, **sections: Any) -> None:
        """Write the router's file."""
        serving = {"enabled": True, **(serving or {})}
        data = {"disaggregated_serving": serving, "backends": self.backends, **sections}
        self.file.write_text(yaml.safe_dump(data))

    async def start(
        self,
        serving: Mapping[str, Any] | None = None,
        *,
        settings: Settings | None = None,
        keys: Path | None = None,
        api_keys: ApiKeys | None = None,
        warm_up: bool = False,
        **sections: Any,
    ) -> None:
        """Start the router, and wait until every backend was checked once.

        `keys`: directory of plan keys; the engines are then asked as sidecars. `warm_up`: off, so
        that the engines get the test's requests only.
        """
        self.write(serving, **sections)
        flags = settings or Settings(listen=LOOPBACK, admin=LOOPBACK)
        epp = replace(epp_settings(self.file, flags, warm_up=warm_up), plan_key_dir=keys)
        context = start(flags, epp, load(self.file, os.environ), api_keys=api_keys)
        self.router = await self._stack.enter_async_context(context)
        timeout = aiohttp.ClientTimeout(total=20)
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        await until(lambda: self.router.components.decisions.scraper.is_complete)

    def url(self, path: str = "/v1/completions") -> str:
        return f"http://{self.router.listen}{path}"

    def admin(self, path: str) -> str:
        return f"http://{self.router.admin}{path}"

    async def ask(
        self, body: Mapping[str, Any] | None = None, path: str = "/v1/completions", **options: Any
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """The answer to a completion of `PROMPT`, or to `body`."""
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 4} if body is None else body
        async with self.http.post(self.url(path), json=body, **options) as response:
            return response, await response.read()

    async def page(self, path: str) -> str:
        """A page of the admin port."""
        async with self.http.get(self.admin(path)) as answer:
            return await answer.text()

    async def metric(self, sample: str) -> float:
        """The value of one line of /metrics; a name without its labels: the sum over them."""
        page = await self.page("/metrics")
        lines = [
            line for line in page.splitlines() if line.startswith((f"{sample} ", f"{sample}{{"))
        ]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


async def until(condition: Any) -> None:
    """Wait until the condition is true; fail after 20 s."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    async with AsyncExitStack() as stack:
        running = Harness(stack, tmp_path)
        yield running
        components = running.router.components
        # However a request ended: what stays counted would make every later choice wrong.
        if not components.lifecycle.work:
            assert not len(components.overlaps)
            assert all(pod.in_flight == 0 for pod in components.decisions.fleet)


@pytest.fixture
async def cluster(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(await connect(control_plane.kubeconfig))
        yield Cluster(stack, Pods(api, namespace), tmp_path, control_plane.kubeconfig)
