"""Warm-up: each pair once, again after a restart, and without delaying requests."""

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
from tandem_contract.plan import WARM_UP
from tandem_contract.plan_verification import verify
from tandem_engine.tiny import make_tiny_model
from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend, Pod
from tandem_epp.backends.warmup import ATTEMPTS, WarmUps
from tandem_epp.backends.warmup_requests import SidecarHandOffs
from tandem_epp.estimates.engine_figures import EngineCounters, Gauges
from tandem_epp.metrics.counters import Metrics
from tandem_local.ports import free_port
from tandem_local.stack import Stack
from tandem_operator.resources.pool_files import parse_pools

from ..h2c import speaking_http2
from ..placement.test_picker import PickerSetup
from ..real import until

KEYS = {"k": b"0123456789abcdef"}


@dataclass
class Sidecar:
    """A fake sidecar: reports a routing path, and records its requests."""

    path: str | None = RoutingPath.PREFILL_THEN_DECODE
    status: int = 200
    waits: bool = False
    """Whether it answers only once `may_answer` is set."""
    requests: list[tuple[Mapping[str, str], dict[str, object]]] = field(default_factory=list)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((headers, await request.json()))
        if self.waits:
            await self.may_answer.wait()
        headers = {wire.ROUTING_PATH: self.path} if self.path else {}
        return web.Response(status=self.status, headers=headers)


class Pairs:
    """A fleet without a scraper; one sidecar answers for all of its decode pods."""

    def __init__(self, sidecar: Sidecar, url: str, keys: Mapping[str, bytes]) -> None:
        self.sidecar, self.url = sidecar, url
        self.is_enabled = True
        self.fleet = Fleet()
        self.metrics = Metrics(self.fleet)
        self.warm_ups = WarmUps(
            self.fleet,
            lambda result: self.metrics.warm_ups.child(result).inc(),
            SidecarHandOffs(lambda: keys),
            lambda: self.is_enabled,
            back_off=0,
        )

    def set_pods(self, **pods: tuple[Role, str | None, tuple[str, ...]]) -> None:
        """Set the pods: name → role, compat hash, models. Prefill pods get no request."""
        self.fleet.apply(
            DiscoveredBackend(
                Backend(name, self._url_of(i, role), role, compat=compat, models=models)
            )
            for i, (name, (role, compat, models)) in enumerate(pods.items())
        )

    def _url_of(self, number: int, role: Role) -> str:
        return f"http://10.0.0.{number}:8000" if role is Role.PREFILL else self.url

    def __getitem__(self, name: str) -> Pod:
        return next(pod for pod in self.fleet if pod.name == name)

    def scrape(self, *names: str, process: bytes = b"1") -> None:
        for name in names:
            self[name].apply_scrape(ScrapeResult(Gauges(), process, block_tokens=32))
            self.warm_ups.on_backend_up(self[name])

    def count_of(self, result: str) -> float:
        return (
            self.metrics.registry.get_sample_value("tandem_epp_warmups_total", {"result": result})
            or 0.0
        )

    async def wait_for(self, result: str, expected: int) -> None:
        async def is_reached() -> bool:
            return self.count_of(result) == expected

        await until(is_reached)


@asynccontextmanager
async def pairs(sidecar: Sidecar, keys: Mapping[str, bytes] = KEYS) -> AsyncIterator[Pairs]:
    app = web.Application()
    app.add_routes([web.post("/v1/completions", sidecar.serve)])
    async with TestServer(app) as server:
        engine_pairs = Pairs(sidecar, str(server.make_url("/")).rstrip("/"), keys)
        try:
            yield engine_pairs
        finally:
            sidecar.may_answer.set()
            await engine_pairs.warm_ups.close()


D = (Role.DECODE, None, ("m",))
P = (Role.PREFILL, None, ("m",))


async def test_each_pair_is_warmed_once_with_a_signed_plan_and_its_own_prompt() -> None:
    sidecar = Sidecar()
    async with pairs(sidecar) as setup:
        setup.set_pods(d1=D, d2=D, p1=P, p2=P)
        setup.scrape("d1", "d2", "p1", "p2")
        await setup.wait_for("warm", 4)
        setup.scrape("d1", "d2", "p1", "p2")
        setup.warm_ups.warm_all()
    plans = []
    for headers, body in sidecar.requests:
        request_id = headers["x-request-id"]
        plan = verify(headers[wire.PLAN], KEYS, request_id=request_id, now=0)
        assert (plan.path, plan.reason) == (RoutingPath.PREFILL_THEN_DECODE, WARM_UP)
        assert headers[wire.PREFILLER_HOST_PORT] == plan.prefill[0].address
        plans.append((plan.decode.name, plan.prefill[0].name))
        assert (body["model"], body["max_tokens"]) == ("m", 1)
        prompt = body["prompt"]
        assert isinstance(prompt, list)
        assert len(prompt) == 65, "more than two blocks"
    assert sorted(plans) == [("d1", "p1"), ("d1", "p2"), ("d2", "p1"), ("d2", "p2")]
    assert len({str(body["prompt"]) for _, body in sidecar.requests}) == 4


