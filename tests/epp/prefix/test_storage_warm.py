"""Two engines with one store, both restarted: the EPP sends the prompt where storage has it."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from tandem_contract import ports
from tandem_contract.paths import RoutingPath
from tandem_contract.trace import STORAGE_WARM, DecisionTrace, trace_path
from tandem_engine.tiny import make_tiny_model
from tandem_local.addresses import allocate

from ..backends.test_precise import engine
from ..real import Epp, envoy, envoy_settings, epp, until

# Four starts of an engine, each of which imports torch.
pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]
ROLES = {"p": "prefill", "d": "decode"}
BLOCK, STORED = 16, 1792
"""Tokens of the engines' blocks; tokens in the seven full chunks of the prompt."""
# The rest is too short for a split, however long computing it is predicted to take.
PROMPT = {"model": "tiny", "prompt": [4 + i % 500 for i in range(1800)], "max_tokens": 4}


def _config(store: str, addresses: dict[str, str], model: Path) -> str:
    return json.dumps(
        {
            "disaggregated_serving": {
                "enabled": True,
                "default_external_storage": {"endpoint": store},
            },
            "kv_cache_index": {"storage_offloading": {"enabled": True}},
            "backends": [
                {"name": name, "url": f"http://{addresses[name]}:{ports.ENGINE_PREFILL}", "role": r}
                for name, r in ROLES.items()
            ],
            # The size of its KV is known before anything is transferred or loaded.
            "plugins": [
                {
                    "type": "predicted-cost",
                    "parameters": {"modelConfigs": {"tiny": f"{model}/config.json"}},
                }
            ],
        }
    )


async def _ask(gateway: str, request_id: str) -> str:
    async with (
        aiohttp.ClientSession(headers={"x-request-id": request_id}) as session,
        session.post(gateway + "/v1/completions", json={**PROMPT, "temperature": 0}) as response,
    ):
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        text: str = answer["choices"][0]["text"]
        return text


async def _knows(picker: Epp, **figures: float) -> None:
    """Return once the EPP has these `tandem_epp_kv_*` figures of both engines."""

    async def knows() -> bool:
        page = await picker.figures()
        return all(
            page.get(f'tandem_epp_kv_{name}{{backend="{pod}"}}', 0.0) == value
            for name, value in figures.items()
            for pod in ROLES
        )

    await until(knows, within=120)


async def test_a_prompt_of_engines_that_restarted_goes_by_storage(tmp_path: Path) -> None:
    needed = [ports.ENGINE_PREFILL, ports.KV_EVENTS, ports.KV_EVENTS_REPLAY]
    addresses = allocate(dict.fromkeys(ROLES, needed), str(tmp_path))
    store = (tmp_path / "store").as_uri()
    (tmp_path / "store").mkdir()
    # It computes the prompt for so long that loading is cheaper on any machine.
    model = tmp_path / "model"
    make_tiny_model(model, layers=4, hidden=512, heads=8, kv_heads=4)
    flags = ("--kv-storage-config", json.dumps({"endpoint": store}))
    config = tmp_path / "router.yaml"
    config.write_text(_config(store, addresses, model))

    async def start(stack: AsyncExitStack) -> None:
        engines = (engine(at, *flags, model=model) for at in addresses.values())
        await asyncio.gather(*map(stack.enter_async_context, engines))

    async with AsyncExitStack() as stack:
        picker = await stack.enter_async_context(epp(config))
        address = f"{addresses['d']}:{ports.ENGINE_PREFILL}"
        settings = envoy_settings(picker.grpc, [address], "FULL_DUPLEX_STREAMED")
        gateway = await stack.enter_async_context(envoy(tmp_path, settings))
        async with AsyncExitStack() as engines:
            await start(engines)
            await until(lambda: picker.serves(*ROLES), within=60)
            await _knows(picker, events_knowledge=2)
            first = await _ask(gateway, "first")
            await until(lambda: _is_stored(picker), within=60)
        await _knows(picker, events_knowledge=0)
        async with AsyncExitStack() as engines:
            await start(engines)
            await until(lambda: picker.serves(*ROLES), within=60)
            await _knows(picker, events_knowledge=2, blocks=0)
            assert await _ask(gateway, "second") == first
            decision = await _decision(picker, "second")
            figures = await picker.figures()
    # The first prompt was in no store, the second one was.
    for result, count in {"missing": 1, "found": 1, "unknown": 0}.items():
        assert figures[f'tandem_epp_kv_storage_lookups_total{{result="{result}"}}'] == count
    assert (decision.path, decision.reason) == (RoutingPath.FAST_DECODE, "stored")
    assert (decision.tier, decision.loaded_tokens) == (STORAGE_WARM, STORED)


async def _is_stored(picker: Epp) -> bool:
    """Whether all full chunks of the prompt are known to be in storage. Of a split request both
    engines write them and publish events, so a number of events says nothing."""
    return (await picker.figures()).get("tandem_epp_kv_storage_blocks", 0.0) == STORED // BLOCK


async def _decision(picker: Epp, request_id: str) -> DecisionTrace:
    url = f"http://127.0.0.1:{picker.metrics}{trace_path(request_id)}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        [decision] = msgspec.json.decode(await response.read(), type=list[DecisionTrace])
    return decision
