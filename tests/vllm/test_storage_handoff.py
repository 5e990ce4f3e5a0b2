"""KV that moves through the store between a producer and a consumer, both real vLLM.

Both engines start again when the first prompts are stored. What they load then, the hand-off, its
references and the EPP's tier StorageWarm are shown on the same two engines.
"""

import itertools
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from tandem_contract import endpoints, headers, metrics
from tandem_contract import vllm_storage as names
from tandem_contract.kv_reference import KvReference, LoadLeg, read_reference
from tandem_contract.paths import RoutingPath
from tandem_contract.trace import STORAGE_WARM, DecisionTrace, trace_path
from tandem_contract.transfer_params import FIELD
from tandem_local.ports import free_port

from ..epp.real import Epp, envoy, envoy_settings, epp, until
from ..kvstore.servers import NAMESPACE, Server, store_in_this_process
from ..sidecar.processes import Sidecar, sidecar
from .engines import MODEL_NAME, REASONING, metric
from .single import SingleVllm, single_vllm
from .storage import CHUNK, data_objects, packages, transfer_config

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
]
LOADED = f"{names.LOADED_TOKENS}_total"
STORED = f"{names.STORED_TOKENS}_total"
NOT_LOADED = f"{names.NOT_LOADED_CHUNKS}_total"
FAILED = f"{names.FAILED_TRANSFERS}_total"
TRANSFERS = f"{names.TRANSFER_SECONDS}_count"
# Time limits that a busy machine does not reach: these tests are about what is stored.
LIMIT = 120.0
# One ends in a chunk, one with a chunk, and one has none.
FIRST = ((1, 1500), (2, 3 * CHUNK), (3, 100))
IN_CHUNKS = 5 * CHUNK + 3 * CHUNK
HANDED_OFF = (4, 4 * CHUNK + 7)


@dataclass
class Split:
    """The engines, the store between them, and what they answered before they started again."""

    prefill: SingleVllm
    decode: SingleVllm
    http: aiohttp.ClientSession
    store: Server
    stack: AsyncExitStack
    """Ends the store."""
    events: tuple[int, int]
    """Ports of the producer's KV events, and of their replay."""
    answers: list[list[int]]
    """To FIRST, by a producer, and to HANDED_OFF, by both."""
    producer_loaded: float
    """Tokens that a producer loaded of a prompt that it had stored."""
    model: Path

    async def figure(self, name: str, **labels: str) -> float:
        """A metric of the consumer."""
        return metric(await self.decode.metrics(self.http), name, **labels)

    async def forget(self, engine: SingleVllm) -> None:
        """Empty an engine's own prefix cache."""
        async with self.http.post(f"{engine.url}/reset_prefix_cache") as answer:
            assert answer.status == 200, await answer.text()

    async def complete(self, url: str, tokens: Sequence[int], **members: Any) -> dict[str, Any]:
        """The answer to a prompt."""
        body = request(tokens) | members
        async with self.http.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return dict(await answer.json())

    async def tokens(self, engine: SingleVllm, tokens: Sequence[int], **members: Any) -> list[int]:
        """The ids of the tokens that an engine answers."""
        return ids(await self.complete(engine.url, tokens, **members))

    async def handed_off(self, process: Sidecar, tokens: Sequence[int]) -> list[int]:
        """The ids of the tokens that both engines answer behind a sidecar."""
        chosen = {headers.PREFILLER_HOST_PORT: str(self.prefill.address)}
        url = process.url("/v1/completions")
        async with self.http.post(url, json=request(tokens), headers=chosen) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.headers[headers.ROUTING_PATH] == RoutingPath.PREFILL_THEN_DECODE
            return ids(await answer.json())

    async def prefilled(self, tokens: Sequence[int]) -> KvReference:
        """What the producer names after a prefill leg."""
        answer = await self.complete(self.prefill.url, tokens, max_tokens=1, **store_leg())
        return read_reference(answer[FIELD]["tandem_kv_reference"])


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(4, 190), k=length)


