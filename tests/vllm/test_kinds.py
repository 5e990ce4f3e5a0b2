"""Every kind of request: a hand-off between real engines answers like one engine alone."""

from typing import Any

import aiohttp
import pytest

from tandem_contract import headers, metrics
from tandem_contract.paths import RoutingPath

from .api_requests import COUNT, KINDS, ask, logprobs, usage
from .pairs import Moved, Pair

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOLERANCE = 1e-3
"""Logprob tolerance: batching changes the order of float32 sums."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_answer_is_that_of_one_engine(
    pair: Pair, http: aiohttp.ClientSession, kind: str, stream: bool
) -> None:
    request_kind = KINDS[kind]
    body = request_kind.body(f"{kind} {stream}: " + "how far is the harbour? " * 20, stream=stream)
    moved = await Moved(http, pair.decode.url("/metrics")).begin()
    handed = await pair.handed_off(http, request_kind, body)
    alone = await pair.alone(http, request_kind, body)
    assert request_kind.text(handed) == request_kind.text(alone) != ""
    assert handed.headers[headers.ROUTING_PATH] == RoutingPath.PREFILL_THEN_DECODE
    assert handed.headers[headers.PREFILL_BACKEND] == str(pair.prefill.address)
    assert await moved.by(metrics.ENGINE_PROMPT_BY_SOURCE, source="external_kv_transfer") > 100


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_logprobs_are_those_of_one_engine(
    pair: Pair, http: aiohttp.ClientSession, stream: bool
) -> None:
    request_kind = KINDS["completions"]
    body = request_kind.body(f"{stream} and now the weather " * 12, stream=stream, logprobs=1)
    handed = logprobs(await pair.handed_off(http, request_kind, body))
    alone = logprobs(await pair.alone(http, request_kind, body))
    assert len(handed) == COUNT
    assert handed == pytest.approx(alone, abs=TOLERANCE)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", ["completions", "chat"])
async def test_usage_counts_what_the_prefill_found_cached(
    pair: Pair, http: aiohttp.ClientSession, kind: str, stream: bool
) -> None:
    request_kind = KINDS[kind]
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = request_kind.body(f"{kind} {stream}. " + "Once upon a time. " * 20, **options)
    handed = [usage(await pair.handed_off(http, request_kind, body)) for _ in range(2)]
    same_salt = body | {"cache_salt": f"{kind} {stream}"}
    alone = [
        usage(await ask(http, pair.decode.url(request_kind.path), same_salt)) for _ in range(2)
    ]
    assert handed[0]["completion_tokens"] == COUNT
    assert [_counted(answer) for answer in handed] == [_counted(answer) for answer in alone]
    assert _counted(alone[1])[-1] > 0


def _counted(usage_fields: dict[str, Any]) -> list[int]:
    counted = ("prompt_tokens", "completion_tokens", "total_tokens")
    cached = (usage_fields.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return [*(usage_fields[name] for name in counted), cached]
