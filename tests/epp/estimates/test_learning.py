"""What the EPP learns of the reference engine, with its header and without it.

Once of an engine whose durations are declared, so that the whole error is the EPP's, and once of
durations as they really are.
"""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from ...sidecar.real.engine import SERVED, Engine, engines
from .declared_engine import COST, DEVIATION, declare_times
from .learning import ENGINE, LIMIT, Requests, learn

pytestmark = [
    pytest.mark.component,
    pytest.mark.asyncio(loop_scope="module"),
    # Three attempts beside other tests.
    pytest.mark.timeout(300),
]


CASES = [
    pytest.param(Requests(SERVED), id="the engine's report"),
    pytest.param(
        Requests(SERVED, is_stream=True, has_timing=False), id="streams without the header"
    ),
]


@contextlib.asynccontextmanager
async def running_engine(
    directory: Path, prepare: Callable[[], None] | None = None
) -> AsyncIterator[Engine]:
    kind = {"flags": ("--dtype", "float32"), "prepare": prepare}
    [engine] = engines(directory, engine=kind)
    try:
        await engine.up()
        yield engine
    finally:
        with contextlib.suppress(ProcessLookupError):
            engine.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def declared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    async with running_engine(tmp_path_factory.mktemp("declared"), declare_times) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    async with running_engine(tmp_path_factory.mktemp("real")) as engine:
        yield engine


def backend(engine: Engine) -> dict[str, object]:
    return {"name": ENGINE, "url": engine.url, "role": "unified", "models": [SERVED]}


@pytest.mark.parametrize("requests", CASES)
async def test_the_estimate_is_what_the_engine_declares(
    declared: Engine, tmp_path: Path, requests: Requests
) -> None:
    learned = await learn(tmp_path, declared.url, [backend(declared)], requests)
    learned.check()
    # The metric is the truth: it has what was declared, but for what comes before the first step.
    for length, seconds in learned.requests:
        assert seconds == pytest.approx(COST.seconds(length), rel=DEVIATION + 1e-6)
    # Without noise, but a scrape measures all requests since the last one together. Of one request
    # at a time the EPP learns these durations to 3 %, and where scrapes are late to 13 % at worst.
    assert learned.error({length: COST.seconds(length) for length, _ in learned.requests}) <= LIMIT


@pytest.mark.parametrize("requests", CASES)
async def test_the_estimate_is_the_engines_own_prefill_time(
    real: Engine, tmp_path: Path, requests: Requests
) -> None:
    learned = await learn(tmp_path, real.url, [backend(real)], requests)
    assert learned.reports == (len(learned.requests) if requests.has_timing else 0)
    learned.check()
