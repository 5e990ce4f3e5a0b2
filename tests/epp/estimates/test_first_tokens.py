"""vLLM sends `response.created` before it computes anything: what an EPP behind Envoy then learns
of an engine behind a sidecar.

The engines are scripted: each computes its declared number of tokens per second.
"""

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import pytest

from tandem_contract import endpoints, headers
from tandem_contract.commandline import HostPort
from tandem_contract.paths import RoutingPath
from tandem_contract.pod_reports import PodReport
from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_planner.prefill_fit import PrefillCost

from ...sidecar.fake_vllm import MODEL, Act, Answering, script
from ...sidecar.peers import PARAMS, FakeDecode, FakePrefill
from ...sidecar.processes import sidecar
from ..real import Epp
from .learning import Requests, routing

pytestmark = pytest.mark.component

DECODE_RATE: Final = 500
PREFILL_RATE: Final = 50_000
"""Tokens per second. At the former one token takes as long as other work on the machine delays an
answer."""
CHARACTERS: Final = 4
"""Of a token, as the EPP assumes where it knows no tokenizer."""
REQUESTS: Final = 30
"""Of 1 to 30 tokens, which are two KV blocks at most: such a prompt is never handed off."""
LONG: Final = 4_000
"""Tokens of a chat that is worth a hand-off to the faster engine, by far."""


def computes(rate: int) -> Act:
    """Answer at once with what precedes the tokens, and with these after the time they take: none
    for those whose KV comes from the other engine."""

    async def act(turn: Answering) -> None:
        tokens = _tokens(turn)
        turn.stream()
        turn.write(*turn.events.preamble)
        if "kv_transfer_params" not in turn.request.json:
            await asyncio.sleep(tokens / rate)
        *end, completed = turn.events.end
        turn.write(*turn.events.tokens, *end)
        turn.write(completed.replace('"input_tokens": 40', f'"input_tokens": {tokens}'))
        turn.end()

    return act


async def prefills(turn: Answering) -> None:
    tokens = _tokens(turn)
    await asyncio.sleep(tokens / PREFILL_RATE)
    usage = b'{"input_tokens": %d, "output_tokens": 1}' % tokens
    turn.answer(200, b'{"usage": %b, "kv_transfer_params": %b}' % (usage, PARAMS))


def _tokens(turn: Answering) -> int:
    return len(turn.request.json["input"]) // CHARACTERS


async def test_the_first_event_of_a_response_teaches_no_rate(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "k1").write_bytes(b"0123456789abcdef")
    async with (
        FakeDecode(script(computes(DECODE_RATE))) as engine,
        FakePrefill(script(prefills)) as prefill,
        sidecar("--engine", engine.url, "--plan-key-dir", str(keys)) as before,
        aiohttp.ClientSession() as http,
    ):
        backends = [
            backend("prefill", prefill.address, "prefill"),
            backend("decode", before.listen, "decode"),
        ]
        async with routing(tmp_path, backends, Requests(MODEL, plan_keys=keys)) as (picker, url):
            url = url.removesuffix(PATHS[RequestKind.COMPLETIONS])
            for number in range(REQUESTS):
                path = await path_of(http, url, number, 1 + number)
                assert path == RoutingPath.UNIFIED, "too short for a hand-off"
            learned = await cost(picker, "decode")
            paths = [await path_of(http, url, 100 + number, LONG) for number in range(5)]
    # Other work on the machine may make it slower than declared, never faster.
    assert learned.seconds(LONG) > 0.7 * LONG / DECODE_RATE
    assert paths == [RoutingPath.PREFILL_THEN_DECODE] * len(paths)


def backend(name: str, address: HostPort, role: str) -> dict[str, Any]:
    return {"name": name, "url": f"http://{address}", "role": role, "models": [MODEL]}


async def path_of(http: aiohttp.ClientSession, url: str, number: int, tokens: int) -> str:
    """Ask for a streamed response to a prompt that no other request has; returns the path that it
    took."""
    prompt = f"{number:04} " * tokens
    body = {"model": MODEL, "stream": True, "input": prompt[: CHARACTERS * tokens]}
    async with http.post(url + PATHS[RequestKind.RESPONSES], json=body) as answer:
        text = await answer.text()
        assert answer.status == 200, text
        assert json.loads(text.rpartition("data: ")[2])["type"] == "response.completed"
        return answer.headers[headers.ROUTING_PATH]


async def cost(picker: Epp, name: str) -> PrefillCost:
    """What the EPP has learned of a backend's prefill."""
    url = f"http://127.0.0.1:{picker.metrics}{endpoints.DEBUG_PODS}"
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        reports = msgspec.json.decode(await answer.read(), type=list[PodReport])
    estimate = next(report for report in reports if report.name == name).estimates["prefill"]
    print(estimate)
    names = ("seconds_per_request", "seconds_per_token", "seconds_per_pair")
    return PrefillCost(*(estimate.figures[each] for each in names))
