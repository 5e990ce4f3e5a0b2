"""Engines that the tests of a folder share; those that a test requests are running."""

import contextlib
from collections.abc import Iterator

import pytest

from .engine import Engine, engines


@pytest.fixture(scope="package")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """One decode and two prefill engines, not started; the second prefill has a short KV lease."""
    made = engines(
        tmp_path_factory.mktemp("engines"),
        decode={"role": "kv_consumer"},
        prefill={},
        second={"lease": 2.0},
    )
    try:
        yield made
    finally:
        for engine in made:
            with contextlib.suppress(ProcessLookupError):
                engine.kill()


@pytest.fixture
async def decode(started: list[Engine]) -> Engine:
    await started[0].up()
    return started[0]


@pytest.fixture
async def prefill(started: list[Engine]) -> Engine:
    await started[1].up()
    return started[1]


@pytest.fixture
async def second(started: list[Engine]) -> Engine:
    await started[2].up()
    return started[2]
