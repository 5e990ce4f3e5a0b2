"""Pairs meet once, again after a restart, and no request waits for it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tandem_cli.demo import pools
from tandem_contract import headers as wire
from tandem_contract import metrics as names_of
from tandem_contract.config import Backend
from tandem_contract.paths import Role, RoutingPath
from tandem_contract.plan import WARM_UP, verify
from tandem_engine.tiny import make_tiny_model
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend, Gauges, Pod, ScrapeResult
from tandem_epp.backends.warmup import ATTEMPTS, WarmUps
from tandem_epp.metrics import Metrics
from tandem_local.addresses import free_port
from tandem_local.stack import Stack
from tandem_operator.resources.pool_files import parse_pools

from ..real import until
from ..test_picker import World

KEYS = {"k": b"0123456789abcdef"}


@dataclass
class Sidecar:
    """Says how a hand-off went, and remembers who asked for what."""

    way: str | None = RoutingPath.PREFILL_THEN_DECODE
    status: int = 200
    holds: bool = False
    """Whether it answers once `held` is set."""
    asked: list[tuple[Mapping[str, str], dict[str, object]]] = field(default_factory=list)
    held: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((headers, await request.json()))
        if self.holds:
            await self.held.wait()
        told = {wire.ROUTING_PATH: self.way} if self.way else {}
        return web.Response(status=self.status, headers=told)


class Pairs:
    """A fleet that is scraped by hand, whose decode pods are all one sidecar."""

    def __init__(self, sidecar: Sidecar, url: str, keys: Mapping[str, bytes]) -> None:
        self.sidecar, self._url = sidecar, url
        self.is_enabled = True
        self.fleet = Fleet()
        self.metrics = Metrics(self.fleet)
        self.warm_ups = WarmUps(
            self.fleet,
            lambda result: self.metrics.warm_ups.labels(result).inc(),
            lambda: keys,
            lambda: self.is_enabled,
            back_off=0,
        )

    def have(self, **pods: tuple[Role, str | None, tuple[str, ...]]) -> None:
        """Name → role, compat hash, models. Prefill pods are named and never asked."""
        self.fleet.apply(
            DiscoveredBackend(
                Backend(name, self._url_of(i, role), role, compat=compat, models=models)
            )
            for i, (name, (role, compat, models)) in enumerate(pods.items())
        )

    def _url_of(self, number: int, role: Role) -> str:
        return f"http://10.0.0.{number}:8000" if role is Role.PREFILL else self._url

    def __getitem__(self, name: str) -> Pod:
        return next(pod for pod in self.fleet if pod.name == name)

    def scraped(self, *names: str, process: bytes = b"1") -> None:
        for name in names:
            self[name].apply_scrape(ScrapeResult(Gauges(), process, block_tokens=32))
            self.warm_ups.on_backend_up(self[name])

    def ended(self, result: str) -> float:
        return (
            self.metrics.registry.get_sample_value("tandem_epp_warmups_total", {"result": result})
            or 0.0
        )

    async def count(self, result: str, wanted: int) -> None:
        async def there() -> bool:
            return self.ended(result) == wanted

        await until(there)


@asynccontextmanager
async def pairs(sidecar: Sidecar, keys: Mapping[str, bytes] = KEYS) -> AsyncIterator[Pairs]:
    app = web.Application()
    app.add_routes([web.post("/v1/completions", sidecar.serve)])
    async with TestServer(app) as server:
        made = Pairs(sidecar, str(server.make_url("/")).rstrip("/"), keys)
        try:
            yield made
        finally:
            sidecar.held.set()
            await made.warm_ups.close()


D = (Role.DECODE, None, ("m",))
P = (Role.PREFILL, None, ("m",))


async def test_each_pair_meets_once_by_a_signed_plan_for_a_prompt_of_its_own() -> None:
    sidecar = Sidecar()
    async with pairs(sidecar) as world:
        world.have(d1=D, d2=D, p1=P, p2=P)
        world.scraped("d1", "d2", "p1", "p2")
        await world.count("warm", 4)
        world.scraped("d1", "d2", "p1", "p2")
        world.warm_ups.warm_all()
    plans = []
    for headers, body in sidecar.asked:
        ident = headers["x-request-id"]
        plan = verify(headers[wire.PLAN], KEYS, request_id=ident, now=0)
        assert (plan.path, plan.reason) == (RoutingPath.PREFILL_THEN_DECODE, WARM_UP)
        assert headers[wire.PREFILLER_HOST_PORT] == plan.prefill[0].address
        plans.append((plan.decode.name, plan.prefill[0].name))
        assert (body["model"], body["max_tokens"]) == ("m", 1)
        prompt = body["prompt"]
        assert isinstance(prompt, list)
        assert len(prompt) == 65, "over two blocks"
    assert sorted(plans) == [("d1", "p1"), ("d1", "p2"), ("d2", "p1"), ("d2", "p2")]
    assert len({str(body["prompt"]) for _, body in sidecar.asked}) == 4


async def test_without_keys_the_pod_is_named_and_without_models_the_engine_chooses() -> None:
    sidecar = Sidecar(way=None)
    async with pairs(sidecar, {}) as world:
        world.have(d=(Role.DECODE, None, ()), p=(Role.PREFILL, None, ()))
        world.scraped("d", "p")
        await world.count("warm", 1)
    ((headers, body),) = sidecar.asked
    assert headers[wire.PREFILLER_HOST_PORT] == "10.0.0.1:8000"
    assert wire.PLAN not in headers
    assert "model" not in body


async def test_who_may_not_pair_or_does_not_answer_is_left_alone() -> None:
    sidecar = Sidecar()
    async with pairs(sidecar) as world:
        world.have(
            d=(Role.DECODE, "a", ("m",)),
            other_hash=(Role.PREFILL, "b", ("m",)),
            other_model=(Role.PREFILL, "a", ("n",)),
            unscraped=(Role.PREFILL, "a", ("m",)),
            silent=(Role.PREFILL, "a", ("m",)),
            right=(Role.PREFILL, "a", ("n", "m")),
        )
        world["silent"].record_scrape_failure()
        world.is_enabled = False
        world.scraped("d", "other_hash", "other_model", "right")
        world.is_enabled = True
        world.warm_ups.warm_all()
        await world.count("warm", 1)
    ((headers, body),) = sidecar.asked
    assert headers[wire.PREFILLER_HOST_PORT] == world["right"].address
    assert body["model"] == "m"


async def test_another_process_under_the_name_is_met_again() -> None:
    sidecar = Sidecar()
    async with pairs(sidecar) as world:
        world.have(d=D, p=P)
        world.scraped("d", "p")
        await world.count("warm", 1)
        world.scraped("p", process=b"2")
        await world.count("warm", 2)
        world.scraped("d", process=b"2")
        await world.count("warm", 3)
    assert len(sidecar.asked) == 3


@pytest.mark.parametrize(
    ("sidecar", "result"),
    [(Sidecar(status=503), "error"), (Sidecar(way=RoutingPath.FALLBACK), "fallback")],
)
async def test_a_failing_one_is_tried_again_a_few_times(sidecar: Sidecar, result: str) -> None:
    async with pairs(sidecar) as world:
        world.have(d=D, p=P)
        world.scraped("d", "p")
        await world.count(result, ATTEMPTS)
        await until(lambda: no_longer_cold(world, "d"))
        sidecar.status, sidecar.way = 200, None
        world.warm_ups.warm_all()
        await world.count("warm", 1)
    assert len(sidecar.asked) == ATTEMPTS + 1


async def test_a_sidecar_that_is_not_there() -> None:
    async with pairs(Sidecar()) as world:
        world.have(d=(Role.UNIFIED, None, ()), p=P)
        closed_port = f"http://127.0.0.1:{free_port('127.0.0.1')}"
        backends = (
            Backend("d", closed_port, Role.DECODE),
            Backend("p", "http://10.0.0.1:1", Role.PREFILL),
        )
        world.fleet.apply(map(DiscoveredBackend, backends))
        world.scraped("d", "p")
        await world.count("unreachable", ATTEMPTS)


async def no_longer_cold(world: Pairs, name: str) -> bool:
    return not world[name].unwarmed_prefills


async def test_others_are_preferred_until_it_is_over() -> None:
    sidecar = Sidecar(holds=True)
    async with pairs(sidecar) as world:
        world.have(d=D, p1=P)
        world.scraped("d", "p1")

        async def asked() -> bool:
            return len(sidecar.asked) == 1

        await until(asked)
        assert names(world) == ["d", "p1"], "there is no other"
        world.have(d=D, p1=P, p2=P)
        assert names(world) == ["d", "p2"]
        assert world.metrics.registry.get_sample_value("tandem_epp_warming_pairs") == 1
        sidecar.held.set()
        await until(lambda: no_longer_cold(world, "d"))
        assert names(world) == ["d", "p1", "p2"]


def names(world: Pairs) -> list[str]:
    return [pod.name for pod in world.fleet.prefill_candidates("m", world["d"])]


def test_a_request_is_handed_to_a_warm_pod_while_there_is_one() -> None:
    world = World(d="decode", p1="prefill", p2="prefill")
    world["p2"].in_flight = 50
    world["d"].unwarmed_prefills.add(world["p1"])
    assert [target.name for target in world.place()[1].prefill] == ["p2"]
    world["d"].unwarmed_prefills.add(world["p2"])
    world.fleet.invalidate_views()
    assert [target.name for target in world.place("new " * 400)[1].prefill] == ["p1", "p2"]


@pytest.mark.component
@pytest.mark.timeout(300)
async def test_real_engines_meet_once_and_again_after_a_restart(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", max_position=512)
    documents = pools.pair(tmp_path / "model", 512)
    for document in documents:
        document.data["spec"]["replicas"] = 1
    sets = parse_pools(documents)
    async with Stack(sets, port=0, run_dir=tmp_path / "run") as stack:
        await until(lambda: warm(stack, 1), within=100)
        prefill = next(pod for pod in stack.pods if pod.role is Role.PREFILL)
        os.killpg(prefill.pids["engine"], signal.SIGKILL)
        await until(lambda: warm(stack, 2), within=100)
        pages = [await page(pod.sidecar_metrics) for pod in stack.pods if pod.sidecar_metrics]
    assert len(pages) == 1
    for figures in pages:
        assert not any(
            value for name, value in figures.items() if name.startswith(names_of.REQUESTS)
        ), "no client asked"


async def warm(stack: Stack, wanted: int) -> bool:
    figures = await page(stack.epp_metrics)
    failed = {k: v for k, v in figures.items() if k.startswith("tandem_epp_warmups_total")}
    return failed == {'tandem_epp_warmups_total{result="warm"}': wanted}


async def page(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        lines = (await response.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}
