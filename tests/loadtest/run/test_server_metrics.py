from time import monotonic

import pytest

from tandem_loadtest.run.server_metrics import Increases, MetricsWatch

from .engines import FakeOpenAI

PAGE = "# TYPE sent_total counter\nsent_total {sent}\n# TYPE queue gauge\nqueue {queue}\n"


def test_increases_count_from_the_first_read() -> None:
    increases = Increases()
    for value in (100.0, 101.0, 105.0):
        increases.add({"sent": value})
    assert increases.totals == {"sent": 5.0}


def test_a_restart_of_the_server_gives_no_negative_increase() -> None:
    increases = Increases()
    for counters in ({"sent": 100.0}, {"sent": 110.0}, {}, {"sent": 3.0}, {"sent": 4.0}):
        increases.add(counters)
    # 10 before the restart, 4 after it.
    assert increases.totals == {"sent": 14.0}


def test_a_counter_that_appears_later_has_risen_from_0() -> None:
    increases = Increases()
    increases.add({"sent": 1.0})
    increases.add({"sent": 1.0, "failed": 2.0})
    assert increases.totals == {"sent": 0.0, "failed": 2.0}


async def test_a_page_is_read_before_during_and_after_the_run() -> None:
    engine = FakeOpenAI()
    engine.metrics = PAGE.format(sent=7, queue=1)
    async with engine.serve() as url, MetricsWatch([f"{url}/metrics"]) as watch:
        engine.metrics = PAGE.format(sent=9, queue=4)
        watch.start(monotonic() - 0.99)
        # One before the run, one at its start; the third comes when the second has been read.
        await engine.gives_metrics(3)
        engine.metrics = PAGE.format(sent=12, queue=0)
        (metrics,) = await watch.stop()
    assert metrics.url == f"{url}/metrics"
    assert metrics.before_after == {"sent_total": 5.0}
    assert metrics.gauges["queue"][0] == 4.0
    assert metrics.error is None


@pytest.mark.parametrize(
    ("page", "error"), [("<html>{", "not a metrics page"), ("unclosed{", "not a metrics page")]
)
async def test_a_page_that_cannot_be_parsed_is_an_error(page: str, error: str) -> None:
    engine = FakeOpenAI()
    engine.metrics = page
    async with engine.serve() as url, MetricsWatch([f"{url}/metrics"]) as watch:
        (metrics,) = await watch.stop()
    assert metrics.error is not None
    assert metrics.error.startswith(error)
    assert (metrics.before_after, metrics.gauges) == ({}, {})


async def test_a_page_that_is_not_there_is_an_error() -> None:
    async with FakeOpenAI().serve() as url, MetricsWatch([f"{url}/absent"]) as watch:
        (metrics,) = await watch.stop()
    assert metrics.error == "HTTP 404"
    async with MetricsWatch(["http://127.0.0.1:1/metrics"]) as watch:
        (metrics,) = await watch.stop()
    assert metrics.error
    assert "127.0.0.1:1" in metrics.error
