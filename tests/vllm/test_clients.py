"""Requests other than plain hand-offs: forbidden fields, unified by rule, errors, passed on."""

import json
import re
from typing import Any

import aiohttp
import pytest

from tandem_contract import headers, metrics
from tandem_contract.paths import RoutingPath

from .api_requests import COUNT, KINDS, ask, logprobs
from .engines import metric
from .pairs import Moved, Pair, page, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

POISON: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "someone",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
}
"""Remote fields without blocks; unfiltered, they crash a decode engine."""
FIELDS = [
    {"kv_transfer_params": {"do_remote_prefill": True}},
    {"kv_transfer_params": POISON},
    {"kv_transfer_params": {"prompt_token_ids": [5, 6, 7]}},
    {"vllm_xargs": {"kv_transfer_params": json.dumps(POISON)}},
    {"ec_transfer_params": POISON},
    {"request_id": "mine"},
]


@pytest.mark.parametrize("kind", ["completions", "chat"])
@pytest.mark.parametrize("split", [True, False], ids=["split", "unified"])
@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: next(iter(fields)))
async def test_forbidden_client_fields_are_removed(
    pair: Pair, http: aiohttp.ClientSession, kind: str, split: bool, fields: dict[str, Any]
) -> None:
    request_kind = KINDS[kind]
    body = request_kind.body("Tell me about the printing press. " * 4, max_tokens=4)
    sent = {headers.DATA_PARALLEL_RANK: "7", **(pair.split if split else {})}
    answer = await ask(http, pair.url(request_kind.path), body | fields, sent)
    assert request_kind.text(answer) == request_kind.text(
        await pair.alone(http, request_kind, body)
    )
    assert pair.decode.healthy()
    assert pair.prefill.healthy()


SAMPLED = {"n": 2, "temperature": 1, "seed": 3}


@pytest.mark.parametrize(
    ("kind", "reason", "fields"),
    [
        ("completions", "n", SAMPLED),
        ("generate", "n", {"sampling_params": {**SAMPLED, "max_tokens": 8}}),
        ("completions", "batch", {"prompt": ["one " * 40, "two " * 40]}),
        ("completions", "prompt_logprobs", {"prompt_logprobs": 1}),
        ("completions", "echo_logprobs", {"echo": True, "logprobs": 1}),
    ],
)
async def test_requests_that_one_engine_must_serve_alone(
    pair: Pair, http: aiohttp.ClientSession, kind: str, reason: str, fields: dict[str, Any]
) -> None:
    counted = ("tandem_sidecar_unified_total", {"reason": reason})
    before = metric(await page(http, pair.admin("/metrics")), counted[0], **counted[1])
    request_kind = KINDS[kind]
    body = request_kind.body("The ship finds harbour at night. ") | fields
    answer = await pair.handed_off(http, request_kind, body)
    alone = await pair.alone(http, request_kind, body)
    text = "token_ids" if kind == "generate" else "text"
    texts = [choice[text] for choice in answer.json["choices"]]
    assert texts == [choice[text] for choice in alone.json["choices"]]
    if reason == "n":
        assert len({str(each) for each in texts}) == 2
    assert answer.headers[headers.ROUTING_PATH] == RoutingPath.UNIFIED
    assert metric(await page(http, pair.admin("/metrics")), counted[0], **counted[1]) == before + 1


async def test_an_engine_error_is_passed_on(pair: Pair, http: aiohttp.ClientSession) -> None:
    request_kind = KINDS["completions"]
    for fields in (
        {"model": "an-unknown-adapter"},
        {"max_tokens": 10**6},
        {"prompt": 1.5},
    ):
        body = request_kind.body("Hello") | fields
        handed = await pair.handed_off(http, request_kind, body)
        direct = await ask(http, pair.prefill.url(request_kind.path), body)
        assert (handed.status, handed.json) == (direct.status, direct.json)
        assert 400 <= handed.status < 500


@pytest.mark.parametrize("path", ["/v1/models", "/v1/responses/none"])
async def test_requests_without_generation_pass_byte_for_byte(
    pair: Pair, http: aiohttp.ClientSession, path: str
) -> None:
    async def response_of(url: str) -> tuple[int, bytes]:
        async with http.get(url) as answer:
            return answer.status, _timeless(await answer.read())

    assert await response_of(pair.url(path)) == await response_of(pair.decode.url(path))


async def test_tokenize_passes_byte_for_byte(pair: Pair, http: aiohttp.ClientSession) -> None:
    body = b'{ "model":"tiny", "prompt" : "how many?", "unknown": 9007199254740993 }'
    through = await ask(http, pair.url("/tokenize"), body)
    direct = await ask(http, pair.decode.url("/tokenize"), body)
    assert (through.status, through.body) == (direct.status, direct.body)
    assert through.status == 200


async def test_tools_and_structured_outputs_work_across_a_hand_off(
    pair: Pair, http: aiohttp.ClientSession
) -> None:
    request_kind = KINDS["chat"]
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    function = {"name": "count", "description": "counts", "parameters": schema}
    one_of = {"structured_outputs": {"choice": ["yes, gladly", "no, thank you"]}}
    tools = {"tools": [{"type": "function", "function": function}]}
    for fields in (
        one_of,
        tools,
        {**tools, "tool_choice": {"type": "function", "function": {"name": "count"}}},
    ):
        body = request_kind.body("Would you count for me? " * 6, **fields)
        handed = await pair.handed_off(http, request_kind, body)
        alone = await pair.alone(http, request_kind, body)
        assert handed.status == alone.status == 200, handed.body
        assert _message(handed.json) == _message(alone.json)
        assert handed.headers[headers.ROUTING_PATH] == RoutingPath.PREFILL_THEN_DECODE


async def test_a_hand_off_returns_all_tokens_asked_for(
    pair: Pair, http: aiohttp.ClientSession
) -> None:
    """The prefill leg's limit of one token does not reach the response."""
    request_kind = KINDS["completions"]
    body = request_kind.body("1, 2, 3, " * 30, logprobs=1, stop=["<|nothing|>"], min_tokens=COUNT)
    answer = await pair.handed_off(http, request_kind, body)
    assert len(logprobs(answer)) == COUNT
    assert answer.json["choices"][0]["finish_reason"] == "length"


async def test_the_sidecar_counts_what_vllm_moved(pair: Pair, http: aiohttp.ClientSession) -> None:
    request_kind = KINDS["completions"]
    moved = await Moved(http, pair.decode.url("/metrics")).begin()
    await pair.handed_off(http, request_kind, request_kind.body("every word of this moves " * 20))

    async def is_counted() -> bool:
        return await moved.by(f"{metrics.ENGINE_XFER_SECONDS}_count") == 1

    # vLLM counts a transfer a moment after the answer that needed it.
    await until(is_counted, 60)
    assert await moved.by(f"{metrics.ENGINE_XFER_BYTES}_sum") > 0


def _timeless(data: bytes) -> bytes:
    """`data` without the time and the random ids in each list of models."""
    return re.sub(rb'"created":\d+|modelperm-\w+', b"", data)


def _message(whole: Any) -> Any:
    """A chat message without the random ids of tool calls."""
    message = whole["choices"][0]["message"]
    for call in message.get("tool_calls") or ():
        call["id"] = ""
    return message
