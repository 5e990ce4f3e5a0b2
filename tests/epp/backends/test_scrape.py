"""Scraping: backends that start, die and restart."""

import asyncio
from collections.abc import AsyncIterator
from math import inf

import pytest
from aiohttp import web

from tandem_contract import metrics as names
from tandem_contract.config import Backend as BackendConfig
from tandem_contract.config import HealthChecks
from tandem_contract.prefix import text_chain
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend
from tandem_epp.backends.scrape import Scraper
from tandem_epp.estimates.engine_figures import Gauges

from ..real import Backend, serving, serving_app, until
from .engine_pages import VllmPage

CHAIN = text_chain(bytes(640))


@pytest.fixture
async def fleet() -> AsyncIterator[tuple[Fleet, Scraper]]:
    scraped_fleet = Fleet()
    scraper = Scraper(scraped_fleet)
    yield scraped_fleet, scraper
    await scraper.close()


async def test_backends_are_scraped_as_they_start_die_and_restart(
    fleet: tuple[Fleet, Scraper],
) -> None:
    pods, scraper = fleet
    backend = Backend("a")
    async with serving(backend):
        pods.apply([DiscoveredBackend(BackendConfig("a", f"http://127.0.0.1:{backend.port}"))])
        assert not scraper.is_complete
        scraper.sync()
        (pod,) = pods
        await until(lambda: holds(scraper.is_complete and pod.gauges is not None))
        pods.prefixes.place(pod, CHAIN)
        backend.started = 2.0
        await until(lambda: holds(not pods.prefixes.match(CHAIN).placed))
        assert pod.ready
    await until(lambda: holds(not pod.ready))
    assert pods.ready_pods(None) == ()
    async with serving(backend):
        await until(lambda: holds(pod.ready))
        assert pods.ready_pods(None) == (pod,)
    pods.apply([])
    scraper.sync()
    assert scraper.is_complete


async def test_the_ranks_of_a_page_become_pods(fleet: tuple[Fleet, Scraper]) -> None:
    pods, scraper = fleet
    page = VllmPage(engines=(0, 1))
    page.running.labels(page.model, "1").set(4)
    backend = Backend("a")
    backend.ranked_page = page.body().decode()
    async with serving(backend):
        pods.apply([DiscoveredBackend(BackendConfig("a", f"http://localhost:{backend.port}"))])
        scraper.sync()
        await until(lambda: holds([pod.name for pod in pods if pod.ready] == ["a_dp0", "a_dp1"]))
        assert [pod.gauges for pod in pods] == [Gauges(), Gauges(running=4)]
    await until(lambda: holds(not any(pod.ready for pod in pods)))
    assert len(pods) == 2, "a page that is missing says nothing about the ranks"


async def test_the_length_of_prompts_is_that_of_the_process_that_answers(
    fleet: tuple[Fleet, Scraper],
) -> None:
    pods, scraper = fleet
    page = VllmPage(engines=(0, 1))
    backend = Backend("a", max_model_len=4096)
    backend.ranked_page = page.body().decode()
    async with serving(backend):
        pods.apply([DiscoveredBackend(BackendConfig("a", f"http://127.0.0.1:{backend.port}"))])
        scraper.sync()
        await until(lambda: holds(scraper.is_complete))
        assert [pod.max_model_len for pod in pods] == [4096, 4096]
        backend.max_model_len, backend.ranked_page, backend.started = 512, "", 2.0
        await until(lambda: holds([pod.max_model_len for pod in pods] == [512]))
        backend.max_model_len, backend.started = None, 3.0
        await until(lambda: holds([pod.max_model_len for pod in pods] == [None]))


async def test_a_pod_that_is_ready_is_chosen_while_its_list_of_models_is_awaited(
    fleet: tuple[Fleet, Scraper], monkeypatch: pytest.MonkeyPatch
) -> None:
    pods, scraper = fleet
    backend, answered = Backend("a"), asyncio.Event()

    async def read_models(*_: object) -> None:
        await answered.wait()

    async with serving(backend):
        pods.apply([DiscoveredBackend(BackendConfig("a", f"http://127.0.0.1:{backend.port}"))])
        scraper.sync()
        (pod,) = pods
        await until(lambda: holds(scraper.is_complete))
    await until(lambda: holds(not pod.ready))
    assert pods.ready_pods(None) == ()
    monkeypatch.setattr(scraper, "_read_models", read_models)
    async with serving(backend):
        await until(lambda: holds(pod.ready))
        assert pods.ready_pods(None) == (pod,)
        answered.set()