def request(tokens: Sequence[int]) -> dict[str, Any]:
    return {
        "model": MODEL_NAME, "prompt": list(tokens), "max_tokens": 8, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip


def ids(answer: Mapping[str, Any]) -> list[int]:
    [choice] = answer["choices"]
    return list(choice["token_ids"])


def store_leg(timeout: float = LIMIT) -> dict[str, Any]:
    return {FIELD: {"tandem_kv_store": {"timeout": timeout}}}


def load_leg(reference: KvReference) -> dict[str, Any]:
    return {FIELD: msgspec.to_builtins(LoadLeg(reference, LIMIT))}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def split(
    tmp_path_factory: pytest.TempPathFactory, large_model: Path
) -> AsyncIterator[Split]:
    """The running engines."""
    directory = tmp_path_factory.mktemp("split")
    ports = (free_port("127.0.0.1"), free_port("127.0.0.1"))
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports[0]}",
        "replay_endpoint": f"tcp://*:{ports[1]}",
        "topic": "kv@prefill@tiny",
    }
    env = {"PYTHONPATH": packages(directory), "VLLM_SERVER_DEV_MODE": "1"}
    async with AsyncExitStack() as stack, AsyncExitStack() as store:
        server = await store.enter_async_context(store_in_this_process(directory / "store"))

        def start(engines: AsyncExitStack, name: str, role: str, *flags: str) -> SingleVllm:
            config = transfer_config(server.location.endpoint, role, kv_namespace=NAMESPACE)
            own = directory / name
            own.mkdir()
            flags = ("--kv-transfer-config", config, *flags)
            return engines.enter_context(single_vllm(large_model, own, *flags, env=env))

        timeout = aiohttp.ClientTimeout(total=300)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        async with AsyncExitStack() as engines:
            prefill = start(engines, "producer", "kv_producer")
            decode = start(engines, "consumer", "kv_consumer")
            split = Split(prefill, decode, http, server, store, ports, [], 0, large_model)
            await store_first(split)
        # As the operator configures a prefill pod: it loads what it stored before.
        events_flags = ("--kv-events-config", json.dumps(events))
        split.prefill = start(stack, "prefill", "kv_both", *events_flags, *REASONING)
        split.decode = start(stack, "decode", "kv_consumer", *REASONING)
        for engine in (split.prefill, split.decode):
            await engine.ready()
        yield split


async def store_first(split: Split) -> None:
    """Store the first prompts, and keep the answers."""
    for engine in (split.prefill, split.decode):
        await engine.ready()
    for each in FIRST:
        split.answers.append(await split.tokens(split.prefill, prompt(*each)))
    async with sidecar(*sidecar_flags(split)) as process:
        split.answers.append(await split.handed_off(process, prompt(*HANDED_OFF)))
    # No request is needed for the engine to notice that its writes have ended.
    await split.prefill.metric_reaches(split.http, STORED, IN_CHUNKS + 4 * CHUNK)
    await split.forget(split.prefill)
    assert await split.tokens(split.prefill, prompt(*FIRST[0])) == split.answers[0]
    split.producer_loaded = metric(await split.prefill.metrics(split.http), LOADED)


def sidecar_flags(split: Split) -> tuple[str, ...]:
    return (
        *("--engine", split.decode.url, "--prefill-allow", "127.0.0.0/8"),
        *("--pod-name", "decode-0", "--connector", "storage"),
        *("--kv-transfer-timeout", "120s", "--prefill-timeout", "120s", "--silence-timeout", "60s"),
    )


# First: the next test damages what is stored.
async def test_after_both_engines_restarted_a_hand_off_computes_only_new_tokens(
    split: Split,
) -> None:
    loaded = 0.0
    async with sidecar(*sidecar_flags(split)) as process:
        # A load has a deadline, which it can miss on a busy machine: the prompt is computed then.
        while loaded < 4 * CHUNK:
            await split.forget(split.prefill)
            await split.forget(split.decode)
            before = metric(await split.prefill.metrics(split.http), LOADED)
            assert await split.handed_off(process, prompt(*HANDED_OFF)) == split.answers[-1]
            loaded = metric(await split.prefill.metrics(split.http), LOADED) - before
    assert await split.figure(LOADED) >= 4 * CHUNK


