"""The data-parallel ranks of real vLLM, each a backend of its own behind real Envoy and EPP."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from tandem_contract import endpoints, headers

from ..epp.estimates.learning import Requests, routing
from ..epp.real import Epp, until
from .engines import MODEL_NAME, metric
from .pairs import page
from .single import SingleVllm, single_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

RANKS = 2
BACKEND = "vllm"
NAMES = tuple(f"{BACKEND}_dp{i}" for i in range(RANKS))
TURNS = 4
TURN_TOKENS = 320


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SingleVllm]:
    """Two engines behind one port."""
    flags = ("--data-parallel-size", str(RANKS))
    with single_vllm(model, tmp_path_factory.mktemp("ranks"), *flags) as running:
        yield running


async def test_each_rank_is_a_backend_that_gets_what_the_epp_chose_for_it(
    engine: SingleVllm, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    await engine.ready()
    backends = [{"name": BACKEND, "url": engine.url, "role": "unified", "models": [MODEL_NAME]}]
    # Not by cost: a model that computes a prompt in less than a millisecond has no use for hits.
    requests = Requests(MODEL_NAME, plugins=("prefix-cache-scorer",))
    async with routing(tmp_path, backends, requests) as (picker, url):

        async def has_ranks() -> bool:
            return await names(picker, http) == set(NAMES)

        await until(has_ranks)
        served = partial(serve, engine, picker, http, url)
        conversations: dict[str, int] = {}
        # What no rank has cached goes to any: all to one is as likely as 20 times heads.
        for conversation in range(20):
            rank, cached = await served(prompt(conversation, 1))
            assert cached == 0
            conversations.setdefault(rank, conversation)
            if len(conversations) == RANKS:
                break
        assert set(conversations) == set(NAMES)
        for turn in range(2, TURNS + 1):
            for rank, conversation in conversations.items():
                answer = await served(prompt(conversation, turn))
                # The engine caches whole blocks of 32 tokens.
                assert answer == (rank, (turn - 1) * TURN_TOKENS)


async def serve(
    engine: SingleVllm, picker: Epp, http: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> tuple[str, int]:
    """Send a request. Returns the backend that the EPP chose and the tokens that it had cached,
    after the rank of that name, and no other, has counted the request."""
    before = after = await counted(engine, http)
    async with http.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        usage = (await answer.json())["usage"]
        request_id = answer.headers[headers.REQUEST_ID]

    async def is_counted() -> bool:
        nonlocal after
        after = await counted(engine, http)
        return sum(after) > sum(before)

    await until(is_counted)
    chosen = await choice(picker, http, request_id)
    moved = [int(a - b) for a, b in zip(after, before, strict=True)]
    assert moved == [int(name == chosen) for name in NAMES]
    return chosen, (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def prompt(conversation: int, turn: int) -> dict[str, Any]:
    """A turn, behind the turns before it."""
    random = Random(conversation)
    tokens = [random.randrange(4, 200) for _ in range(TURN_TOKENS * TURNS)][: TURN_TOKENS * turn]
    return {"model": MODEL_NAME, "prompt": tokens, "max_tokens": 2}


async def counted(engine: SingleVllm, http: aiohttp.ClientSession) -> list[float]:
    """Requests that each rank has finished."""
    text = await page(http, engine.url + endpoints.METRICS)
    return [metric(text, "vllm:request_success_total", engine=str(i)) for i in range(RANKS)]


async def names(picker: Epp, http: aiohttp.ClientSession) -> set[str]:
    """The EPP's backends."""
    return {pod["name"] for pod in await debug(picker, http, endpoints.DEBUG_PODS)}


async def choice(picker: Epp, http: aiohttp.ClientSession, request_id: str) -> str:
    """The backend that the EPP chose for a request."""
    [decision] = await debug(picker, http, endpoints.DEBUG_DECISIONS, request_id=request_id)
    return str(decision["decode"][0]["name"])


async def debug(
    picker: Epp, http: aiohttp.ClientSession, path: str, **query: str
) -> list[dict[str, Any]]:
    async with http.get(f"http://127.0.0.1:{picker.metrics}{path}", params=query) as answer:
        return list(await answer.json())
