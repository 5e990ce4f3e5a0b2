"""Envoy without an EPP: it serves requests, and drains without cutting a response."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tandem_local.ports import free_port
from tandem_operator.routing.envoy.bootstrap import LIVE, READY, STATS, EnvoySettings
from tandem_operator.routing.router_drain import drain

from ..epp.real import Backend, envoy, serving, until

DRAIN = "tandem_operator.routing.router_drain"
pytestmark = pytest.mark.component

HOST = "127.0.0.1"


@dataclass
class Running:
    url: str
    health: str
    admin: int
    backend: Backend
    session: aiohttp.ClientSession

    async def status(self, path: str) -> int:
        async with self.session.get(self.health + path) as response:
            await response.read()
            return response.status

    async def ask(self, path: str) -> bytes:
        async with self.session.post(self.url + path, data=b"{}") as response:
            assert response.status == 200
            return await response.read()

    async def slow_request(self) -> "asyncio.Task[bytes]":
        """A request whose response the backend has started and finishes when the test says so."""
        request = asyncio.create_task(self.ask("/v1/responses/slow"))
        await until(self.has_received)
        return request

    async def has_received(self) -> bool:
        return bool(self.backend.received)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    backend, health = Backend("decode-1"), free_port(HOST)
    async with AsyncExitStack() as parts:
        await parts.enter_async_context(serving(backend))
        settings = EnvoySettings(
            # As the Service of an EPP that is not ours and not there either.
            epp_address="no-such-epp.invalid",
            fallback=(f"{HOST}:{backend.port}",),
            listen_address=HOST,
            listen_port=free_port(HOST),
            admin_port=free_port(HOST),
            body_mode="FULL_DUPLEX_STREAMED",
            response_bodies=True,
            health_port=health,
            max_heap=1 << 30,
        )
        url = await parts.enter_async_context(envoy(tmp_path, settings))
        session = await parts.enter_async_context(aiohttp.ClientSession())
        yield Running(url, f"http://{HOST}:{health}", settings.admin_port, backend, session)


async def test_the_health_port_is_read_only(running: Running) -> None:
    assert [await running.status(path) for path in (READY, LIVE, STATS)] == [200, 200, 200]
    for path in ("/", "/quitquitquit", "/config_dump", f"{STATS}/../quitquitquit"):
        assert await running.status(path) == 404


async def test_without_an_epp_a_decode_pod_serves(running: Running) -> None:
    assert await running.ask("/v1/completions") == b"first last"


async def test_draining_ends_after_the_last_response(running: Running) -> None:
    request = await running.slow_request()
    draining = asyncio.create_task(
        asyncio.to_thread(drain, HOST, running.admin, settle=0.0, limit=60.0)
    )

    async def unready() -> bool:
        return await running.status(READY) == 503

    await until(unready)
    assert await running.status(LIVE) == 200
    async with running.session.get(running.url + "/v1/models") as late:
        assert (await late.read(), late.headers["connection"]) == (b"first last", "close")
    assert not draining.done()
    running.backend.release.set()
    assert await request == b"first last"
    assert await draining == 0


async def test_draining_returns_the_remaining_requests_at_its_limit(running: Running) -> None:
    request = await running.slow_request()
    assert await asyncio.to_thread(drain, HOST, running.admin, settle=0.0, limit=0.1) == 1
    running.backend.release.set()
    await request


async def test_the_program_drains_on_sigterm(running: Running) -> None:
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", DRAIN, "0", f"{HOST}:{running.admin}"),
        stderr=asyncio.subprocess.PIPE,
    )
    assert program.stderr is not None
    try:
        assert b"waiting for SIGTERM" in await program.stderr.readline()
        assert await running.status(READY) == 200
        program.terminate()
        assert b"0 requests still running" in await program.stderr.readline()
    except BaseException:
        # A process that is left running fails a later test, when it is garbage-collected.
        program.kill()
        raise
    finally:
        await program.communicate()
    assert program.returncode == 0
    assert await running.status(READY) == 503


@pytest.mark.parametrize("words", [(), ("soon",), ("1", "2", "3"), ("1", "nowhere")])
async def test_wrong_arguments_print_the_usage(words: tuple[str, ...]) -> None:
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", DRAIN, *words),
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await program.communicate()
    assert program.returncode == 2
    assert b"SECONDS" in errors
