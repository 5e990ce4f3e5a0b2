"""What the operator learns of an external store from the engines that use it."""

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tandem_contract.paths import Role
from tandem_local.ports import free_port
from tandem_operator.observed import PodName, PodState, PoolKey, StorageReport
from tandem_operator.runtime.cache import ClusterCache
from tandem_operator.runtime.storage_probe import pools_with_storage, report_of, storage_state

from ..kvstore.servers import tandem_store
from ..sidecar.real.engine import SERVED, Engine, engines
from .pool_yaml import DECODE, prefill_pool

CHUNK = 32
HEAD = b'tandem_vllm_storage_breaker_state{engine="0"}'
NEW = b'tandem_vllm_storage_failure{engine="0",message="the store refused the credentials"} 1.0\n'
OLD = b'tandem_vllm_storage_failure{engine="0",message="no answer in time"} 0.0\n'


@pytest.mark.parametrize(
    ("page", "state"),
    [
        (b"vllm:num_requests_running 1.0\n", None),
        (b"nothing that Prometheus\x00 could read", None),
        (HEAD + b" 0.0\n", (False, "")),
        (HEAD + b" 2.0\n" + OLD + NEW, (True, "the store refused the credentials")),
        (HEAD + b" 1.0\n" + NEW, (True, "the store refused the credentials")),
        # A rank whose store fails is not hidden by the others.
        (b'tandem_vllm_storage_breaker_state{engine="1"} 2.0\n' + HEAD + b" 0.0\n", (True, "")),
        (b"tandem_engine_kv_storage_breaker_state 2.0\n"
         b'tandem_engine_kv_storage_failure{message="the store answered 503"} 1.0\n',
         (True, "the store answered 503")),
    ],
)  # fmt: skip
def test_the_breaker_and_the_newest_failure_are_read(
    page: bytes, state: tuple[bool, str] | None
) -> None:
    assert storage_state(page) == state


@pytest.mark.parametrize(
    "line",
    [
        b'tandem_engine_kv_storage_failure{ ="x"} 1',
        b"tandem_engine_kv_storage_failure 1 " + b"9" * 400,
        b'tandem_engine_kv_storage_failure{message="' + b"x" * 5000 + b'"} 1',
        b"other{ ='x'} 1",
    ],
)
def test_a_strange_page_of_one_engine_ends_nothing(line: bytes) -> None:
    page = HEAD + b" 2.0\n" + line + b"\n"
    assert storage_state(page) in {None, (True, "")}


def test_only_pools_whose_set_has_a_store_are_asked() -> None:
    cache = ClusterCache(nodes=False)
    stored = prefill_pool(transfer={"storage": {"endpoint": "http://store"}})
    for number, body in enumerate((stored, DECODE)):
        metadata = {**body["metadata"], "namespace": "default", "uid": str(number)}
        cache.upsert_pool({**body, "metadata": {**metadata, "resourceVersion": "1"}})
    # The DecodePool inherits the store.
    keys = {PoolKey("default", "PrefillPool", "p"), PoolKey("default", "DecodePool", "d")}
    assert set(pools_with_storage(cache)) == keys
    plain = {**stored, "spec": {**stored["spec"], "transfer": {}}}
    metadata = {**plain["metadata"], "namespace": "default", "uid": "0", "resourceVersion": "2"}
    cache.upsert_pool({**plain, "metadata": metadata})
    assert set(pools_with_storage(cache)) == set()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.mark.component
@pytest.mark.timeout(300)
async def test_an_engine_says_that_its_store_went_and_came_back(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    port = free_port("127.0.0.1")
    config = {"endpoint": f"http://127.0.0.1:{port}", "chunk_tokens": CHUNK}
    flags = ("--kv-storage-config", json.dumps(config))
    [engine] = engines(tmp_path, engine={"side_channel": False, "flags": flags})
    slots, prompts = asyncio.Semaphore(1), itertools.count()

    async def report() -> StorageReport | None:
        return await report_of(http, slots, [pod_of(engine)])

    async def used() -> StorageReport | None:
        """The report after one more prompt, of a chunk that no engine has stored."""
        tokens = random.Random(next(prompts)).choices(range(4, 60), k=CHUNK + 1)
        body = {"model": SERVED, "prompt": tokens, "max_tokens": 1}
        async with http.post(f"{engine.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
        return await report()

    try:
        assert await report() is None
        await engine.up()
        assert await report() == StorageReport(0)
        async with tandem_store(tmp_path / "store", port=port):
            while await used() != StorageReport(1):
                pass
        while (failing := await used()) == StorageReport(1):
            pass
        assert failing is not None
        assert (failing.engines, failing.failing) == (1, (PodName("pod"),))
        assert failing.message
        async with tandem_store(tmp_path / "store", port=port):
            while await used() != StorageReport(1):
                pass
    finally:
        engine.kill()


def pod_of(engine: Engine) -> PodState:
    """The ready pod of a PrefillPool that this engine would be."""
    return PodState(
        PodName("pod"), "uid", "p", Role.PREFILL.value, "r", "c", None, "Running",
        ready=True, scheduled=True, node="n", deleting=False, draining=False, created=0.0,
        address=engine.host, labels={},
    )  # fmt: skip
