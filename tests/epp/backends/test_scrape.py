"""Scraping: metrics pages as engines write them, and backends that start, die and restart."""

from collections.abc import AsyncIterator

import pytest

from tandem_contract import metrics as names
from tandem_contract.config import Backend as BackendConfig
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend, Gauges
from tandem_epp.backends.scrape import Scraper, read_page

from ..real import Backend, serving, until

PAGE = f"""# HELP {names.ENGINE_RUNNING} Number of requests in model execution batches.
# TYPE {names.ENGINE_RUNNING} gauge
{names.ENGINE_RUNNING}{{engine="0",model_name="a }} b"}} 3.0
{names.ENGINE_RUNNING}{{engine="1",model_name="m"}} 4.0
{names.ENGINE_WAITING}_by_reason{{reason="capacity"}} 99.0
{names.ENGINE_WAITING}{{engine="0"}} 2.0 1395066363000
{names.ENGINE_KV_USAGE}{{engine="0"}} 0.5
{names.ENGINE_KV_USAGE}{{engine="1"}} 0.25
{names.ENGINE_CACHE_CONFIG}{{block_size="32",num_gpu_blocks="512"}} 1.0
{names.PROCESS_START_TIME} 1.7e+09"""


def test_a_page_is_read() -> None:
    report = read_page(PAGE.encode())
    assert report.gauges == Gauges(running=7.0, waiting=2.0, kv_usage=0.375)
    assert (report.block_tokens, report.blocks) == (32, 512)
    assert report.incarnation != read_page(PAGE.replace("1.7e", "1.8e").encode()).incarnation
    assert report.incarnation == read_page(PAGE.replace("3.0", "5.0").encode()).incarnation


@pytest.mark.parametrize("page", [b"", b"\xff\xfe", b"# nothing here\n", b"vllm:num_requests"])
def test_a_page_without_the_figures_is_no_error(page: bytes) -> None:
    report = read_page(page)
    assert report.gauges == Gauges()
    assert (report.block_tokens, report.blocks, report.incarnation) == (None, None, b"")


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
        pod.placed_prefixes.add([1, 2])
        backend.started = 2.0
        await until(lambda: holds(1 not in pod.placed_prefixes))
        assert pod.ready
    await until(lambda: holds(not pod.ready))
    assert pods.ready_pods(None) == ()
    async with serving(backend):
        await until(lambda: holds(pod.ready))
        assert pods.ready_pods(None) == (pod,)
    pods.apply([])
    scraper.sync()
    assert scraper.is_complete


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


async def holds(condition: bool) -> bool:
    return condition
