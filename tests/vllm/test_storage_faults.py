"""Faults of the store under real vLLM: the same tokens, and each fault counted by its name.

One engine on versitygw behind toxiproxy, for all tests of this file; each has a prompt of its own.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from tandem_kvstore.errors import Reason

from ..chaos.toxiproxy import toxiproxy
from ..kvstore.servers import ACCESS_KEY, NAMESPACE, SECRET_KEY, versitygw
from . import faults
from .faults import FaultyStorage, StoredPrompt, behind_proxy
from .single import single_vllm
from .storage import packages, transfer_config

NOT_LOADED = "tandem_vllm_storage_not_loaded_chunks_total"

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the engine's credentials."""
    directory = tmp_path_factory.mktemp("keys")
    (directory / "access_key").write_text(ACCESS_KEY)
    (directory / "secret_key").write_text(SECRET_KEY)
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def storage(
    tmp_path_factory: pytest.TempPathFactory,
    large_model: Path,
    keys: Path,
    versitygw_program: None,
    toxiproxy_program: None,
) -> AsyncIterator[FaultyStorage]:
    """A started engine."""
    directory = tmp_path_factory.mktemp("faults")
    objects = directory / "objects"
    objects.mkdir()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(versitygw(objects))
        proxies = await stack.enter_async_context(toxiproxy())
        endpoint = await behind_proxy(proxies, server)
        config = transfer_config(endpoint, kv_namespace=NAMESPACE, credentials_dir=str(keys))
        env = {"PYTHONPATH": packages(directory), "VLLM_SERVER_DEV_MODE": "1"}
        engine = stack.enter_context(
            single_vllm(large_model, directory, "--kv-transfer-config", config, env=env)
        )
        timeout = aiohttp.ClientTimeout(total=120)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        await engine.ready()
        yield FaultyStorage(engine, http, proxies, server.directory)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (faults.lose_manifest, Reason.MISSING),
        (faults.write_older_format, Reason.FORMAT),
        (faults.write_other_layout, Reason.FOREIGN),
        (faults.damage_data, Reason.CORRUPT),
        (faults.truncate_data, Reason.TRUNCATED),
        (faults.lose_data, Reason.MISSING),
    ],
)
async def test_an_object_that_cannot_be_used_is_replaced(
    storage: FaultyStorage, fault: Callable[[StoredPrompt], None], reason: Reason
) -> None:
    prompt = await storage.stored_prompt()
    fault(prompt)
    await storage.ask_until_not_loaded(prompt, reason)
    await storage.ask_until_loaded(prompt)


async def test_a_connection_that_breaks_in_the_middle_of_a_load(storage: FaultyStorage) -> None:
    prompt = await storage.stored_prompt()
    # Of each connection: manifests pass, so that look-ups find the chunks, and data do not.
    async with storage.toxic("limit_data", bytes=100_000):
        await storage.ask_until_a_load_fails(prompt)
    assert await storage.value(NOT_LOADED, reason=Reason.UNAVAILABLE) > 0
    await storage.ask_until_loaded(prompt)


async def test_a_store_that_is_down_and_comes_back(storage: FaultyStorage) -> None:
    prompt = await storage.stored_prompt()
    async with storage.down():
        await storage.ask_until_not_loaded(prompt, Reason.UNAVAILABLE)
        await storage.ask_until_not_loaded(prompt, Reason.BREAKER_OPEN)
    await storage.ask_until_loaded(prompt)


async def test_keys_that_are_refused_and_replaced(storage: FaultyStorage, keys: Path) -> None:
    prompt = await storage.stored_prompt()
    (keys / "secret_key").write_text("a-wrong-secret")
    try:
        await storage.ask_until_not_loaded(prompt, Reason.DENIED)
    finally:
        (keys / "secret_key").write_text(SECRET_KEY)
    await storage.ask_until_loaded(prompt)
    log = storage.engine.log.read_text()
    assert "a-wrong-secret" not in log
    assert SECRET_KEY not in log


# Last: the cost model remembers for a while that the store was slow.
@pytest.mark.parametrize("milliseconds", [3_000, 60_000], ids=["slow", "stalled"])
async def test_a_store_that_does_not_answer_in_time(
    storage: FaultyStorage, milliseconds: int
) -> None:
    prompt = await storage.stored_prompt()
    async with storage.toxic("latency", latency=milliseconds):
        # A store that was too slow a moment ago is not asked at once.
        await storage.ask_until_not_loaded(prompt, Reason.TIMEOUT)
        await storage.ask_until_not_loaded(
            prompt, Reason.TIMEOUT, Reason.UNPROFITABLE, Reason.BREAKER_OPEN
        )
    await storage.ask(prompt)