async def test_an_engine_that_started_later_loads_what_was_stored(split: Split) -> None:
    prompts, answers = [prompt(*each) for each in FIRST], split.answers[: len(FIRST)]
    decode, loaded = split.decode, await split.figure(LOADED)
    # A load has a deadline, which it can miss on a busy machine: the prompt is computed then.
    while metric(page := await decode.metrics(split.http), LOADED) < loaded + IN_CHUNKS:
        assert [await split.tokens(decode, tokens) for tokens in prompts] == answers
        await split.forget(decode)
    assert metric(page, "vllm:external_prefix_cache_hits_total") >= metric(page, LOADED)
    # A consumer only loads, and a producer only saves.
    assert metric(page, STORED) == 0
    assert split.producer_loaded == 0

    for path in data_objects(split.store.directory):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    while not await split.figure(NOT_LOADED, reason="corrupt"):
        assert [await split.tokens(decode, tokens) for tokens in prompts] == answers
        await split.forget(decode)


async def test_kv_moves_through_the_store_alone(split: Split) -> None:
    loaded, transfers, failed = [await split.figure(n) for n in (LOADED, TRANSFERS, FAILED)]
    async with sidecar(*sidecar_flags(split)) as process:
        seeds = itertools.count(100)
        # The circuit breaker of a decode engine that had to wait for the store may be open.
        while await split.figure(TRANSFERS) == transfers:
            tokens = prompt(next(seeds), 4 * CHUNK + 7)
            answer = await split.handed_off(process, tokens)
            # Salted, the prompt has other keys: it is computed.
            assert answer == await split.tokens(split.decode, tokens, cache_salt="alone")
        assert await split.figure(TRANSFERS) == transfers + 1
        assert await split.figure(LOADED) == loaded + 4 * CHUNK
        errors = await split.figure(FAILED) - failed

        async def are_counted() -> bool:
            async with split.http.get(process.admin_url(endpoints.METRICS)) as page:
                figures = await page.text()
            seconds = metric(figures, f"{metrics.KV_TRANSFER_SECONDS}_count")
            return (seconds, metric(figures, metrics.ERRORS)) == (1, errors)

        # The engine's own time, and its own count of failures.
        await until(are_counted, within=60)


