"""A metrics page that is made while the event loop serves others."""

import asyncio

from prometheus_client import CollectorRegistry, generate_latest

from tandem_contract.fast_metrics import CounterVec, HistogramVec
from tandem_contract.metrics_text import metrics_text


async def test_the_page_is_that_of_the_registry_and_the_loop_runs_meanwhile() -> None:
    registry = CollectorRegistry()
    for family in range(20):
        CounterVec(f"x{family}_total", "Help.", ["name"], registry=registry).child("a").inc()
    seconds = HistogramVec("seconds", "Help.", range(50), ["name"], registry=registry)
    for number in range(500):
        seconds.child(str(number)).observe(number)
    page = asyncio.create_task(metrics_text(registry))
    turns = 0
    while not page.done():
        await asyncio.sleep(0)
        turns += 1
    assert page.result() == generate_latest(registry)
    # One for each family, and many while the text is written.
    assert turns > 100
