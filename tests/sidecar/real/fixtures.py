"""Engines that the tests of a folder share; those that a test requests are running."""

import contextlib
from collections.abc import Iterator

import pytest

from .engine import Engine, engines


@pytest.fixture(scope="package")
def shared_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """One decode, two prefill and two unified engines, not started; the second prefill has a short
    KV lease."""
    shared = engines(
        tmp_path_factory.mktemp("engines"),
        decode={"role": "kv_consumer"},
        prefill={},
        second={"lease": 2.0},
        unified={"role": "kv_both"},
        second_unified={"role": "kv_both"},
    )
    try:
        yield shared
    finally:
        for engine in shared:
            with contextlib.suppress(ProcessLookupError):
                engine.kill()


async def _running(engine: Engine, session: pytest.Session) -> Engine:
    """The engine, serving; after a failed test a new process."""
    engine.kill_after_failure(session.testsfailed)
    await engine.up()
    return engine


@pytest.fixture
async def decode(shared_engines: list[Engine], request: pytest.FixtureRequest) -> Engine:
    return await _running(shared_engines[0], request.session)


@pytest.fixture
async def prefill(shared_engines: list[Engine], request: pytest.FixtureRequest) -> Engine:
    return await _running(shared_engines[1], request.session)


@pytest.fixture
async def second_prefill(shared_engines: list[Engine], request: pytest.FixtureRequest) -> Engine:
    return await _running(shared_engines[2], request.session)


@pytest.fixture
async def unified(shared_engines: list[Engine], request: pytest.FixtureRequest) -> Engine:
    return await _running(shared_engines[3], request.session)


@pytest.fixture
async def second_unified(shared_engines: list[Engine], request: pytest.FixtureRequest) -> Engine:
    return await _running(shared_engines[4], request.session)
