"""Several worker processes behind one listening socket."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import trustme

from tandem_contract.commandline import HostPort
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import Plan, Target, sign
from tandem_sidecar.process import supervisor
from tandem_sidecar.process.reload import Source
from tandem_sidecar.process.supervisor import Supervisor
from tandem_sidecar.settings import Settings

from ...contract.full_servers import Server, serves_newcomers
from ..peers import FakeDecode
from ..processes import Sidecar, drain, sidecar
from ..workers import STREAM, StreamingWorkers

pytestmark = pytest.mark.component
REST = b"data: [DONE]\n\n"
LARGE = b'{"prompt": "%s"}' % (b"x" * 2000)


class Workers(StreamingWorkers):
    """Two workers, an engine that streams until `go` is set, and an HTTP client."""

    def __init__(self, server: Sidecar, decode: FakeDecode, http: aiohttp.ClientSession) -> None:
        super().__init__(http)
        self.server, self.decode = server, decode
        self.served_meanwhile = 0
        decode.generate = self.stream_until_go

    async def readiness(self) -> int:
        async with self.http.get(self.server.admin_url("/readyz")) as answer:
            return answer.status

    async def until_always(self, status: int, body: bytes) -> aiohttp.ClientResponse:
        """The last of 20 answers in a row with that status: all workers gave some of them."""
        last, row = None, 0
        async with asyncio.timeout(60):
            while last is None or row < 20:
                async with self.http.post(self.server.url(), data=body) as last:
                    row = row + 1 if last.status == status else 0
                    self.served_meanwhile += last.status == 200
        return last

    async def start_streams_on_both(self) -> list[aiohttp.ClientResponse]:
        """Requests that run, some on each worker."""
        answers = [await self.start_stream()]
        async with asyncio.timeout(60):
            while 0 in (await self.pids()).values():
                answers.append(await self.start_stream())
        return answers


@asynccontextmanager
async def two_workers(*arguments: str) -> AsyncIterator[Workers]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        FakeDecode() as decode,
        sidecar("--workers", "2", "--engine", f"http://{decode.address}", *arguments) as server,
        aiohttp.ClientSession(connector=connector) as http,
    ):
        workers = Workers(server, decode, http)
        async with asyncio.timeout(60):
            while await workers.readiness() != 200:
                pass
        yield workers


class Printed(Exception):
    """The line that says that the process serves is printed."""


def print_ready(*_: object) -> None:
    # Neither SIG_DFL nor SIG_IGN, which `nohup` sets.
    assert callable(signal.getsignal(signal.SIGHUP))
    raise Printed


async def no_workers(_: Supervisor) -> None: ...


async def test_sighup_ends_nothing_once_the_process_says_that_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "print_ready", print_ready)
    monkeypatch.setattr(Supervisor, "start", no_workers)
    listen = HostPort("127.0.0.1", 0)
    settings = Settings(listen, listen, listen, workers=2)
    source = Source(None, {}, dict, lambda _: settings)
    with pytest.raises(Printed):
        await supervisor.supervise(settings, source, ())


async def check_streams_end(answers: list[aiohttp.ClientResponse]) -> None:
    for answer in answers:
        assert await answer.content.read() == REST


async def test_a_killed_worker_is_replaced_and_requests_of_the_other_go_on() -> None:
    async with two_workers() as workers:
        answers = await workers.start_streams_on_both()
        before = await workers.pids()
        victim = next(iter(before))
        os.kill(victim, signal.SIGKILL)
        assert f"pid {victim}" in await workers.server.wait_for_log("exited with status -9")
        async with asyncio.timeout(60):
            while len(after := await workers.pids()) < 2:
                assert len(after) == 1
        assert victim not in after
        workers.go.set()
        ends = await asyncio.gather(
            *(answer.content.read() for answer in answers), return_exceptions=True
        )
        assert ends.count(REST) == len(answers) - before[victim]
        async with workers.http.post(workers.server.url(), data=STREAM) as fresh:
            assert fresh.status == 200


async def test_a_plan_that_one_worker_has_followed_is_refused_by_the_others(
    tmp_path: Path,
) -> None:
    (tmp_path / "k").write_bytes(b"0123456789abcdef")
    flags = ("--plan-key-dir", str(tmp_path), "--pod-name", "decode-0")
    async with two_workers(*flags) as workers:
        plan = Plan(
            RoutingPath.FAST_DECODE,
            "cached",
            Target("decode-0", ""),
            request_id="r1",
            expires=time.time() + 60,
            alternates=(),
        )
        value = sign(plan, {"k": b"0123456789abcdef"}, now=time.time())
        headers = {"x-request-id": "r1", "x-tandem-plan": value}
        workers.go.set()
        paths = []
        # Each on a connection of its own, so that both workers get some.
        for _ in range(20):
            async with workers.http.post(
                workers.server.url(), data=STREAM, headers=headers
            ) as answer:
                assert answer.status == 200
                paths.append(answer.headers["x-continuum-routing-path"])
        assert paths == ["fast_decode"] + ["unified"] * 19


async def test_all_workers_reload_and_a_drain_waits_for_all(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("max-body: 1MiB\n")
    async with two_workers("--config", str(file)) as workers:
        answers = await workers.start_streams_on_both()
        assert len((await workers.state())["in_flight"]) == len(answers)

        file.write_text("max-body: 1KiB\n")
        workers.server.process.send_signal(signal.SIGHUP)
        await workers.server.wait_for_log("settings reloaded: --max-body 1048576 -> 1024")
        await workers.until_always(413, LARGE)

        draining = asyncio.create_task(drain(workers.server.admin, wait=True))
        async with asyncio.timeout(60):
            while await workers.readiness() != 503:
                pass
        second = await drain(workers.server.admin)
        assert second == {"draining": True, "in_flight": len(answers)}
        late = await workers.until_always(503, STREAM)
        assert late.headers["connection"] == "close"
        assert not draining.done()
        workers.go.set()
        await check_streams_end(answers)
        assert await draining == {"draining": True, "in_flight": 0}
        served = await workers.metric('disaggregated_requests_total{routing_path="unified"}')
        assert served == len(answers) + workers.served_meanwhile

        workers.server.process.terminate()
        assert await workers.server.exit_status() == 0
        assert "Traceback" not in await workers.server.read_log_to_end()


async def test_sigterm_drains_all_workers_and_a_second_one_exits_at_once() -> None:
    async with two_workers() as workers:
        answers = await workers.start_streams_on_both()
        workers.server.process.terminate()
        await workers.until_always(503, STREAM)
        assert [answer.content.at_eof() for answer in answers] == [False] * len(answers)
        workers.server.process.terminate()
        assert await workers.server.exit_status() == 0
        for answer in answers:
            answer.close()


async def test_workers_drain_and_exit_after_their_supervisor_was_killed() -> None:
    async with two_workers() as workers:
        answer = await workers.start_stream()
        workers.server.process.kill()
        workers.go.set()
        await check_streams_end([answer])
        await workers.server.read_log_to_end()  # stderr is closed when the last worker has exited


async def test_all_processes_read_changed_certificates_again(tmp_path: Path) -> None:
    """The supervisor too: it reads the engine's metrics."""
    authorities = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(authorities)
    engine = "https://127.0.0.1:1"
    async with sidecar(
        "--workers", "2", "--engine", engine, "--tls-ca", str(authorities)
    ) as server:
        trustme.CA().cert_pem.write_to_path(authorities)
        for _ in range(3):
            await server.wait_for_log("certificates reloaded")


async def test_a_newcomer_is_served_by_full_workers() -> None:
    async with two_workers("--max-connections", "3") as workers:
        # Three at each, and two that wait in the kernel before the newcomer.
        assert await serves_newcomers(Server(workers.server.listen.port, 8))
