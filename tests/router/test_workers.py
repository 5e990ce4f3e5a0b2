"""Several workers on one port: what they share, and what happens when one of them dies."""

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
import yaml

from tandem_contract.commandline import HostPort
from tandem_router import workers as router_workers
from tandem_router.configuration import load
from tandem_sidecar.process.supervisor import Supervisor
from tandem_sidecar.settings import Settings

from ..sidecar.peers import FakeDecode, Turn
from ..sidecar.process.test_supervisor import Printed, no_workers, print_ready
from ..sidecar.workers import STREAM, StreamingWorkers
from .conftest import DECODE
from .processes import router

pytestmark = [
    pytest.mark.component,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="sockets that workers inherit on Linux"),
]
_HANG_SECONDS = 120.0
"""Only a hang takes so long: a worker that is replaced starts Python, on a machine with load."""


class Workers(StreamingWorkers):
    """A router of two workers, and engines that stream until `go` is set."""

    def __init__(self, file: Path, http: aiohttp.ClientSession) -> None:
        super().__init__(http)
        self.file = file
        self.backends: list[dict[str, Any]] = []
        self.engines: dict[str, FakeDecode] = {}

    async def add(self, name: str, stack: AsyncExitStack) -> None:
        engine = await stack.enter_async_context(FakeDecode())
        engine.generate = self.stream_until_go
        self.engines[name] = engine
        self.backends.append({"name": name, "url": f"http://{engine.address}"})

    def write(self, *names: str) -> None:
        listed = [b for b in self.backends if b["name"] in names]
        self.file.write_text(yaml.safe_dump({"backends": listed}))

    async def until_all_count(self, requests: int) -> None:
        """Wait until each worker knows of so many requests in flight, and of no others."""

        async def do_count() -> bool:
            known = [worker["backends_in_flight"] for worker in (await self.state())["workers"]]
            return known == [requests, requests]

        await self.until(do_count)

    async def until(self, condition: Any) -> None:
        """Wait until the coroutine function returns true."""
        async with asyncio.timeout(_HANG_SECONDS):
            while not await condition():
                await asyncio.sleep(0.02)

    async def are_connected(self) -> bool:
        return await self.metric('tandem_epp_peers{state="connected"}') == 1


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    async with AsyncExitStack() as stack:
        connector = aiohttp.TCPConnector(force_close=True)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        running = Workers(tmp_path / "router.yaml", http)
        for name in ("a", "b"):
            await running.add(name, stack)
        running.write("a", "b")
        stack.callback(running.go.set)
        process = router(running.file, "--workers", "2", "--drain-timeout", "30s")
        running.server = await stack.enter_async_context(process)
        await running.until(running.are_connected)
        yield running


async def streams(workers: Workers, least: int) -> list[aiohttp.ClientResponse]:
    """At least `least` streams, an even number, of which each worker serves some. The next one
    begins when all workers know of those before it."""
    started: list[aiohttp.ClientResponse] = []

    while len(started) < least or len(started) % 2 or 0 in (await workers.pids()).values():
        started.append(await workers.start_stream())
        await workers.until_all_count(len(started))
    return started


async def test_workers_count_each_others_requests(workers: Workers) -> None:
    started = await streams(workers, 8)
    # Least in flight over both workers: neither backend ever has two more than the other.
    placed = Counter(answer.headers[DECODE] for answer in started)
    assert placed["a"] == placed["b"]
    state = await workers.state()
    counted = {backend["name"]: backend["in_flight"] for backend in state["backends"]}
    assert counted == placed
    assert len(state["in_flight"]) == len(started)
    workers.go.set()
    for answer in started:
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
    await workers.until_all_count(0)
    assert await workers.metric('disaggregated_requests_total{routing_path="unified"}') == len(
        started
    )
    async with workers.http.get(workers.server.admin_url("/debug/decisions?limit=99")) as page:
        assert len(await page.json()) == len(started)
    async with workers.http.get(workers.server.admin_url("/health")) as page:
        assert page.status == 200


async def test_a_killed_worker_loses_its_own_streams_only(workers: Workers) -> None:
    started = await streams(workers, 6)
    victim, lost = max((await workers.pids()).items())
    os.kill(victim, signal.SIGKILL)

    async def is_replaced() -> bool:
        busy = await workers.pids()
        return len(busy) == 2 and victim not in busy and await workers.are_connected()

    await workers.until(is_replaced)
    await workers.until_all_count(len(started) - lost)
    workers.go.set()
    endings = await asyncio.gather(*(answer.read() for answer in started), return_exceptions=True)
    broken = [ending for ending in endings if isinstance(ending, aiohttp.ClientPayloadError)]
    whole = [ending for ending in endings if isinstance(ending, bytes)]
    assert (len(broken), len(whole)) == (lost, len(started) - lost)
    assert all(ending.endswith(b"data: [DONE]\n\n") for ending in whole)


async def test_workers_reload_and_drain_together(workers: Workers) -> None:
    workers.write("b")
    workers.server.process.send_signal(signal.SIGHUP)

    async def have_reloaded() -> bool:
        return len((await workers.state())["backends"]) == 1

    await workers.until(have_reloaded)
    started = await streams(workers, 2)
    assert {answer.headers[DECODE] for answer in started} == {"b"}
    workers.file.write_text("backends: [{name: third}]\n")
    await workers.server.wait_for_log("not reloaded")
    workers.server.process.send_signal(signal.SIGTERM)

    async def is_draining() -> bool:
        return bool((await workers.state())["draining"])

    await workers.until(is_draining)
    async with workers.http.post(workers.server.url(), data=STREAM) as answer:
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    workers.go.set()
    for answer in started:
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
    assert await workers.server.exit_status() == 0


async def test_a_backend_that_one_worker_ejects_is_ejected_by_the_other(workers: Workers) -> None:
    async def fails(turn: Turn) -> None:
        turn.answer(500, b"{}")

    workers.engines["a"].generate = fails
    workers.go.set()
    # One connection: all requests are one worker's, and the other learns of them by their channel.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as http:

        async def is_ejected() -> bool:
            async with http.post(workers.server.url(), data=STREAM) as answer:
                assert answer.status == 200
                assert answer.headers[DECODE] == "b"
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")
            return await workers.metric('tandem_epp_ejected{backend="a"}') == 1

        await workers.until(is_ejected)
    line = await workers.server.wait_for_log("outcomes of this EPP's requests: none")
    assert "backend a is ejected" in line


async def test_sighup_ends_nothing_once_the_process_says_that_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_workers, "print_ready", print_ready)
    monkeypatch.setattr(Supervisor, "start", no_workers)
    file, listen = tmp_path / "router.yaml", HostPort("127.0.0.1", 0)
    file.write_text("backends: [{name: a, url: 'http://127.0.0.1:1'}]\n")
    settings = Settings(listen, listen, workers=2)
    with pytest.raises(Printed):
        await router_workers.supervise(settings, file, load(file, {}), ())


async def test_all_processes_read_changed_certificates_again(tmp_path: Path) -> None:
    """The supervisor too: it reads the engines' metrics."""
    authorities, file = tmp_path / "ca.pem", tmp_path / "router.yaml"
    trustme.CA().cert_pem.write_to_path(authorities)
    file.write_text(yaml.safe_dump({"backends": [{"name": "a", "url": "https://127.0.0.1:1"}]}))
    async with router(file, "--workers", "2", "--tls-ca", str(authorities)) as server:
        trustme.CA().cert_pem.write_to_path(authorities)
        for _ in range(3):
            await server.wait_for_log("certificates reloaded")
