"""A sidecar in the test's process, with scripted engines on real sockets."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from tandem_contract.commandline import HostPort
from tandem_contract.plan_keys import PlanKeys
from tandem_sidecar.process.run import RunningSidecar, start
from tandem_sidecar.security.route import AllowList
from tandem_sidecar.settings import Settings

from .peers import FakeDecode, FakePrefill, Script, no_list

LOOPBACK = HostPort("127.0.0.1", 0)


class Harness:
    """One sidecar, its decode engine and any number of prefill engines."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.go = asyncio.Event()
        """Set by the test to let a waiting script continue."""
        self.prefills: list[FakePrefill] = []
        self.decode: FakeDecode
        self.sidecar: RunningSidecar
        self.http: aiohttp.ClientSession

    async def prefill(
        self, script: Script | None = None, *, tls: ssl.SSLContext | None = None
    ) -> FakePrefill:
        peer = FakePrefill(script)
        peer.tls = tls
        await self._stack.enter_async_context(peer)
        self.prefills.append(peer)
        return peer

    async def start(
        self,
        decode: Script | None = None,
        *,
        keys: PlanKeys | None = None,
        models: Script = no_list,
        **changes: Any,
    ) -> None:
        self.decode = await self._stack.enter_async_context(FakeDecode(decode))
        self.decode.models = models
        values: dict[str, Any] = {
            "listen": LOOPBACK,
            "admin": LOOPBACK,
            "engine": self.decode.address,
            "allow": AllowList(addresses=frozenset(p.address for p in self.prefills)),
            "pod_name": "decode-0",
        }
        settings = Settings(**values | changes)
        context = start(settings, keys or PlanKeys(None))
        self._serving = await self._stack.enter_async_context(AsyncExitStack())
        self.sidecar = await self._serving.enter_async_context(context)
        timeout = aiohttp.ClientTimeout(total=20)
        session = aiohttp.ClientSession(timeout=timeout)
        self.http = await self._stack.enter_async_context(session)

    async def stop(self) -> None:
        """Stop the sidecar before the engines."""
        await self._serving.aclose()

    @property
    def candidates(self) -> dict[str, str]:
        """Headers that name every prefill engine as a candidate, in order."""
        return {"x-prefiller-host-port": ",".join(str(p.address) for p in self.prefills)}

    def url(self, path: str = "/v1/completions") -> str:
        return f"http://{self.sidecar.listen}{path}"

    def admin(self, path: str) -> str:
        return f"http://{self.sidecar.admin}{path}"

    async def metric(self, sample: str) -> float:
        """The value of one line of /metrics; a name without its labels: the sum over them."""
        async with self.http.get(self.admin("/metrics")) as answer:
            page = await answer.text()
        lines = [
            line for line in page.splitlines() if line.startswith((f"{sample} ", f"{sample}{{"))
        ]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with AsyncExitStack() as stack:
        running = Harness(stack)
        yield running
        # However a request ended: a prompt that stays would make every later report wrong.
        if not running.sidecar.lifecycle.work:
            assert not len(running.sidecar.overlaps)
