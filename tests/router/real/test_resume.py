"""A stream goes on at another engine after its own was killed, with the same tokens."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from tandem_contract.request_kinds import PATHS, RequestKind

from ...engine.utf8_model import make_utf8_model
from ...sidecar.real.client import ClientResult, Stream, open_response
from ...sidecar.real.engine import SERVED, Engine, engines
from ...sidecar.real.pair import call, expected_tokens
from .conftest import routed
from .cutting import Cutter, check_stop_strings, cutting_router
from .same_stream import CANARY, as_chat, check_same
from .test_failures import backends, busy_backend

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]
TOKENS = 60
STREAMS = 8
LONG = 400
PROMPTS: Final = (f"{CANARY}: how far is the harbour?", f"灯台守は何を見る? 🚀😀 {CANARY}")
MODES: Final[dict[str, dict[str, Any]]] = {
    "ids": {"return_token_ids": True},
    "logprobs": {"logprobs": 2},
    "stop": {"stop": ["zzzzzzzz"]},
    "chat": {"return_token_ids": True},
}


@pytest.mark.parametrize("fails", [Engine.kill, Engine.stop])
@pytest.mark.parametrize("unified", [False, True])
async def test_a_stream_survives_its_engine(
    shared: dict[str, Engine], tmp_path: Path, unified: bool, fails: Callable[[Engine], None]
) -> None:
    prefill = () if unified else ("prefill-0",)
    chosen = await backends(shared, *prefill, "decode-0", "decode-1")
    async with routed(tmp_path / "router.yaml", chosen, "--resume") as router:
        request = call(80 + unified, tokens=TOKENS, stream=True)
        async with open_response(router.http, router.url, request) as response:
            stream = Stream(response)
            await stream.wait_for_first_bytes()
            fails(shared[await busy_backend(router, "decode")])
            result = await stream.read_to_end()
        assert (result.status, result.error) == (200, "")
        assert result.tokens == expected_tokens(request)


@pytest.mark.parametrize("unified", [False, True])
async def test_streams_leave_an_engine_that_is_told_to_end(
    shared: dict[str, Engine], tmp_path: Path, unified: bool
) -> None:
    """It finishes what runs within its shutdown timeout, but nothing is left to finish."""
    prefill = () if unified else ("prefill-0",)
    chosen = await backends(shared, *prefill, "decode-0", "decode-1")
    checks = {"path": "/health", "interval": "100ms", "unhealthy_threshold": 1}
    request = call(90 + unified, tokens=LONG, stream=True)
    path = tmp_path / "router.yaml"
    async with routed(path, chosen, "--resume", health_checks=checks) as router:
        expected = await router.ask(request)
        begun = [asyncio.Event() for _ in range(STREAMS)]

        async def ask(begins: asyncio.Event) -> ClientResult:
            async with open_response(router.http, router.url, request) as response:
                stream = Stream(response)
                await stream.wait_for_first_bytes()
                begins.set()
                return await stream.read_to_end()

        tasks = [asyncio.create_task(ask(event)) for event in begun]
        for event in begun:
            await event.wait()
        await shared["decode-0"].end()
        listed = {each["name"]: each for each in (await router.state())["backends"]}
        assert listed["decode-0"]["in_flight"] == 0
        assert listed["decode-1"]["in_flight"] == STREAMS
        for result in await asyncio.gather(*tasks):
            assert (result.status, result.error) == (200, "")
            assert result.tokens == expected.tokens


@pytest.mark.parametrize("unified", [False, True])
async def test_a_chat_survives_the_death_of_its_engine(
    shared: dict[str, Engine], tmp_path: Path, unified: bool
) -> None:
    """Its tokens are bytes, so that most texts are held back within a character at some time."""
    prefill = () if unified else ("prefill-0",)
    chosen = await backends(shared, *prefill, "decode-0", "decode-1")
    messages = [{"role": "user", "content": f"Tell me of rivers, {unified}. " * 8}]
    body = {"messages": messages, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with routed(tmp_path / "router.yaml", chosen, "--resume") as router:
        url = f"{router.url}{PATHS[RequestKind.CHAT]}"
        async with router.http.post(url, json=body) as response:
            expected = await response.json()
        async with router.http.post(url, json=body | options) as response:
            first = await response.content.readline()
            shared[await busy_backend(router, "decode")].kill()
            rest = await response.read()
    *events, usage = [json.loads(data) for data in data_of(first + rest)]
    assert [event["choices"][0]["delta"].get("role") for event in events].count("assistant") == 1
    text = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert text == expected["choices"][0]["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage["usage"][count] == expected["usage"][count]


def data_of(stream: bytes) -> list[bytes]:
    """The data of the events of a stream, which is complete, without its end."""
    *events, done, rest = stream.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [event.removeprefix(b"data: ") for event in events]


@pytest.fixture(scope="module")
def utf8_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose answers have many characters of several tokens; not started."""
    directory = tmp_path_factory.mktemp("utf8")
    make_utf8_model(directory / "model")
    flags = ("--model", str(directory / "model"))
    [engine] = engines(directory, **{"decode-0": {"flags": flags, "side_channel": False}})
    yield engine
    engine.kill()


@pytest.fixture
async def cutter(utf8_engine: Engine, tmp_path: Path) -> AsyncIterator[Cutter]:
    await utf8_engine.up()
    async with (
        aiohttp.ClientSession() as http,
        cutting_router(tmp_path / "router.yaml", utf8_engine.url, http) as made,
    ):
        yield made


def asked(prompt: str, **more: Any) -> dict[str, Any]:
    body = {"model": SERVED, "prompt": prompt, "max_tokens": 48, "stream": True, "temperature": 0}
    return {**body, "stream_options": {"include_usage": True}, **more}


@pytest.mark.parametrize("prompt", PROMPTS, ids=["ascii", "cjk"])
@pytest.mark.parametrize("mode", list(MODES))
async def test_a_stream_that_breaks_off_within_any_character_is_the_unbroken_one(
    cutter: Cutter, prompt: str, mode: str
) -> None:
    body = asked(prompt, **MODES[mode])
    body = as_chat(body) if mode.startswith("chat") else body
    whole = await cutter.whole(body)
    cuts = range(0, 48, 5)
    got = await asyncio.gather(*(cutter.broken(body, after) for after in cuts))
    for after, answer in zip(cuts, got, strict=True):
        check_same(answer, whole, f"after {after}")


@pytest.mark.parametrize("included", [False, True])
async def test_a_stop_string_across_the_seam_stops(cutter: Cutter, included: bool) -> None:
    body = asked(PROMPTS[0], include_stop_str_in_output=included, return_token_ids=True)
    await check_stop_strings(cutter, body, (2, 5, 12))