async def test_a_thinking_budget_passes_the_prefill_leg(split: Split) -> None:
    """vLLM refuses a budget of `max_tokens` or more, and the leg has one token."""
    body = {
        "model": MODEL_NAME, "max_tokens": 1025, "stream": True,
        "messages": [{"role": "user", "content": "how far is the harbour? " * 40}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }  # fmt: skip
    chosen = {headers.PREFILLER_HOST_PORT: str(split.prefill.address)}
    # Its many tokens are of no interest: leaving aborts them.
    async with (
        sidecar(*sidecar_flags(split)) as process,
        split.http.post(process.url("/v1/messages"), json=body, headers=chosen) as answer,
    ):
        assert answer.status == 200, await answer.text()
        assert answer.headers[headers.ROUTING_PATH] == RoutingPath.PREFILL_THEN_DECODE


async def test_a_reference_that_is_not_the_engines_own_reads_nothing(split: Split) -> None:
    stored, other = prompt(12, CHUNK + 5), prompt(13, CHUNK + 5)
    reference = await split.prefilled(stored)
    assert reference.path == f"{NAMESPACE}/{reference.prefix_hash}"
    foreign = replace_path(reference, f"elsewhere/{reference.prefix_hash}")
    alone = await split.tokens(split.decode, other, cache_salt="alone")
    loaded = await split.figure(LOADED)
    for wrong in (reference, foreign):
        failed = await split.figure(FAILED)
        await split.forget(split.decode)
        assert await split.tokens(split.decode, other, **load_leg(wrong)) == alone
        assert await split.figure(FAILED) == failed + 1
    assert await split.figure(LOADED) == loaded
    # vLLM does not check these parameters; the connector ignores what it cannot read.
    broken = {FIELD: {"tandem_kv_reference": {"path": 1}}}
    assert await split.tokens(split.decode, other, **broken) == alone


async def test_the_epp_sends_a_prompt_in_storage_straight_to_decode(
    split: Split, tmp_path: Path
) -> None:
    tokens = prompt(14, 7 * CHUNK + 8)
    config = tmp_path / "router.yaml"
    config.write_text(epp_config(split))
    async with AsyncExitStack() as stack:
        picker = await stack.enter_async_context(epp(config))
        settings = envoy_settings(picker.grpc, [str(split.decode.address)], "FULL_DUPLEX_STREAMED")
        gateway = await stack.enter_async_context(envoy(tmp_path, settings))
        await until(lambda: picker.serves("p", "d"), within=60)
        before = await stored_events(picker)
        first = await split.tokens(split.prefill, tokens)

        async def is_indexed() -> bool:
            return await stored_events(picker) >= before + 7

        # The producer's own cache is empty afterwards: what is left is in the store.
        await until(is_indexed, within=120)
        await split.forget(split.prefill)
        await split.forget(split.decode)
        await split.tokens(split.prefill, [5, 6, 7], max_tokens=1)
        await until(lambda: is_empty(picker), within=60)
        body = request(tokens) | {"max_tokens": 8}
        async with split.http.post(
            f"{gateway}/v1/completions", json=body, headers={"x-request-id": "warm"}
        ) as answer:
            assert answer.status == 200, await answer.text()
            assert ids(await answer.json()) == first
        url = f"http://127.0.0.1:{picker.metrics}{trace_path('warm')}"
        async with split.http.get(url) as response:
            [decision] = msgspec.json.decode(await response.read(), type=list[DecisionTrace])
    assert (decision.path, decision.reason) == (RoutingPath.FAST_DECODE, "stored")
    assert (decision.tier, decision.loaded_tokens) == (STORAGE_WARM, 7 * CHUNK)


# Last: afterwards there is no store.
async def test_a_store_that_stops_between_the_legs_costs_a_recompute(split: Split) -> None:
    tokens = prompt(15, 2 * CHUNK + 3)
    alone = await split.tokens(split.decode, tokens, cache_salt="alone")
    reference = await split.prefilled(tokens)
    loaded, failed = await split.figure(LOADED), await split.figure(FAILED)
    await split.stack.aclose()
    assert await split.tokens(split.decode, tokens, **load_leg(reference)) == alone
    assert (await split.figure(LOADED), await split.figure(FAILED)) == (loaded, failed + 1)

    # Nor does the prefill engine name what it could not store.
    new = prompt(16, 2 * CHUNK + 3)
    answer = await split.complete(split.prefill.url, new, max_tokens=1, **store_leg())
    assert set(answer[FIELD]) == {"tandem_kv_not_stored"}


def replace_path(reference: KvReference, path: str) -> KvReference:
    return msgspec.structs.replace(reference, path=path)


def epp_config(split: Split) -> str:
    """Of an EPP whose store is the engines'. vLLM's publisher listens on all addresses, so the EPP
    gets the producer's events for both pods; its GPU blocks are cleared before the decision."""
    storage = {"endpoint": split.store.location.endpoint, "kv_namespace": NAMESPACE}
    discovery = {"socketPort": split.events[0], "replayPort": split.events[1]}
    return json.dumps(
        {
            "disaggregated_serving": {"enabled": True, "default_external_storage": storage},
            "kv_cache_index": {"storage_offloading": {"enabled": True}},
            "backends": [
                {"name": "p", "url": split.prefill.url, "role": "prefill"},
                {"name": "d", "url": split.decode.url, "role": "decode"},
            ],
            # The size of its KV is known before anything is transferred or loaded.
            "plugins": [
                {
                    "type": "precise-prefix-cache-producer",
                    "parameters": {"kvEventsConfig": {"podDiscoveryConfig": discovery}},
                },
                {
                    "type": "predicted-cost",
                    "parameters": {"modelConfigs": {MODEL_NAME: f"{split.model}/config.json"}},
                },
            ],
        }
    )


async def stored_events(picker: Epp) -> float:
    figures = await picker.figures()
    return figures.get('tandem_epp_kv_events_total{type="storage_stored"}', 0.0)


async def is_empty(picker: Epp) -> bool:
    figures = await picker.figures()
    return all(not figures.get(f'tandem_epp_kv_blocks{{backend="{pod}"}}', 0.0) for pod in "pd")
