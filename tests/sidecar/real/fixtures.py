"""Engines that a folder's tests share: each test finds those it asks for serving."""

import contextlib
from collections.abc import Iterator

import pytest

from .engine import Engine, engines


@pytest.fixture(scope="package")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """One to decode, two to prefill, none started; the second soon forgets what is not read."""
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
