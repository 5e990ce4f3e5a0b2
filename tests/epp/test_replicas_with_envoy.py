"""Two EPPs behind real Envoy: they share what they place, and one of them is killed under load."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tandem_local.addresses import free_port
from tandem_operator.routing.envoy.bootstrap import EnvoySettings
from tandem_operator.routing.envoy.http_filters import BodyMode

from .real import Backend, Epp, envoy, epp, serving, until

pytestmark = pytest.mark.component

HOST = "127.0.0.1"
CONNECTED = 'tandem_epp_peers{state="connected"}'


@dataclass
class ReplicatedStack:
    """Two EPPs, one Envoy and two backends."""

    url: str
    client: aiohttp.ClientSession
    epps: list[Epp]
    backends: list[Backend]

    async def post(self, number: int, *, slow: bool) -> bytes | None:
        """The answer to a request; None if it was lost."""
        body = {"model": "m", "prompt": str(number), "user": "slow" if slow else "quick"}
        try:
            async with self.client.post(self.url + "/v1/completions", json=body) as response:
                answer = await response.read()
                return answer if response.status == 200 else None
        except aiohttp.ClientError:
            return None

    @property
    def received(self) -> int:
        return sum(len(backend.received) for backend in self.backends)

    def release(self) -> None:
        """Let the slow answers end."""
        for backend in self.backends:
            backend.release.set()

    async def until_received(self, count: int) -> None:
        async def all_received() -> bool:
            return self.received == count

        await until(all_received)


@asynccontextmanager
async def two_epps(directory: Path, mode: BodyMode) -> AsyncIterator[ReplicatedStack]:
    backends = [Backend("b1"), Backend("b2")]
    keys = directory / "keys"
    keys.mkdir()
    (keys / "k1").write_bytes(b"0123456789abcdef")
    config = directory / "router.yaml"
    peers = [free_port(HOST), free_port(HOST)]
    flags = ["--plan-key-dir", str(keys)]
    for port in peers:
        flags += ["--peers", f"{HOST}:{port}"]
    async with AsyncExitStack() as parts:
        await parts.enter_async_context(serving(*backends))
        urls = [
            {"name": each.name, "url": f"http://{HOST}:{each.port}", "role": "unified"}
            for each in backends
        ]
        config.write_text(
            json.dumps(
                {
                    "disaggregated_serving": {"enabled": False},
                    "backends": urls,
                    # Exact counts: the times that these backends report mean nothing.
                    "plugins": [{"type": "active-request-scorer"}],
                }
            )
        )
        epps = [
            await parts.enter_async_context(epp(config, *flags, "--peer-listen", f"{HOST}:{port}"))
            for port in peers
        ]
        settings = EnvoySettings(
            epp_address=HOST,
            epp_port=epps[0].grpc,
            fallback=tuple(f"{HOST}:{backend.port}" for backend in backends),
            listen_address=HOST,
            listen_port=free_port(HOST),
            admin_port=free_port(HOST),
            body_mode=mode,
        )
        url = await parts.enter_async_context(envoy(directory, settings, [epps[1].grpc]))
        client = await parts.enter_async_context(aiohttp.ClientSession())

        async def connected() -> bool:
            return all([(await each.figures())[CONNECTED] == 1 for each in epps])

        await until(connected)
        yield ReplicatedStack(url, client, epps, backends)


async def test_two_replicas_spread_requests_like_one(tmp_path: Path) -> None:
    async with two_epps(tmp_path, "BUFFERED") as stack:
        sent = []
        for number in range(12):
            sent.append(asyncio.create_task(stack.post(number, slow=True)))
            await stack.until_received(number + 1)
        counts = [await each.in_flight() for each in stack.epps]
        assert sum(counts) == 12
        assert min(counts) > 0, "Envoy uses both replicas"
        assert [len(backend.received) for backend in stack.backends] == [6, 6]
        stack.release()
        assert await asyncio.gather(*sent) == [b"first last"] * 12
        for each in stack.epps:
            assert (await each.figures())["tandem_epp_peer_events_dropped_total"] == 0


@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_a_killed_replica(tmp_path: Path, mode: BodyMode) -> None:
    """Nothing is lost in BUFFERED mode. In FULL_DUPLEX_STREAMED Envoy 1.40 resets the answers in
    progress whose stream the killed EPP held, and no others."""
    async with two_epps(tmp_path, mode) as stack:
        sent = []
        for number in range(12):
            sent.append(asyncio.create_task(stack.post(number, slow=True)))
            await stack.until_received(number + 1)
        victim, other = stack.epps
        held = int(await victim.in_flight())
        assert 0 < held < 12
        victim.process.kill()
        await victim.process.wait()
        if mode == "BUFFERED":
            # Among them requests before Envoy notices that the EPP is gone.
            quick = await asyncio.gather(*(stack.post(n, slow=False) for n in range(100, 140)))
            assert quick == [b"first last"] * 40
        stack.release()
        lost = (await asyncio.gather(*sent)).count(None)
        assert lost == (0 if mode == "BUFFERED" else held)

        async def nothing_in_flight() -> bool:
            figures = await other.figures()
            return await other.in_flight() == 0 and figures[CONNECTED] == 0

        await until(nothing_in_flight)
