"""`tandem-router` between real vLLM engines with NIXL, for HTTP clients and for OpenAI's SDK."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml

from tandem_contract import headers, metrics
from tandem_contract.paths import RoutingPath

from ..router.processes import router
from ..sidecar.processes import Sidecar
from .api_requests import KINDS, ask
from .engines import MODEL_NAME, VENV, metric
from .pairs import Moved, Pair, stopped, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TIMES = ("--silence-timeout", "30s")
"""An engine on a busy machine may send nothing for seconds."""
SOON = ("--silence-timeout", "3s")
REQUESTS = "http_requests_total"
"""vLLM's count of the requests that reached it."""
SDK = """
import json, sys
from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="unused", max_retries=0)
asked = dict(model=sys.argv[2], messages=[{"role": "user", "content": sys.argv[3]}], max_tokens=8)
whole = client.chat.completions.with_raw_response.create(**asked, temperature=0)
path = whole.headers["x-continuum-routing-path"]
text = whole.parse().choices[0].message.content
stream = client.chat.completions.create(**asked, temperature=0, stream=True)
pieces = [event.choices[0].delta.content or "" for event in stream if event.choices]
models = [model.id for model in client.models.list()]
print(json.dumps({"path": path, "text": text, "streamed": "".join(pieces), "models": models}))
"""


@asynccontextmanager
async def routed(
    pair: Pair, http: aiohttp.ClientSession, file: Path, *flags: str
) -> AsyncIterator[Sidecar]:
    """A router of the two engines, without their sidecar; ready."""
    backends = [
        {"name": "prefill-0", "url": f"http://{pair.prefill.address}", "role": "prefill"},
        {"name": "decode-0", "url": f"http://{pair.decode.address}", "role": "decode"},
    ]
    serving = {"enabled": True, "prefill_timeout": "120s"}
    file.write_text(yaml.safe_dump({"disaggregated_serving": serving, "backends": backends}))
    async with router(file, "--no-warm-up", *TIMES, *flags) as process:

        async def is_ready() -> bool:
            async with http.get(process.admin_url("/state")) as answer:
                return all(each["ready"] for each in (await answer.json())["backends"])

        await until(is_ready, 60)
        yield process


@pytest.mark.parametrize("name", list(KINDS))
async def test_a_hand_off_answers_as_one_engine_does(
    pair: Pair, http: aiohttp.ClientSession, tmp_path: Path, name: str
) -> None:
    kind = KINDS[name]
    body = kind.body(f"{name}: " + "who lives in the lighthouse? " * 20)
    async with routed(pair, http, tmp_path / "router.yaml") as process:
        moved = await Moved(http, pair.decode.url("/metrics")).begin()
        handed = await ask(http, process.url(kind.path), body)
        alone = await pair.alone(http, kind, body)
        assert kind.text(handed) == kind.text(alone) != ""
        assert handed.headers[headers.ROUTING_PATH] == RoutingPath.PREFILL_THEN_DECODE
        assert handed.headers[headers.PREFILL_BACKEND] == "prefill-0"
        assert await moved.by(metrics.ENGINE_PROMPT_BY_SOURCE, source="external_kv_transfer") > 100


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_the_engines_transfer_times_are_counted(
    pair: Pair, http: aiohttp.ClientSession, tmp_path: Path, workers: str
) -> None:
    kind = KINDS["completions"]
    async with routed(pair, http, tmp_path / "router.yaml", "--workers", workers) as process:
        for number in range(2):
            handed = await ask(http, process.url(kind.path), kind.body(f"{workers}{number} " * 90))
            assert handed.headers[headers.ROUTING_PATH] == RoutingPath.PREFILL_THEN_DECODE
        page = process.admin_url("/metrics")
        # vLLM counts a transfer a moment after the answer that needed it.
        await until(lambda: has_samples(http, page, 2), 60)


async def has_samples(http: aiohttp.ClientSession, page: str, count: int) -> bool:
    """Whether the router's page has so many transfer times."""
    async with http.get(page) as answer:
        return metric(await answer.text(), f"{metrics.KV_TRANSFER_SECONDS}_count") == count


async def test_a_prefill_backend_that_hangs_costs_no_answer(
    pair: Pair, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    kind = KINDS["completions"]
    body = kind.body("the lamp is not lit " * 20)
    async with routed(pair, http, tmp_path / "router.yaml", *SOON) as process:
        async with stopped(pair.prefill):
            answer = await ask(http, process.url(kind.path), body)
        assert answer.headers[headers.ROUTING_PATH] == RoutingPath.FALLBACK
        assert kind.text(answer) == kind.text(await pair.alone(http, kind, body)) != ""


async def test_a_decode_backend_that_hangs_is_replaced(
    pair: Pair, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """The only other backend is the one that prefilled: it serves the request alone."""
    kind = KINDS["completions"]
    body = kind.body("the lamp burns all night " * 20)
    async with routed(pair, http, tmp_path / "router.yaml", *SOON) as process:

        async def is_decoding() -> bool:
            async with http.get(process.admin_url("/state")) as page:
                return "decoding" in [work["phase"] for work in (await page.json())["in_flight"]]

        async with stopped(pair.decode):
            client = asyncio.create_task(ask(http, process.url(kind.path), body))
            await until(is_decoding, 60)
            answer = await client
        assert answer.headers[headers.DECODE_BACKEND] == "prefill-0"
        assert kind.text(answer) == kind.text(await pair.alone(http, kind, body)) != ""


async def test_a_chat_that_cannot_fit_reaches_no_engine(
    pair: Pair, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """Router and sidecar refuse it by the engines' own lists of models, and serve others
    meanwhile."""
    kind = KINDS["chat"]
    body = json.dumps(kind.body("how far is the harbour? " * 600_000)).encode()
    async with routed(pair, http, tmp_path / "router.yaml") as process:
        engines = (pair.prefill, pair.decode)
        requests = [await Moved(http, each.url("/metrics")).begin() for each in engines]
        for url in (process.url(kind.path), pair.url(kind.path)):
            refused, *others = await asyncio.gather(
                ask(http, url, body, pair.split),
                *(ask(http, process.url(kind.path), kind.body(f"{n}?")) for n in range(4)),
            )
            message = refused.json["error"]["message"]
            assert message.startswith("This model's maximum context length is 32768 tokens.")
            assert [answer.status for answer in (refused, *others)] == [400, *[200] * 4]
        chats = {"handler": kind.path}
        assert [await each.by(REQUESTS, status="4xx", **chats) for each in requests] == [0, 0]
        assert await requests[1].by(REQUESTS, status="2xx", **chats) == 8


async def test_openais_sdk(pair: Pair, http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with routed(pair, http, tmp_path / "router.yaml") as process:
        prompt = "Tell me about the tides. " * 10
        ran = await asyncio.create_subprocess_exec(
            *(str(VENV / "bin/python"), "-c", SDK, process.url(""), MODEL_NAME, prompt),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await ran.communicate()
        assert ran.returncode == 0
        seen = json.loads(output)
        assert seen["path"] == RoutingPath.PREFILL_THEN_DECODE
        assert seen["text"] == seen["streamed"] != ""
        assert MODEL_NAME in seen["models"]
