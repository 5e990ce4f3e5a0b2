"""A warm pair of real vLLM engines for all tests; what one killed is back for the next."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from tandem_engine.tiny import make_tiny_model

from .engines import VENV
from .pairs import Pair, running_pair


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that both our engine and vLLM load."""
    if not VENV.is_dir():
        pytest.fail("real vLLM is not installed here: make vllm-setup")
    directory = tmp_path_factory.mktemp("model")
    make_tiny_model(directory, layers=2)
    return directory


@pytest.fixture(scope="session")
def nixl(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with running_pair(model, tmp_path_factory.mktemp("nixl")) as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=120)
    # A cut answer ends its connection, which a pool might hand out again first.
    one_each = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=one_each) as session:
        yield session


@pytest.fixture
async def pair(nixl: Pair, http: aiohttp.ClientSession) -> Pair:
    """NIXL pull between two engines that have shaken hands, with a sidecar."""
    await nixl.restore(http)
    return nixl
