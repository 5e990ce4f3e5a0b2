"""TandemStorageConnector behind NIXL in MultiConnector, on real vLLM: tokens never change."""

import asyncio
import json
import tempfile
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tandem_contract import endpoints, headers, vllm_storage
from tandem_contract.paths import RoutingPath
from tandem_epp.prefix.kv_events.collector import EventCollector, PodEngine
from tandem_epp.prefix.kv_events.subscriber import EngineAddress
from tandem_epp.prefix.pod_blocks import PodBlocks

from ..kvstore.gate import Refuse, gate
from ..kvstore.servers import store_in_this_process
from .api_requests import KINDS, ask
from .engines import Vllm, make_pair, metric
from .pairs import Moved, Pair, until
from .pairs import page as metrics_page
from .storage import CHUNK, mount_packages

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LOADED = "tandem_vllm_storage_loaded_tokens_total"
STORED = "tandem_vllm_storage_stored_tokens_total"
NOT_LOADED = "tandem_vllm_storage_not_loaded_chunks_total"


async def test_storage_beside_a_hand_off(
    model: Path, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """NIXL comes first; the prefill engine saves, and nothing depends on the store."""
    kind = KINDS["completions"]
    body = kind.body("All the same. " * 80, cache_salt="a conversation")
    async with AsyncExitStack() as stack, AsyncExitStack() as store:
        server = await store.enter_async_context(store_in_this_process(tmp_path / "store"))
        asked: list[str] = []
        between = await store.enter_async_context(gate(server.location, note_in(asked)))
        engines = make_pair(model, tmp_path, storage={"endpoint": between.location.endpoint})
        for engine in engines:
            mount_packages(engine, tmp_path)
        # A short path: that of a Unix socket has at most 107 bytes.
        sockets = stack.enter_context(tempfile.TemporaryDirectory())
        address = publish_events(engines[0], Path(sockets))
        collector = EventCollector(PodBlocks(), PodBlocks())
        stack.push_async_callback(collector.close)
        collector.sync([PodEngine("prefill", 1, address, "store")])
        pair = Pair(*engines, tmp_path)
        stack.callback(pair.end)
        await asyncio.to_thread(pair.start)
        await pair.shake_hands(http)

        moved = await Moved(http, pair.decode.url(endpoints.METRICS)).begin()
        answer = await pair.handed_off(http, kind, body)
        assert answer.headers[headers.ROUTING_PATH] == RoutingPath.PREFILL_THEN_DECODE

        async def is_transferred() -> bool:
            return await moved.by("vllm:nixl_bytes_transferred_sum") > 0

        await until(is_transferred, 120)
        assert await moved.by(LOADED) == 0, "the hand-off comes first"
        text = kind.text(answer)
        assert kind.text(await pair.alone(http, kind, body)) == text

        async def is_stored() -> bool:
            page = await metrics_page(http, pair.prefill.url(endpoints.METRICS))
            return metric(page, STORED) >= CHUNK

        async def without_peer() -> str:
            # The prompt is in the decode engine's prefix cache from the request before.
            await reset_caches(http, pair.decode)
            return kind.text(await ask(http, pair.decode.url(kind.path), body))

        await until(is_stored, 120)

        async def is_indexed() -> bool:
            return collector.events["storage_stored"] > 0

        await until(is_indexed, 120)
        assert collector.events["storage_unplaced"] == collector.events["malformed"] == 0
        # It loads the chunk or computes it, as the cost model decides.
        assert await without_peer() == text

        async def ask_new(prompt: str) -> int:
            """Returns the number of prompt tokens in whole chunks."""
            body = kind.body(f"{prompt}. " * CHUNK)
            answer = await ask(http, pair.prefill.url(kind.path), body)
            return int(answer.json["usage"]["prompt_tokens"]) // CHUNK * CHUNK

        stored = await Moved(http, pair.prefill.url(endpoints.METRICS)).begin()
        asked.clear()
        tokens = await ask_new("One")
        # All of them: no save may end after the reset.
        await until(partial(has_moved, stored, STORED, tokens), 120)
        assert {request.partition(" ")[0] for request in asked} >= {"GET", "PUT"}
        # The prefill engine's weights may change now: it neither loads nor saves any more.
        await reset_caches(http, pair.prefill, reset_external="true")
        asked.clear()
        # A save would begin with a step after the one that computed the prompt.
        for prompt in ("Two", "Three", "Four"):
            await ask_new(prompt)
        assert asked == []
        await until(partial(is_reported_off, http, pair.prefill), 120)

        await store.aclose()
        moved = await Moved(http, pair.decode.url(endpoints.METRICS)).begin()
        while not await moved.by(NOT_LOADED):
            assert await without_peer() == text
        assert kind.text(await pair.handed_off(http, kind, body)) == text


def note_in(asked: list[str]) -> Refuse:
    """Append each request to `asked`; the store answers all."""

    def note(request: web.Request) -> None:
        asked.append(f"{request.method} {request.path}")

    return note


async def has_moved(moved: Moved, counter: str, by: float) -> bool:
    return await moved.by(counter) >= by


async def is_reported_off(http: aiohttp.ClientSession, engine: Vllm) -> bool:
    page = await metrics_page(http, engine.url(endpoints.METRICS))
    reasons = [line for line in page.splitlines() if "vLLM has reset its caches" in line]
    return bool(reasons) and metric(page, vllm_storage.BREAKER_STATE) == 2


async def reset_caches(http: aiohttp.ClientSession, engine: Vllm, **query: str) -> None:
    """Have vLLM drop the KV that it has cached."""
    async with http.post(engine.url("/reset_prefix_cache"), params=query) as answer:
        assert answer.status == 200


def publish_events(engine: Vllm, directory: Path) -> EngineAddress:
    """Have an engine that does not run yet publish its KV events, at the address returned."""
    # Not over TCP: to one address of loopback, which a pod here has, vLLM connects instead.
    address = EngineAddress(f"ipc://{directory}/events", f"ipc://{directory}/replay", "kv@")
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": address.events,
        "replay_endpoint": address.replay,
        "topic": "kv@prefill@tiny",
    }
    engine.container_document["args"] += ["--kv-events-config", json.dumps(config)]
    return address
