"""Two EPPs behind real Envoy: they share what they place, and one of them is killed under load."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
import pytest

from tandem_contract.endpoints import DEBUG_PODS
from tandem_contract.pod_reports import PodReport
from tandem_local.ports import free_port
from tandem_operator.routing.envoy.http_filters import BodyMode

from ..real import Backend, Epp, envoy, envoy_settings, epp, serving, until

pytestmark = pytest.mark.component

HOST = "127.0.0.1"
CONNECTED = 'tandem_epp_peers{state="connected"}'


@dataclass
class ReplicatedStack:
    """Two EPPs, one Envoy and two backends."""

    url: str
    client: aiohttp.ClientSession
    epps: list[Epp]
    backends: Sequence[Backend]
    restart: Callable[[Epp], AbstractAsyncContextManager[Epp]]
    """Starts an EPP again, as another process at the same peer address."""

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

    async def pods(self, replica: Epp) -> list[PodReport]:
        """What a replica reports of each pod."""
        url = f"http://{HOST}:{replica.metrics}{DEBUG_PODS}"
        async with self.client.get(url) as response:
            return msgspec.json.decode(await response.read(), type=list[PodReport])

    async def counted(self, replica: Epp) -> int:
        """Requests in flight on all pods as a replica knows them, its own and those of others."""
        return sum(pod.in_flight for pod in await self.pods(replica))

    async def all_count(self, requests: int) -> bool:
        """Whether each replica counts so many requests in flight."""
        return all([await self.counted(each) == requests for each in self.epps])

    async def until_received(self, count: int) -> None:
        async def all_received() -> bool:
            return self.received == count

        await until(all_received)


@asynccontextmanager
async def two_epps(
    directory: Path, mode: BodyMode, backends: Sequence[Backend] = (), **first: str
) -> AsyncIterator[ReplicatedStack]:
    """`backends`: two that answer in their own way. `first`: environment of the first EPP."""
    backends = backends or [Backend("b1"), Backend("b2")]
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
        listening = [("--peer-listen", f"{HOST}:{port}") for port in peers]
        epps = [
            await parts.enter_async_context(epp(config, *flags, *address, **environment))
            for address, environment in zip(listening, (first, {}), strict=True)
        ]
        fallback = [f"{HOST}:{backend.port}" for backend in backends]
        settings = envoy_settings(epps[0].grpc, fallback, mode)
        url = await parts.enter_async_context(envoy(directory, settings, [epps[1].grpc]))
        client = await parts.enter_async_context(aiohttp.ClientSession())

        async def connected() -> bool:
            return all([(await each.figures())[CONNECTED] == 1 for each in epps])

        await until(connected)
        addresses = dict(zip(map(id, epps), listening, strict=True))
        yield ReplicatedStack(
            url, client, epps, backends, lambda each: epp(config, *flags, *addresses[id(each)])
        )


async def test_two_replicas_spread_requests_like_one(tmp_path: Path) -> None:
    async with two_epps(tmp_path, "BUFFERED") as stack:
        sent = []
        for number in range(12):
            sent.append(asyncio.create_task(stack.post(number, slow=True)))
            # The other replica is told a moment after the backend has the request.
            await until(partial(stack.all_count, number + 1))
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


async def get(stack: ReplicatedStack, path: str) -> None:
    """A request without a prompt; its answer may break off."""
    try:
        async with stack.client.get(stack.url + path) as response:
            await response.read()
    except aiohttp.ClientError:
        pass


@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_every_ending_reaches_the_other_replica(tmp_path: Path, mode: BodyMode) -> None:
    async with two_epps(tmp_path, mode) as stack:
        slow = [asyncio.create_task(stack.post(n, slow=True)) for n in range(8)]
        await until(lambda: stack.all_count(8))
        for client in slow[:4]:
            client.cancel()
        await until(lambda: stack.all_count(4))
        stack.release()
        assert await asyncio.gather(*slow[4:]) == [b"first last"] * 4
        # Alternating, so that both replicas place some of each kind.
        for path in (
            "/v1/models",
            "/v1/responses/cut",
            "/v1/models",
            "/v1/responses/cut",
            "/v1/models",
            "/v1/responses/die",
            "/v1/responses/die",
        ):
            await get(stack, path)
        stack.backends[0].fails = True
        for number in range(8):
            await stack.post(number, slow=False)

        async def agree() -> bool:
            one, other = [await stack.pods(each) for each in stack.epps]
            return all(
                a.health == b.health and abs(a.failure_rate - b.failure_rate) < 0.1
                for a, b in zip(one, other, strict=True)
            )

        await until(lambda: stack.all_count(0))
        await until(agree)
        assert any(pod.failure_rate > 0 for pod in await stack.pods(stack.epps[0]))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_replica_that_stops_is_forgotten_later_and_counts_once_when_it_returns(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with two_epps(tmp_path, "BUFFERED") as stack:
        sent = []
        for request in range(8):
            sent.append(asyncio.create_task(stack.post(request, slow=True)))
            await stack.until_received(request + 1)
        await until(lambda: stack.all_count(8))
        victim, other = stack.epps
        own = int(await other.in_flight())
        assert 0 < own < 8
        victim.process.send_signal(number)
        await victim.process.wait()
        assert await stack.counted(other) == 8, "its requests run on without it"
        async with stack.restart(victim) as returned:
            stack.epps[0] = returned
            assert await stack.counted(returned) == own, "it is ready once it was told"
            # The old process is forgotten after its grace; the new one placed nothing.
            await until(lambda: stack.all_count(own))
            stack.release()
            assert await asyncio.gather(*sent) == [b"first last"] * 8
            await until(lambda: stack.all_count(0))
