"""Data-parallel ranks with a port of their own, as llm-d's sidecar serves them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tandem_contract.commandline import HostPort
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import Plan, Target, sign
from tandem_contract.plan_keys import PlanKeys
from tandem_sidecar.process.run import start
from tandem_sidecar.security.route import AllowList
from tandem_sidecar.settings import Settings

from ..conftest import LOOPBACK
from ..peers import FakeDecode, FakePrefill, free_pair
from ..wire import Response, wire

HEADER = "x-data-parallel-host-port"


class Ranks:
    """A sidecar before two engines."""

    def __init__(self, listen: HostPort, engines: list[FakeDecode], prefill: FakePrefill) -> None:
        self.listen, self.engines, self.prefill = listen, engines, prefill

    async def post(self, rank: int, *headers: str) -> Response:
        """Send a generation to the port of `rank`."""
        address = self.listen._replace(port=self.listen.port + rank)
        async with wire(address) as client:
            client.post(b'{"model": "m", "prompt": "p", "max_tokens": 1}', *headers)
            return await client.response()

    @property
    def served(self) -> list[int]:
        """Number of requests of each engine."""
        return [len(engine.requests) for engine in self.engines]


@asynccontextmanager
async def serving(
    keys: PlanKeys | None = None, engine: type[FakeDecode] = FakeDecode, pod_name: str = ""
) -> AsyncIterator[Ranks]:
    async with AsyncExitStack() as stack:
        first, port = free_pair(), free_pair()
        engines = [engine(), engine()]
        for rank, each in enumerate(engines):
            each.port = first + rank
            await stack.enter_async_context(each)
        prefill = await stack.enter_async_context(FakePrefill())
        settings = Settings(
            listen=HostPort("127.0.0.1", port),
            admin=LOOPBACK,
            engine=engines[0].address,
            ranks=2,
            pod_name=pod_name,
            allow=AllowList(addresses=frozenset({prefill.address})),
        )
        running = await stack.enter_async_context(start(settings, keys or PlanKeys(None)))
        yield Ranks(running.listen, engines, prefill)


async def test_each_port_is_served_by_the_engine_of_its_rank() -> None:
    async with serving() as ranks:
        answers = [await ranks.post(rank) for rank in (0, 1, 1)]
        assert [answer.status for answer in answers] == [200] * 3
        assert ranks.served == [1, 2]


async def test_the_header_names_the_rank_also_for_the_decode_of_a_split_request() -> None:
    async with serving() as ranks:
        # llm-d's EPP sends the request to the first port and names the rank's by its address.
        second = f"{HEADER}: 10.0.0.7:{ranks.listen.port + 1}"
        assert (await ranks.post(0, second)).status == 200
        named = f"x-prefiller-host-port: {ranks.prefill.address}"
        answer = await ranks.post(0, second, named)
        assert answer.headers["x-continuum-routing-path"] == "prefill_then_decode"
        assert ranks.served == [0, 2]
        assert all(HEADER not in request.headers for request in ranks.engines[1].requests)


@pytest.mark.parametrize("value", ["10.0.0.7:1", "10.0.0.7", ""])
async def test_a_rank_that_does_not_exist_is_refused(value: str) -> None:
    async with serving() as ranks:
        answer = await ranks.post(0, f"{HEADER}: {value}")
        assert (answer.status, ranks.served) == (400, [0, 0])
        assert b"data-parallel" in answer.body
        assert b"10.0.0.7" not in answer.body


async def test_with_plan_keys_the_header_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "20260101T000000Z").write_bytes(b"k" * 32)
    async with serving(PlanKeys(tmp_path)) as ranks:
        assert (await ranks.post(0, f"{HEADER}: 10.0.0.7:{ranks.listen.port + 1}")).status == 200
        assert ranks.served == [1, 0]


@pytest.mark.parametrize(
    ("name", "rank", "path"),
    [
        ("decode-0-rank-1", None, "prefill_then_decode"),
        ("decode-0-rank-1_dp2", 2, "prefill_then_decode"),
        ("decode-0", None, "prefill_then_decode"),
        ("decode-0-rank-0", None, "unified"),
        ("decode-1-rank-1", None, "unified"),
    ],
)
async def test_a_plan_for_a_translated_address_is_known_by_the_name_of_its_port(
    tmp_path: Path, name: str, rank: int | None, path: str
) -> None:
    (tmp_path / "k1").write_bytes(b"k" * 32)
    keys = PlanKeys(tmp_path)
    async with serving(keys, pod_name="decode-0") as ranks:
        now = time.time()
        plan = Plan(
            path=RoutingPath.PREFILL_THEN_DECODE,
            reason="worth_it",
            decode=Target(name, "203.0.113.1:30001", rank),
            prefill=(Target("prefill-0", str(ranks.prefill.address)),),
            alternates=(),
            request_id="r1",
            expires=now + 60,
        )
        signed = sign(plan, keys.current, now=now)
        answer = await ranks.post(1, f"x-tandem-plan: {signed}", "x-request-id: r1")
        assert (answer.status, answer.headers["x-continuum-routing-path"]) == (200, path)


async def test_one_rank_ignores_the_header() -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeDecode())
        settings = Settings(listen=LOOPBACK, admin=LOOPBACK, engine=engine.address)
        running = await stack.enter_async_context(start(settings, PlanKeys(None)))
        async with asyncio.timeout(10), wire(running.listen) as client:
            client.post(b'{"model": "m", "prompt": "p"}', f"{HEADER}: 10.0.0.7:8001")
            assert (await client.response()).status == 200
        assert HEADER not in engine.requests[0].headers
