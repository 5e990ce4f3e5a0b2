"""A warm pair of real vLLM engines for all tests; engines that a test killed are started again."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from tandem_engine.tiny import make_tiny_model

from .engines import VENV
from .pairs import Pair, running_pair


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that the reference engine and vLLM can load."""
    if not VENV.is_dir():
        pytest.fail("vLLM is not installed in .venv-vllm: run make vllm-setup")
    directory = tmp_path_factory.mktemp("model")
    make_tiny_model(directory, layers=2, max_position=32768)
    return directory


@pytest.fixture(scope="session")
def large_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that computes so slowly that loading its KV pays, with chunks of 2 MiB, whose data
    are objects of their own."""
    directory = tmp_path_factory.mktemp("large-model")
    make_tiny_model(directory, layers=4, hidden=512, heads=8, kv_heads=4)
    return directory


@pytest.fixture(scope="session")
def nixl(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with running_pair(model, tmp_path_factory.mktemp("nixl")) as running:
        yield running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of the warm pair come first, so that its two engines end early."""
    items.sort(key=lambda item: not _uses_warm_pair(item))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the pair after the last of its tests."""
    if _uses_warm_pair(item) and not _uses_warm_pair(nextitem):
        running = getattr(item, "funcargs", {}).get(nixl.__name__)
        if running is not None:
            running.end()


def _uses_warm_pair(item: pytest.Item | None) -> bool:
    return nixl.__name__ in getattr(item, "fixturenames", ())


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=120)
    # One connection per request: after a cut response the pool could reuse a dying connection.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        yield session


@pytest.fixture
async def pair(nixl: Pair, http: aiohttp.ClientSession, request: pytest.FixtureRequest) -> Pair:
    """Two engines after their NIXL handshake, with NIXL pull and a sidecar."""
    await nixl.restore(http, request.session.testsfailed)
    return nixl
