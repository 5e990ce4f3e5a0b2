"""Streams of real vLLM that break off go on at another backend, and the client cannot tell.

One engine stands behind many names, each with a proxy that breaks answers off; an engine that is
killed is another one. The answers have many characters of several tokens (`utf8_model`).
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from tandem_contract import endpoints
from tandem_contract.plan import Target
from tandem_contract.request_kinds import PATHS, RequestKind

from ..engine.parsed_model import CALL, CONTENT, REASONING, make_parsed_model
from ..engine.utf8_model import make_utf8_model
from ..router.real.conftest import routed
from ..router.real.cutting import (
    Cutter,
    HoldingProxy,
    check_stop_strings,
    cutting_proxy,
    cutting_router,
)
from ..router.real.same_stream import CANARY, Streamed, as_chat, check_same, read_stream, stream
from ..router.real.test_failures import busy_backend
from ..sidecar.processes import drain, sidecar
from ..sidecar.real.page import figure, figures
from ..sidecar.real.test_resume import plan, with_keys
from ..sidecar.resume import answers
from .engines import MODEL_NAME
from .single import SingleVllm, single_vllm
from .test_unified import TIMES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS: Final = 48
LONG: Final = 600
"""Tokens of an answer that is still being generated when its engine is killed."""
PROMPTS: Final = {
    "ascii": f"{CANARY}: how far is the harbour at night?",
    "cjk": f"灯台守は何を見る? 🚀😀 {CANARY}",
    "words": f"the history of the printing press, {CANARY}",
}
MODEL: Final = "model"
"""Name of the directory of an engine's model."""
MOVES: Final = "tandem_sidecar_stream_moves_total"
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

_TOOL: Final = {
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
        {"tools": [{"type": "function", "function": _TOOL}], "tool_choice": "required"},
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


QWEN3: Final = ("qwen3", (*REASONING, *CONTENT, *CALL))
PARSERS: Final[Sequence[tuple[str, Sequence[str | int]]]] = (
    QWEN3,
    # Its models begin within the reasoning; of a mark that comes together with other tokens, it
    # makes a part of the reasoning.
    ("deepseek_r1", (*REASONING[1:], *CONTENT, *CALL)),
    ("qwen3", (*REASONING, *CONTENT)),
)
"""Parsers of reasoning, and answers of a model."""


@pytest.fixture(scope="module")
def parsing_engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SingleVllm]:
    """An engine of one of `PARSERS`."""
    parser, answer = request.param
    directory = tmp_path_factory.mktemp("parsing")
    make_parsed_model(directory / MODEL, answer)
    with single_vllm(directory / MODEL, directory, *parsing_flags(parser)) as engine:
        yield engine


def parsing_flags(parser: str) -> tuple[str, ...]:
    """Flags of an engine with this parser of reasoning."""
    return (
        *("--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser=hermes"),
        f"--reasoning-parser={parser}",
    )


def asked_with_tool(**more: Any) -> dict[str, Any]:
    """A chat whose answer is parsed. Drawn without a seed, it is not generated again."""
    tools = {"tools": [{"type": "function", "function": _TOOL}], "tool_choice": "auto"}
    return as_chat(asked(PROMPTS["ascii"], **{"temperature": 1.0, **tools, **more}))


@pytest.mark.parametrize("parsing_engine", PARSERS, indirect=True)
async def test_an_answer_that_is_parsed_goes_on_after_any_token(
    parsing_engine: SingleVllm, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    await parsing_engine.ready()
    async with cutting_router(tmp_path / "router.yaml", parsing_engine.url, http) as cutter:
        tokens = (await cutter.whole(asked_with_tool())).counts[1]
        # The last limit is within the call, or a character.
        for more in ({}, {"return_token_ids": True}, {"max_tokens": tokens - 3}):
            body = asked_with_tool(**more)
            streamed = await cutter.whole(body)
            whole, ids = read_again(streamed), streamed.joined("token_ids")
            assert whole["0 reasoning"] == "Two lamps日 and one"
            assert whole["0 content"].startswith("I count them")
            cuts = range(0, streamed.counts[1], 3 if more else 1)
            got = await asyncio.gather(*(cutter.broken(body, after) for after in cuts))
            for after, each in zip(cuts, got, strict=True):
                assert read_again(each) == whole, after
                assert each.joined("token_ids") == ids, after


@pytest.mark.parametrize("parsing_engine", [QWEN3], indirect=True)
async def test_a_chat_that_is_parsed_leaves_a_pod_that_drains(
    parsing_engine: SingleVllm, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """After each of its tokens, in one stream each: its engine seems to be as slow as that. The
    next pod has another engine."""
    model, keys = parsing_engine.log.parent / MODEL, tmp_path / "keys"
    keys.mkdir()
    flags = (*with_keys(keys), *TIMES)
    with single_vllm(model, tmp_path, *parsing_flags(QWEN3[0])) as other:
        await asyncio.gather(parsing_engine.ready(), other.ready())
        body = asked_with_tool(return_token_ids=True)
        whole = await stream(http, parsing_engine.url, body)
        cuts = {str(after): after for after in range(whole.counts[1])}
        async with (
            cutting_proxy(HoldingProxy, parsing_engine.url, dict(cuts)) as proxy,
            sidecar(*flags, "--engine", proxy.url, "--pod-name", "decode-0") as first,
            sidecar(*flags, "--engine", other.url, "--pod-name", "decode-1") as second,
        ):
            alternate = Target("decode-1", str(second.listen))

            async def ask(user: str) -> Streamed:
                head = plan(keys, first, "decode-0", f"r-{user}", (), alternate)
                return await stream(http, first.url(""), {**body, "user": user}, headers=head)

            streams = [asyncio.create_task(ask(user)) for user in cuts]
            sent = await proxy.holds(len(cuts))
            await drain(first.admin, wait=True)
            for after, got in enumerate(await asyncio.gather(*streams)):
                assert read_again(got) == read_again(whole), after
                assert got.joined("token_ids") == whole.joined("token_ids") != [], after
            page = await figures(first.admin_url(endpoints.METRICS))
            # Where vLLM joined its first tokens to one event, nothing was delivered.
            methods = {"continued": len(cuts) - sent.count(0), "begun_again": sent.count(0)}
            for method, count in methods.items():
                moved = {"cause": "drain", "method": method, "result": "done"}
                assert figure(page, MOVES, **moved) == count, method
            assert figure(page, MOVES) == len(cuts)


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
