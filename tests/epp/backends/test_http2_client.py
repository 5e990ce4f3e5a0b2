"""Backends that speak HTTP/2 only, as a pool's `appProtocol` says: Envoy is in front of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from tandem_contract.config import Backend as BackendConfig
from tandem_contract.config import HealthChecks
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.http2_client import Http2Client, speaks_http2
from tandem_epp.backends.pods import DiscoveredBackend, Pod
from tandem_epp.backends.scrape import Scraper
from tandem_epp.backends.scrape_settings import ScrapeSettings

from ..h2c import speaking_http2
from ..real import Backend, serving, serving_app, until

pytestmark = pytest.mark.component


@asynccontextmanager
async def scraped(
    backend: BackendConfig, checks: HealthChecks | None = None, port: int | None = None
) -> AsyncIterator[Pod]:
    """The pod of `backend`, which is scraped; `port`: of its metrics page."""
    fleet = Fleet()
    scraper = Scraper(fleet)
    scraper.settings = ScrapeSettings(port=port)
    scraper.checks = checks or scraper.checks
    fleet.apply([DiscoveredBackend(backend)])
    scraper.sync()
    try:
        (pod,) = fleet
        yield pod
    finally:
        await scraper.close()


async def is_read(pod: Pod) -> bool:
    return pod.ready and pod.gauges is not None


async def is_unhealthy(pod: Pod) -> bool:
    return not pod.healthy


async def test_metrics_and_health_checks_are_read_by_http2(tmp_path: Path) -> None:
    backend = Backend("a")
    async with serving(backend), speaking_http2(tmp_path, backend.port) as port:
        url = f"http://127.0.0.1:{port}"
        async with scraped(BackendConfig("a", url)) as pod:
            await until(lambda: is_unhealthy(pod))
        checks = HealthChecks(path="/health")
        async with scraped(BackendConfig("a", url, http2=True), checks) as pod:
            await until(lambda: is_read(pod))
            assert backend.received[0].path == "/health"
            backend.is_down = True
            await until(lambda: is_unhealthy(pod))
            backend.is_down = False
            await until(lambda: is_read(pod))


async def test_a_port_that_is_for_metrics_only_is_read_by_http1(tmp_path: Path) -> None:
    backend = Backend("a")
    async with serving(backend), speaking_http2(tmp_path, backend.port) as port:
        config = BackendConfig("a", f"http://127.0.0.1:{port}", http2=True)
        async with scraped(config, port=backend.port) as pod:
            await until(lambda: is_read(pod))


def test_only_the_port_of_requests_speaks_http2() -> None:
    backend = BackendConfig("a", "http://10.0.0.1:80", http2=True)
    assert speaks_http2(backend, "http://10.0.0.1:80/metrics")
    assert not speaks_http2(backend, "http://10.0.0.1:8000/metrics")
    assert not speaks_http2(BackendConfig("a", backend.url), "http://10.0.0.1:80/metrics")


async def test_a_backend_that_restarts_is_read_again(tmp_path: Path) -> None:
    backend, client = Backend("a"), Http2Client()
    async with serving(backend):
        async with speaking_http2(tmp_path, backend.port) as port:
            url = f"http://127.0.0.1:{port}/metrics"
            assert await client.get(url, 5) == backend.page().encode()
        with pytest.raises(ConnectionError):
            await client.get(url, 5)
        async with speaking_http2(tmp_path, backend.port, port):
            assert await client.get(url, 5) == backend.page().encode()
    await client.close()


async def test_what_a_backend_answers_is_bounded_in_time_and_size(tmp_path: Path) -> None:
    release, app = asyncio.Event(), web.Application()

    async def serve(request: web.Request) -> web.StreamResponse:
        if request.path == "/error":
            return web.Response(status=503)
        response = web.StreamResponse()
        await response.prepare(request)
        if request.path == "/hangs":
            await release.wait()
        else:
            for _ in range(17):
                await response.write(bytes(1 << 20))
        return response

    app.router.add_get("/{path}", serve)
    client = Http2Client()
    async with serving_app(app) as server:
        _, _, number = server.rpartition(":")
        async with speaking_http2(tmp_path, int(number)) as port:
            url = f"http://127.0.0.1:{port}"
            with pytest.raises(ConnectionError, match="503"):
                await client.get(f"{url}/error", 5)
            with pytest.raises(TimeoutError):
                await client.get(f"{url}/hangs", 0.2)
            with pytest.raises(ConnectionError, match="more than 16777216 bytes"):
                await client.get(f"{url}/large", 20)
            with pytest.raises(ConnectionError, match="503"):
                await client.get(f"{url}/error", 5)
            release.set()
    await client.close()
