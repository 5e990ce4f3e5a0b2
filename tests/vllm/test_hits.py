"""The hit ratio that the EPP measures of real vLLM: of streams too, whose usage comes last."""

import json
from pathlib import Path

import aiohttp
import msgspec
import pytest

from tandem_contract import endpoints
from tandem_contract.pod_reports import PodReport, Reporter

from ..epp.estimates.learning import Requests, routing
from ..epp.real import Epp, until
from .engines import MODEL_NAME
from .pairs import Pair

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CONVERSATIONS, TURNS = 3, 4


async def test_streams_of_one_engine_without_a_sidecar(pair: Pair, tmp_path: Path) -> None:
    url = pair.prefill.url("")
    backends = [{"name": "unified", "url": url, "role": "unified", "models": [MODEL_NAME]}]
    await check(tmp_path, backends, "unified")


async def test_streams_of_one_engine_behind_a_sidecar(pair: Pair, tmp_path: Path) -> None:
    url = pair.url("")
    backends = [{"name": "unified", "url": url, "role": "unified", "models": [MODEL_NAME]}]
    await check(tmp_path, backends, "unified")


async def test_streams_that_are_handed_over(pair: Pair, tmp_path: Path) -> None:
    """The decode engine counts them too, with the prefixes that it kept from earlier turns."""
    backends = [
        {"name": "prefill", "url": pair.prefill.url(""), "role": "prefill", "models": [MODEL_NAME]},
        {"name": "decode", "url": pair.url(""), "role": "decode", "models": [MODEL_NAME]},
    ]
    await check(tmp_path, backends, "prefill", "always-disagg-pd-decider")


async def check(
    directory: Path, backends: list[dict[str, object]], computing: str, *plugins: str
) -> None:
    """Send conversations turn by turn; what the backend `computing` had cached of them must be what
    the last event of each stream says."""
    requests = Requests(MODEL_NAME, is_stream=True, plugins=plugins)
    prompts = cached = 0
    async with routing(directory, backends, requests) as (picker, url), session() as http:
        before = await measured(picker)
        for turn in range(1, TURNS + 1):
            for conversation in range(CONVERSATIONS):
                usage = await stream(http, url, f"{directory} {conversation}", turn)
                prompts += usage[0]
                cached += usage[1]

        async def is_counted() -> bool:
            return sum(p for p, _ in (await measured(picker)).values()) >= prompts

        assert before == {}
        await until(is_counted)
        assert await measured(picker) == {computing: (prompts, cached)}
        assert cached > prompts / 4, "most of each turn was in the one before"
        print(f"\n{computing}: {cached} of {prompts} prompt tokens cached; {await shown(picker)}")


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))


async def stream(
    http: aiohttp.ClientSession, url: str, conversation: str, turn: int
) -> tuple[int, int]:
    """One turn; returns the tokens of its prompt, and how many of them the usage calls cached."""
    prompt = [4 + hash_of(f"{conversation} {i // 400}", i) for i in range(400 * turn)]
    body = {
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": 2, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    async with http.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        events = (await answer.text()).split("\n\n")
    [usage] = [
        event["usage"]
        for line in events
        if line.startswith("data: {") and (event := json.loads(line[6:])).get("usage")
    ]
    return usage["prompt_tokens"], (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def hash_of(text: str, position: int) -> int:
    """A token that depends on the whole text."""
    return (sum(map(ord, text)) * 31 + position * position * 7 + position) % 190


async def measured(picker: Epp) -> dict[str, tuple[float, float]]:
    """Backend → tokens of the prompts that it computed, and the cached ones."""
    figures, result = await picker.figures(), {}
    for name in ("unified", "prefill", "decode"):
        labels = f'{{backend="{name}",reported_by="engine",source="measured"}}'
        if prompt := figures.get(f"tandem_epp_prompt_tokens_total{labels}"):
            result[name] = prompt, figures[f"tandem_epp_cached_prompt_tokens_total{labels}"]
    return result


async def shown(picker: Epp) -> dict[str, float]:
    """The ratios at `/debug/pods`."""
    url = f"http://127.0.0.1:{picker.metrics}{endpoints.DEBUG_PODS}"
    async with session() as http, http.get(url) as answer:
        reports = msgspec.json.decode(await answer.read(), type=list[PodReport])
    [hits] = [report.hits for report in reports if report.hits]
    assert hits["measured"].reported_by is Reporter.ENGINE
    return {name: round(report.ratio, 3) for name, report in hits.items()}
