"""What the EPP learns of the reference engine, with its header and without it."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from ..sidecar.real.engine import SERVED, Engine, engines
from .learning import ENGINE, Requests, learn

pytestmark = [pytest.mark.component, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    [running] = engines(tmp_path_factory.mktemp("engine"), engine={"flags": ("--dtype", "float32")})
    try:
        await running.up()
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.kill()


@pytest.mark.parametrize(
    ("is_stream", "has_timing"),
    [
        pytest.param(False, True, id="the engine's report"),
        pytest.param(True, False, id="streams without the header"),
    ],
)
async def test_the_estimate_is_the_engines_own_prefill_time(
    engine: Engine, tmp_path: Path, is_stream: bool, has_timing: bool
) -> None:
    backend = {"name": ENGINE, "url": engine.url, "role": "unified", "models": [SERVED]}
    requests = Requests(SERVED, is_stream=is_stream, has_timing=has_timing)
    learned = await learn(tmp_path, engine.url, [backend], requests)
    learned.check()