async def test_without_keys_a_header_names_the_prefill_pod() -> None:
    sidecar = Sidecar(path=None)
    async with pairs(sidecar, {}) as setup:
        setup.set_pods(d=(Role.DECODE, None, ()), p=(Role.PREFILL, None, ()))
        setup.scrape("d", "p")
        await setup.wait_for("warm", 1)
    ((headers, body),) = sidecar.requests
    assert headers[wire.PREFILLER_HOST_PORT] == "10.0.0.1:8000"
    assert wire.PLAN not in headers
    assert "model" not in body


async def test_pods_that_cannot_pair_or_do_not_answer_are_not_warmed() -> None:
    sidecar = Sidecar()
    async with pairs(sidecar) as setup:
        setup.set_pods(
            d=(Role.DECODE, "a", ("m",)),
            other_hash=(Role.PREFILL, "b", ("m",)),
            other_model=(Role.PREFILL, "a", ("n",)),
            unscraped=(Role.PREFILL, "a", ("m",)),
            silent=(Role.PREFILL, "a", ("m",)),
            right=(Role.PREFILL, "a", ("n", "m")),
        )
        setup["silent"].record_failed_check()
        setup.is_enabled = False
        setup.scrape("d", "other_hash", "other_model", "right")
        setup.is_enabled = True
        setup.warm_ups.warm_all()
        await setup.wait_for("warm", 1)
    ((headers, body),) = sidecar.requests
    assert headers[wire.PREFILLER_HOST_PORT] == setup["right"].address
    assert body["model"] == "m"


async def test_a_restarted_process_is_warmed_again() -> None:
    sidecar = Sidecar()
    async with pairs(sidecar) as setup:
        setup.set_pods(d=D, p=P)
        setup.scrape("d", "p")
        await setup.wait_for("warm", 1)
        setup.scrape("p", process=b"2")
        await setup.wait_for("warm", 2)
        setup.scrape("d", process=b"2")
        await setup.wait_for("warm", 3)
    assert len(sidecar.requests) == 3


@pytest.mark.parametrize(
    ("sidecar", "result"),
    [(Sidecar(status=503), "error"), (Sidecar(path=RoutingPath.FALLBACK), "fallback")],
)
async def test_a_failed_warm_up_is_retried_a_few_times(sidecar: Sidecar, result: str) -> None:
    async with pairs(sidecar) as setup:
        setup.set_pods(d=D, p=P)
        setup.scrape("d", "p")
        await setup.wait_for(result, ATTEMPTS)
        await until(lambda: is_warm(setup, "d"))
        sidecar.status, sidecar.path = 200, None
        setup.warm_ups.warm_all()
        await setup.wait_for("warm", 1)
    assert len(sidecar.requests) == ATTEMPTS + 1


async def test_an_unreachable_sidecar_is_counted() -> None:
    async with pairs(Sidecar()) as setup:
        setup.set_pods(d=(Role.UNIFIED, None, ()), p=P)
        closed_port = f"http://127.0.0.1:{free_port('127.0.0.1')}"
        backends = (
            Backend("d", closed_port, Role.DECODE),
            Backend("p", "http://10.0.0.1:1", Role.PREFILL),
        )
        setup.fleet.apply(map(DiscoveredBackend, backends))
        setup.scrape("d", "p")
        await setup.wait_for("unreachable", ATTEMPTS)


