"""LoRA adapters and speculative decoding across a hand-off between real engines.

One pair has both, so that no second one has to start: adapters on both engines, and drafts by
n-gram on the decode engine alone. The prefill engine alone gives the expected answers: it never
speculates.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from tandem_contract import headers, metrics
from tandem_contract.paths import RoutingPath

from .adapters import make_adapter
from .api_requests import KINDS, Answer, RequestKind, ask
from .pairs import Moved, Pair, running_pair

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ADAPTER, OTHER_ADAPTER = "dialect", "jargon"
DRAFTS: Final = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
COMPLETIONS: Final = KINDS["completions"]
PROMPT: Final = "how far is the harbour? " * 20


@pytest.fixture(scope="module")
def featured(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    logs = tmp_path_factory.mktemp("featured")
    adapters = {name: tmp_path_factory.mktemp(name) for name in (ADAPTER, OTHER_ADAPTER)}
    for seed, directory in enumerate(adapters.values()):
        make_adapter(directory, model, seed=seed)
    drafts = ("--speculative-config", json.dumps(DRAFTS))
    with running_pair(model, logs, adapters=adapters, decode_args=drafts) as running:
        yield running


@pytest.fixture
async def pair(featured: Pair, http: aiohttp.ClientSession, request: pytest.FixtureRequest) -> Pair:
    await featured.restore(http, request.session.testsfailed)
    return featured


async def test_an_adapter_answers_as_on_one_engine_with_its_own_kv(
    pair: Pair, http: aiohttp.ClientSession
) -> None:
    """The base model's request for the same prompt comes first: its KV must not be reused."""
    base = COMPLETIONS.body(PROMPT)
    answers = [
        await answer_with_pulled_kv(pair, http, COMPLETIONS, body)
        for body in (base, base | {"model": ADAPTER})
    ]
    assert answers[0] != answers[1]


async def test_two_adapters_side_by_side_answer_as_each_alone(
    pair: Pair, http: aiohttp.ClientSession
) -> None:
    """Not beside the base model: vLLM's code for LoRA on CPUs marks a request without an adapter
    with the index -1, which selects the last adapter when the batch has one."""
    names = (ADAPTER, OTHER_ADAPTER)
    bodies = [
        COMPLETIONS.body(f"{i // 2} by side. " + PROMPT, model=names[i % 2]) for i in range(4)
    ]
    alone = [COMPLETIONS.text(await expected(pair, http, COMPLETIONS, body)) for body in bodies]
    handed = await asyncio.gather(*(pair.handed_off(http, COMPLETIONS, body) for body in bodies))
    assert [COMPLETIONS.text(answer) for answer in handed] == alone
    assert alone[0] != alone[1]
    paths = {answer.headers[headers.ROUTING_PATH] for answer in handed}
    assert paths == {RoutingPath.PREFILL_THEN_DECODE}


async def test_drafts_of_the_decode_engine_alone_change_no_answer(
    pair: Pair, http: aiohttp.ClientSession
) -> None:
    body = COMPLETIONS.body("Again: " + PROMPT, max_tokens=120)
    moved = await Moved(http, pair.decode.url("/metrics")).begin()
    await answer_with_pulled_kv(pair, http, COMPLETIONS, body)
    assert await moved.by("vllm:spec_decode_num_accepted_tokens_total") > 0


async def answer_with_pulled_kv(
    pair: Pair,
    http: aiohttp.ClientSession,
    request_kind: RequestKind,
    body: dict[str, Any],
) -> str:
    """Text of a hand-off. Fails unless the prefill engine alone gives the same text, and the
    decode engine received the KV of the whole prompt, of more than 100 tokens."""
    moved = await Moved(http, pair.decode.url("/metrics")).begin()
    handed = await pair.handed_off(http, request_kind, body)
    text = request_kind.text(handed)
    assert handed.headers[headers.ROUTING_PATH] == RoutingPath.PREFILL_THEN_DECODE
    prompt = handed.json["usage"]["prompt_tokens"]
    pulled = await moved.by(metrics.ENGINE_PROMPT_BY_SOURCE, source="external_kv_transfer")
    computed = await moved.by(metrics.ENGINE_PROMPT_BY_SOURCE, source="local_compute")
    assert pulled + computed == prompt > 100
    assert computed <= 1, "the decode engine computes at most the prompt's last token"
    assert text == request_kind.text(await expected(pair, http, request_kind, body))
    return text


async def expected(
    pair: Pair, http: aiohttp.ClientSession, request_kind: RequestKind, body: dict[str, Any]
) -> Answer:
    """Response of the prefill engine alone; the salt prevents prefix-cache hits."""
    salted = {**body, "cache_salt": f"expected-{time.monotonic_ns()}"}
    return await ask(http, pair.prefill.url(request_kind.path), salted)
