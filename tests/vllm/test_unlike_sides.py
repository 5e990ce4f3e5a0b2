"""Sides that differ as the documents recommend: a prefill engine of two ranks, a decode engine of
one, and KV of eight bits on both.

One pair has both, so that no second one has to start.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tandem_contract import headers, metrics
from tandem_contract.paths import RoutingPath

from .api_requests import KINDS
from .pairs import Moved, Pair, running_pair

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def unlike(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    fp8 = ("--kv-cache-dtype=fp8",)
    with running_pair(
        model,
        tmp_path_factory.mktemp("unlike"),
        prefill_args=(*fp8, "--tensor-parallel-size=2"),
        decode_args=fp8,
    ) as running:
        yield running


@pytest.fixture
async def pair(unlike: Pair, http: aiohttp.ClientSession, request: pytest.FixtureRequest) -> Pair:
    await unlike.restore(http, request.session.testsfailed)
    return unlike


@pytest.mark.parametrize("kind", KINDS)
async def test_the_answer_is_that_of_the_decode_engine_alone(
    pair: Pair, http: aiohttp.ClientSession, kind: str
) -> None:
    request_kind = KINDS[kind]
    body = request_kind.body(f"{kind} {time.monotonic_ns()}: " + "how far is the harbour? " * 20)
    moved = await Moved(http, pair.decode.url("/metrics")).begin()
    handed = await pair.handed_off(http, request_kind, body)
    assert handed.headers[headers.ROUTING_PATH] == RoutingPath.PREFILL_THEN_DECODE
    assert await moved.by(metrics.ENGINE_PROMPT_BY_SOURCE, source="external_kv_transfer") > 100
    assert await moved.by(metrics.ENGINE_XFER_FAILED) == 0
    alone = await pair.alone(http, request_kind, body)
    assert request_kind.text(handed) == request_kind.text(alone) != ""
