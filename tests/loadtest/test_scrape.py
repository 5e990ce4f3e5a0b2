"""Counters from real metrics pages over real sockets."""

import socket

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from tandem_contract import metrics
from tandem_loadtest.scrape import Counters, ScrapeError, read_page, scrape

from .servers import serving


def engine_page(transfers: list[tuple[float, float]], failed: int = 0, expired: int = 0) -> str:
    """What an engine exports after transfers of (seconds, bytes)."""
    registry = CollectorRegistry()
    seconds = Histogram(metrics.ENGINE_XFER_SECONDS, "h", ["model_name"], registry=registry)
    moved = Histogram(metrics.ENGINE_XFER_BYTES, "h", ["model_name"], registry=registry)
    for took, size in transfers:
        seconds.labels("tiny").observe(took)
        moved.labels("tiny").observe(size)
    Counter(metrics.ENGINE_XFER_FAILED, "h", registry=registry).inc(failed)
    Counter(metrics.ENGINE_KV_EXPIRED, "h", registry=registry).inc(expired)
    return generate_latest(registry).decode()


def sidecar_page(paths: dict[str, int], errors: dict[str, int], fallbacks: int = 0) -> str:
    registry = CollectorRegistry()
    requests = Counter(metrics.REQUESTS, "h", [metrics.ROUTING_PATH_LABEL], registry=registry)
    failures = Counter(metrics.ERRORS, "h", [metrics.PHASE_LABEL], registry=registry)
    for path, count in paths.items():
        requests.labels(path).inc(count)
    for phase, count in errors.items():
        failures.labels(phase).inc(count)
    Counter(metrics.FALLBACKS, "h", registry=registry).inc(fallbacks)
    return generate_latest(registry).decode()


def test_an_engines_page_is_read() -> None:
    page = engine_page([(0.5, 1000), (0.25, 24)], failed=3, expired=2)
    assert read_page(page) == Counters(
        kv_bytes=1024, transfers=2, transfer_seconds=0.75, transfers_failed=3, kv_expired=2
    )


def test_a_sidecars_page_is_read() -> None:
    page = sidecar_page({"unified": 2, "fast_decode": 1}, {"prefill": 4}, fallbacks=5)
    assert read_page(page) == Counters(
        fallbacks=5, paths={"unified": 2, "fast_decode": 1}, errors={"prefill": 4}
    )


def test_an_empty_page_counts_nothing() -> None:
    assert read_page("") == Counters()


def test_counters_add_and_subtract() -> None:
    after = read_page(engine_page([(0.5, 10), (0.5, 10)])) + read_page(sidecar_page({"a": 3}, {}))
    before = read_page(engine_page([(0.5, 10)])) + read_page(sidecar_page({"b": 1}, {}))
    assert after - before == Counters(
        kv_bytes=10, transfers=1, transfer_seconds=0.5, paths={"a": 3, "b": -1}
    )


async def test_pages_are_summed() -> None:
    async def handler(request: web.Request) -> web.Response:
        engine, sidecar = engine_page([(1, 100)]), sidecar_page({"unified": 1}, {})
        return web.Response(text=engine if request.path == "/engine" else sidecar)

    async with serving(handler) as url, aiohttp.ClientSession() as session:
        total = await scrape(session, [f"{url}/engine", f"{url}/engine", f"{url}/sidecar"])
    assert total == Counters(kv_bytes=200, transfers=2, transfer_seconds=2, paths={"unified": 1})


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [("", 503, "HTTP 503"), ("{not a page", 200, "not a metrics page"), (b"\xff", 200, "Unicode")],
)
async def test_a_page_that_cannot_be_read_names_its_url(
    body: str | bytes, status: int, message: str
) -> None:
    async def handler(_: web.Request) -> web.Response:
        data = body.encode() if isinstance(body, str) else body
        return web.Response(status=status, body=data, content_type="text/plain", charset="utf-8")

    async with serving(handler) as url, aiohttp.ClientSession() as session:
        with pytest.raises(ScrapeError, match=f"^{url}/metrics: .*{message}"):
            await scrape(session, [f"{url}/metrics"])


async def test_an_unreachable_page_is_an_error_with_its_url() -> None:
    with socket.socket() as bound_socket:
        bound_socket.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound_socket.getsockname()[1]}/metrics"
        async with aiohttp.ClientSession() as session:
            with pytest.raises(ScrapeError, match=url):
                await scrape(session, [url])