@pytest.mark.component
async def test_a_sidecar_that_speaks_http2_only_is_warmed_by_http2(tmp_path: Path) -> None:
    sidecar = Sidecar()
    async with pairs(sidecar) as setup:
        _, _, server = setup.url.rpartition(":")
        async with speaking_http2(tmp_path, int(server)) as port:
            decode = Backend("d", f"http://127.0.0.1:{port}", Role.DECODE, http2=True)
            prefill = Backend("p", "http://10.0.0.1:1", Role.PREFILL)
            setup.fleet.apply(map(DiscoveredBackend, (decode, prefill)))
            setup.scrape("d", "p")
            await setup.wait_for("warm", 1)
        ((headers, body),) = sidecar.requests
        assert headers[wire.PREFILLER_HOST_PORT] == "10.0.0.1:1"
        assert body["max_tokens"] == 1
        setup.scrape("p", process=b"2")
        await setup.wait_for("unreachable", ATTEMPTS)


async def is_warm(setup: Pairs, name: str) -> bool:
    return not setup[name].unwarmed_prefills


async def test_other_prefill_pods_are_preferred_during_a_warm_up() -> None:
    sidecar = Sidecar(waits=True)
    async with pairs(sidecar) as setup:
        setup.set_pods(d=D, p1=P)
        setup.scrape("d", "p1")

        async def has_request() -> bool:
            return len(sidecar.requests) == 1

        await until(has_request)
        assert names(setup) == ["d", "p1"], "there is no other prefill pod"
        setup.set_pods(d=D, p1=P, p2=P)
        assert names(setup) == ["d", "p2"]
        assert setup.metrics.registry.get_sample_value("tandem_epp_warming_pairs") == 1
        sidecar.may_answer.set()
        await until(lambda: is_warm(setup, "d"))
        assert names(setup) == ["d", "p1", "p2"]


def names(setup: Pairs) -> list[str]:
    return [pod.name for pod in setup.fleet.prefill_candidates("m", setup["d"])]


def test_a_request_goes_to_a_warm_prefill_pod_if_there_is_one() -> None:
    setup = PickerSetup(d="decode", p1="prefill", p2="prefill")
    setup["p2"].in_flight = 50
    setup["d"].unwarmed_prefills.add(setup["p1"])
    assert [target.name for target in setup.place()[1].prefill] == ["p2"]
    setup["d"].unwarmed_prefills.add(setup["p2"])
    setup.fleet.invalidate_views()
    assert [target.name for target in setup.place("new " * 400)[1].prefill] == ["p1", "p2"]


async def test_the_transfer_of_a_warm_up_teaches_nothing() -> None:
    """It includes the handshake, which no request will wait for."""
    sidecar = Sidecar(waits=True)
    async with pairs(sidecar) as setup:
        setup.set_pods(d=D, p=P)

        def samples_after(transfers: int, now: float) -> int:
            counters = EngineCounters(
                transfers=transfers,
                transfer_bytes=1e6 * transfers,
                transfer_seconds=0.1 * transfers,
            )
            setup["d"].apply_scrape(ScrapeResult(Gauges(), b"1", counters=counters), now)
            return setup["d"].estimates.transfer.count

        setup.scrape("d", "p")

        async def is_under_way() -> bool:
            return bool(sidecar.requests)

        await until(is_under_way)
        assert samples_after(0, 1000.0) == 0
        assert samples_after(1, 1010.0) == 0
        sidecar.may_answer.set()
        await setup.wait_for("warm", 1)
        assert samples_after(2, 1020.0) == 0
        assert samples_after(3, 1030.0) == 1


@pytest.mark.component
@pytest.mark.timeout(300)
async def test_real_engines_are_warmed_once_and_again_after_a_restart(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", max_position=512)
    documents = pools.pair(tmp_path / "model", 512)
    for document in documents:
        document.data["spec"]["replicas"] = 1
    sets = parse_pools(documents)
    async with Stack(sets, port=0, run_dir=tmp_path / "run") as stack:
        await until(lambda: has_warmed(stack, 1), within=100)
        prefill = next(pod for pod in stack.pods if pod.role is Role.PREFILL)
        os.killpg(prefill.pids["engine"], signal.SIGKILL)
        await until(lambda: has_warmed(stack, 2), within=100)
        pages = [await page(pod.sidecar_metrics) for pod in stack.pods if pod.sidecar_metrics]
    assert len(pages) == 1
    for figures in pages:
        assert not any(
            value for name, value in figures.items() if name.startswith(names_of.REQUESTS)
        ), "warm-ups are not counted as client requests"


async def has_warmed(stack: Stack, expected: int) -> bool:
    figures = await page(stack.epp_metrics)
    attempts = {k: v for k, v in figures.items() if k.startswith("tandem_epp_warmups_total")}
    return attempts == {'tandem_epp_warmups_total{result="warm"}': expected}


async def page(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        lines = (await response.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}
