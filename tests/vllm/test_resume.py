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

from tandem_contract.request_kinds import PATHS, RequestKind

from ..engine.utf8_model import make_utf8_model
from ..router.real.conftest import routed
from ..router.real.cutting import Cutter, check_stop_strings, cutting_router
from ..router.real.same_stream import CANARY, Streamed, as_chat, check_same, read_stream, stream
from ..router.real.test_failures import busy_backend
from ..sidecar.resume import answers
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

TOOL: Final = {
    "name": "count",
    "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
}
_SCHEMA: Final = {"type": "array", "items": {"type": "integer"}, "minItems": 9}
AGAIN: Final[dict[str, tuple[RequestKind, dict[str, Any]]]] = {
    "penalties": (
        RequestKind.COMPLETIONS,
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "bad_words": ["zq"]},
    ),
    "seed": (RequestKind.COMPLETIONS, {"seed": 5, "temperature": 1, "n": 2}),
    "schema": (
        RequestKind.CHAT,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "numbers", "schema": _SCHEMA},
            }
        },
    ),
    "required": (
        RequestKind.CHAT,
        {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
    ),
    "messages": (RequestKind.MESSAGES, {}),
    "responses": (RequestKind.RESPONSES, {"max_output_tokens": TOKENS}),
}
"""Requests whose answers another engine generates again."""

EVERY: Final = ("plain", "chat")
"""Modes with all prompts, in which a stream of "cjk" breaks off after each of its tokens."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SingleVllm, SingleVllm]]:
    """Two engines of the same model, of which the second parses chats; the last test kills one."""
    model, first, second = map(tmp_path_factory.mktemp, ("utf8-model", "first", "second"))
    make_utf8_model(model)
    tools = ("--enable-auto-tool-choice", "--tool-call-parser=hermes")
    with single_vllm(model, first) as one, single_vllm(model, second, *tools) as other:
        yield one, other


@pytest.fixture
async def cutter(
    engines: tuple[SingleVllm, SingleVllm], http: aiohttp.ClientSession, tmp_path: Path
) -> AsyncIterator[Cutter]:
    engine, _ = engines
    await engine.ready()
    async with cutting_router(tmp_path / "router.yaml", engine.url, http) as made:
        yield made


@pytest.fixture
async def parsing_cutter(
    engines: tuple[SingleVllm, SingleVllm], http: aiohttp.ClientSession, tmp_path: Path
) -> AsyncIterator[Cutter]:
    _, engine = engines
    await engine.ready()
    async with cutting_router(tmp_path / "parsing.yaml", engine.url, http) as made:
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


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "return_token_ids": True}])
async def test_a_chat_that_is_parsed_goes_on(parsing_cutter: Cutter, more: dict[str, Any]) -> None:
    body = as_chat(asked(PROMPTS["cjk"], **more))
    whole = read_again(await parsing_cutter.whole(body))
    for after in (11, 37):
        got = await parsing_cutter.broken(body, after)
        assert read_again(got) == whole, after


@pytest.mark.parametrize("mode", AGAIN)
async def test_an_answer_that_is_generated_again_is_the_unbroken_one(
    cutter: Cutter, parsing_cutter: Cutter, mode: str
) -> None:
    cutter = parsing_cutter if mode == "required" else cutter
    kind, more = AGAIN[mode]
    body = asked(PROMPTS["cjk"], **more)
    if kind is RequestKind.RESPONSES:
        dropped = ("prompt", "max_tokens", "stream_options")
        body = {k: v for k, v in body.items() if k not in dropped} | {"input": body["prompt"]}
    elif kind is not RequestKind.COMPLETIONS:
        body = as_chat(body)
    whole = read_again(await cutter.whole(body, PATHS[kind]))
    for after in (3, 23):
        got = await cutter.broken(body, after, PATHS[kind])
        assert read_again(got) == whole, after


def read_again(answer: Streamed) -> dict[str, Any]:
    """What each engine answers alike: texts, ends and usage."""
    read = answers.read([f"data: {event}\n\n".encode() for event in answer.events])
    assert len(read.get("heads", [0])) == 1
    made: dict[str, Any] = {}
    for name, value in read.items():
        if isinstance(value, str):
            # The last word is the id of a response's item.
            made[name.rpartition(" ")[0] if name.startswith("response.") else name] = value
        elif name.endswith("ends"):
            made[name] = value
        elif name == "usage":
            made[name] = [value[0]["prompt_tokens"], value[0]["completion_tokens"]]
        elif name == "events":
            made[name] = [event["type"] for event in value]
        elif name.endswith("calls"):
            made[name] = value[1:]
    return made


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