async def test_a_host_name_is_resolved(fleet: tuple[Fleet, Scraper]) -> None:
    pods, scraper = fleet
    backend = Backend("a")
    async with serving(backend):
        pods.apply([DiscoveredBackend(BackendConfig("a", f"http://localhost:{backend.port}"))])
        (pod,) = pods
        assert not pod.ready
        scraper.sync()
        await until(lambda: holds(pod.ready))
        assert pod.address in (f"127.0.0.1:{backend.port}", f"[::1]:{backend.port}")


async def test_figures_fade_while_a_backend_answers_no_scrape(
    fleet: tuple[Fleet, Scraper],
) -> None:
    pods, scraper = fleet
    release = asyncio.Event()
    page = f"{names.ENGINE_RUNNING} 8\n"
    answers = 0

    async def metrics(_: web.Request) -> web.Response:
        nonlocal answers
        answers += 1
        if answers > 1:
            await release.wait()
        return web.Response(text=page)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with serving_app(app) as url:
        pods.apply([DiscoveredBackend(BackendConfig("a", url))])
        scraper.sync()
        (pod,) = pods
        await until(lambda: holds(pod.gauges is not None and 0 < pod.gauges.running < 8))
        assert pod.ready, "late figures count less; they do not make a backend unhealthy"
        release.set()
        await until(lambda: holds(pod.gauges == Gauges(running=8)))


async def test_a_check_requests_the_path_and_the_metrics(fleet: tuple[Fleet, Scraper]) -> None:
    pods, scraper = fleet
    scraper.checks = HealthChecks("/health", 0.1, timeout=20.0, healthy_threshold=3)
    backend = Backend("a")
    async with serving(backend):
        pods.apply([DiscoveredBackend(BackendConfig("a", f"http://127.0.0.1:{backend.port}"))])
        scraper.sync()
        (pod,) = pods
        await until(lambda: holds(pod.gauges is not None and pod.ready))
        backend.fails = True
        await until(lambda: holds(not pod.ready))
        backend.received.clear()
        backend.fails = False
        await until(lambda: holds(pod.ready))
        assert [request.path for request in backend.received[:3]] == ["/health"] * 3
        # With the next settings the page alone counts.
        scraper.checks = HealthChecks(interval=0.1, timeout=20.0)
        backend.fails = True
        scraped_at = pod.scraped_at
        await until(lambda: holds(pod.scraped_at > scraped_at and scraper.is_complete))
        assert pod.ready


async def test_a_check_that_takes_too_long_fails(fleet: tuple[Fleet, Scraper]) -> None:
    pods, scraper = fleet
    scraper.checks = HealthChecks("/v1/responses/hang", timeout=0.1)
    backend = Backend("a")
    async with serving(backend):
        pods.apply([DiscoveredBackend(BackendConfig("a", f"http://127.0.0.1:{backend.port}"))])
        scraper.sync()
        (pod,) = pods
        await until(lambda: holds(not pod.ready))
        scraper.checks = HealthChecks("/v1/responses/hang", timeout=20.0)
        backend.release.set()
        await until(lambda: holds(pod.ready))


async def test_a_page_that_hangs_makes_no_pod_unhealthy_that_answers(
    fleet: tuple[Fleet, Scraper],
) -> None:
    pods, scraper = fleet
    backend = Backend("a")
    async with serving(backend):
        pods.apply([DiscoveredBackend(BackendConfig("a", f"http://127.0.0.1:{backend.port}"))])
        scraper.checks = HealthChecks(timeout=20.0)
        scraper.sync()
        (pod,) = pods
        await until(lambda: holds(pod.scraped_at > 0))
        # Requests are answered from now on, and no page comes.
        pod.health.answered_at = inf
        scraper.checks = HealthChecks("/v1/responses/hang", timeout=0.05, unhealthy_threshold=2)
        (target,) = scraper._targets.values()
        await until(lambda: holds(target.failures >= 4))
        assert pod.ready
        pod.health.answered_at = 0.0
        await until(lambda: holds(not pod.ready))


async def holds(condition: bool) -> bool:
    return condition
