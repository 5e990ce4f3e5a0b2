"""Streams of real vLLM that break off go on at another backend, and the client cannot tell.

One engine stands behind many names, each with a proxy that breaks answers off; an engine that is
killed is another one. The answers have many characters of several tokens (`utf8_model`).
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from ..engine.utf8_model import make_utf8_model
from ..router.real.conftest import routed
from ..router.real.cutting import Cutter, check_stop_strings, cutting_router
from ..router.real.same_stream import CANARY, as_chat, check_same, read_stream, stream
from ..router.real.test_failures import busy_backend
from .engines import MODEL_NAME
from .single import SingleVllm, single_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS: Final = 48
LONG: Final = 600
"""Tokens of an answer that is still being generated when its engine is killed."""
PROMPTS: Final = {
    "ascii": f"{CANARY}: how far is the harbour at night?",
    "cjk": f"灯台守は何を見る? 🚀😀 {CANARY}",
    "words": f"the history of the printing press, {CANARY}",
}
USAGE: Final = {"include_usage": True}
MODES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "ids": {"return_token_ids": True},
    "logprobs": {"logprobs": 2, "return_token_ids": True},
    "stop": {"stop": ["zzzzzzzz"]},
    "every-usage": {"stream_options": {**USAGE, "continuous_usage_stats": True}},
    "chat": {},
    "chat-logprobs": {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    "chat-stop": {"stop": ["zzzzzzzz"]},
}

EVERY: Final = ("plain", "chat")
"""Modes with all prompts, in which a stream of "cjk" breaks off after each of its tokens."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SingleVllm, SingleVllm]]:
    """Two engines of the same model; the last test kills one."""
    model, first, second = map(tmp_path_factory.mktemp, ("utf8-model", "first", "second"))
    make_utf8_model(model)
    with single_vllm(model, first) as one, single_vllm(model, second) as other:
        yield one, other


@pytest.fixture
async def cutter(
    engines: tuple[SingleVllm, SingleVllm], http: aiohttp.ClientSession, tmp_path: Path
) -> AsyncIterator[Cutter]:
    engine, _ = engines
    await engine.ready()
    async with cutting_router(tmp_path / "router.yaml", engine.url, http) as made:
        yield made


def asked(prompt: str, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": TOKENS, "stream": True}
    return {**body, "temperature": 0, "stream_options": USAGE, **more}


@pytest.mark.parametrize(
    ("mode", "prompt"),
    [
        *((mode, "cjk") for mode in MODES),
        *((mode, prompt) for mode in EVERY for prompt in ("ascii", "words")),
    ],
)
async def test_a_stream_that_breaks_off_after_any_token_is_the_unbroken_one(
    cutter: Cutter, prompt: str, mode: str
) -> None:
    body = asked(PROMPTS[prompt], **MODES[mode])
    body = as_chat(body) if mode.startswith("chat") else body
    whole = await cutter.whole(body)
    assert "\ufffd" not in whole.text
    # Of the others every fourth: all modes, prompts and tokens take seven minutes.
    first, step = (0, 1) if mode in EVERY and prompt == "cjk" else (list(MODES).index(mode), 4)
    cuts = range(first % step, TOKENS, step)
    got = await asyncio.gather(*(cutter.broken(body, after) for after in cuts))
    lengths: dict[int, int] = {}
    for after, answer in zip(cuts, got, strict=True):
        check_same(answer, whole, f"after {after}")
        for length, tokens in (*whole.usages, *answer.usages):
            assert lengths.setdefault(tokens, length) == length


@pytest.mark.parametrize("included", [False, True])
async def test_a_stop_string_across_the_seam_stops(cutter: Cutter, included: bool) -> None:
    body = asked(PROMPTS["ascii"], include_stop_str_in_output=included, return_token_ids=True)
    await check_stop_strings(cutter, body, range(2, 13))


async def test_a_stream_survives_the_kill_of_its_engine(
    engines: tuple[SingleVllm, SingleVllm], http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    await asyncio.gather(*(engine.ready() for engine in engines))
    body = asked(PROMPTS["cjk"], max_tokens=LONG, return_token_ids=True)
    whole = await stream(http, engines[0].url, body)
    backends = {f"decode-{n}": (engine, "decode") for n, engine in enumerate(engines)}
    flags = ("--resume", "--silence-timeout", "30s")
    async with (
        routed(tmp_path / "router.yaml", backends, *flags) as router,
        http.post(router.url + "/v1/completions", json=body) as response,
    ):
        data = await response.content.readany()
        name = await busy_backend(router, "decode")
        engines[list(backends).index(name)].signal(signal.SIGKILL)
        data += await response.content.read()
    check_same(read_stream(data), whole, "killed")
