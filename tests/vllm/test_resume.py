"""Streams of real vLLM that break off go on at another backend, and the client cannot tell.

One engine stands behind two names, each with a proxy that breaks answers off; the engine that is
killed is another one. The answers have many characters of several tokens (`utf8_model`).
"""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from tandem_loadtest.client.sse import EventParser

from ..router.real.conftest import Routed, routed
from ..router.real.test_failures import busy_backend
from .api_requests import Answer, ask, logprobs
from .cutting import cutting_proxy
from .engines import MODEL_NAME
from .single import SingleVllm, single_vllm
from .utf8_model import make_utf8_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS: Final = 48
CANARY: Final = "canary-7f3a"
"""A part of each prompt that no answer may have."""
PROMPTS: Final = (
    f"{CANARY}: how far is the harbour at night?",
    f"灯台守は何を見る? 🚀😀 {CANARY}",
    f"the history of the printing press, {CANARY}",
)
LONG: Final = 600
"""Tokens of an answer that is still being generated when its engine is killed."""
PATH: Final = "/v1/completions"
TOGETHER: Final = 4
"""Requests at a time, each of which breaks off."""
BACKENDS: Final = 3 * TOGETHER
"""Names of the engine: the router avoids a backend for a while that has failed."""
USAGE: Final = {"include_usage": True}
MODES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "ids": {"return_token_ids": True},
    "logprobs": {"logprobs": 2, "return_token_ids": True},
    "stop": {"stop": ["zzzzzzzz"]},
    "every-usage": {"stream_options": {**USAGE, "continuous_usage_stats": True}},
}


@pytest.fixture(scope="module")
def utf8_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("utf8-model")
    make_utf8_model(directory)
    return directory


@pytest.fixture(scope="module")
def engines(
    utf8_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SingleVllm, SingleVllm]]:
    """Two engines of the same model; a test may kill the second one."""
    with (
        single_vllm(utf8_model, tmp_path_factory.mktemp("first")) as first,
        single_vllm(utf8_model, tmp_path_factory.mktemp("second")) as second,
    ):
        yield first, second


class Cutter:
    """A router before two names of one engine, whose answers break off when a test says so."""

    def __init__(self, http: aiohttp.ClientSession, engine: SingleVllm) -> None:
        self.cuts: dict[str, int] = {}
        self._http, self._engine = http, engine
        self.router: Routed
        self._users = itertools.count()
        self._free = asyncio.Semaphore(TOGETHER)

    async def whole(self, body: dict[str, Any]) -> Answer:
        """The engine's own answer."""
        return await ask(self._http, self._engine.url + PATH, body)

    async def broken(self, body: dict[str, Any], after: int) -> Answer:
        """The answer through the router, where the first backend's has so many events."""
        async with self._free:
            user = str(next(self._users))
            self.cuts[user] = after
            answer = await ask(self._http, self.router.url + PATH, {**body, "user": user})
            assert user not in self.cuts
            return answer


@pytest.fixture
async def cutter(
    engines: tuple[SingleVllm, SingleVllm], http: aiohttp.ClientSession, tmp_path: Path
) -> AsyncIterator[Cutter]:
    engine, _ = engines
    await engine.ready()
    made = Cutter(http, engine)
    async with AsyncExitStack() as stack:
        proxies = [
            await stack.enter_async_context(cutting_proxy(engine.url, made.cuts))
            for _ in range(BACKENDS)
        ]
        backends = {f"decode-{n}": (proxy, "decode") for n, proxy in enumerate(proxies)}
        made.router = await stack.enter_async_context(
            routed(tmp_path / "router.yaml", backends, "--resume", "--silence-timeout", "30s")
        )
        yield made


def asked(prompt: str, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": TOKENS, "stream": True}
    return {**body, "temperature": 0, "stream_options": USAGE, **more}


@pytest.mark.parametrize("prompt", PROMPTS, ids=["ascii", "cjk", "words"])
@pytest.mark.parametrize("mode", list(MODES))
async def test_a_stream_that_breaks_off_after_any_token_is_the_unbroken_one(
    cutter: Cutter, prompt: str, mode: str
) -> None:
    body = asked(prompt, **MODES[mode])
    whole = await cutter.whole(body)
    got = await asyncio.gather(*(cutter.broken(body, after) for after in range(TOKENS)))
    for after, answer in enumerate(got):
        is_same(answer, whole, f"after {after}")
    lengths: dict[int, int] = {}
    for answer in (whole, *got):
        for length, tokens in usages(answer.chunks):
            assert lengths.setdefault(tokens, length) == length


async def test_a_stream_survives_the_kill_of_its_engine(
    engines: tuple[SingleVllm, SingleVllm], http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    await asyncio.gather(*(engine.ready() for engine in engines))
    body = asked(PROMPTS[1], max_tokens=LONG, return_token_ids=True)
    whole = await ask(http, engines[0].url + PATH, body)
    backends = {f"decode-{n}": (engine, "decode") for n, engine in enumerate(engines)}
    flags = ("--resume", "--silence-timeout", "30s")
    async with (
        routed(tmp_path / "router.yaml", backends, *flags) as router,
        http.post(router.url + PATH, json=body) as response,
    ):
        data = await response.content.readany()
        name = await busy_backend(router, "decode")
        engines[list(backends).index(name)].signal(signal.SIGKILL)
        data += await response.content.read()
    events = [event.data.decode() for event in EventParser().feed(data)]
    is_same(Answer(response.status, response.headers, data, events), whole, "killed")


def is_same(got: Answer, whole: Answer, case: str) -> None:
    """The answer is the one that no engine broke off."""
    assert got.status == 200, case
    assert got.events[-1] == "[DONE]", (case, got.events[-2:])
    chunks, expected = got.chunks, whole.chunks
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1, case
    assert text(chunks) == text(expected), case
    assert CANARY not in text(chunks), case
    assert "\ufffd" not in text(chunks), case
    assert listed(chunks, "token_ids") == listed(expected, "token_ids"), case
    assert listed(chunks, "prompt_token_ids") == listed(expected, "prompt_token_ids"), case
    assert ends(chunks) == ends(expected), case
    assert counts(got) == counts(whole), case
    assert logprobs(got) == pytest.approx(logprobs(whole), abs=1e-3), case
    assert of_logprobs(chunks, "text_offset") == of_logprobs(expected, "text_offset"), case
    assert of_logprobs(chunks, "tokens") == of_logprobs(expected, "tokens"), case


def text(chunks: Sequence[dict[str, Any]]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def listed(chunks: Sequence[dict[str, Any]], name: str) -> list[int]:
    """The ids of a member, of all events."""
    lists = [choice.get(name) or [] for chunk in chunks for choice in chunk["choices"]]
    return [i for ids in lists for i in ids]


def ends(chunks: Sequence[dict[str, Any]]) -> list[tuple[object, object]]:
    """What the events say of the answer's end."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [(c["finish_reason"], c["stop_reason"]) for c in choices if c["finish_reason"]]


def of_logprobs(chunks: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """A list of the logprobs, of all events."""
    choices = [choice["logprobs"] or {} for chunk in chunks for choice in chunk["choices"]]
    return [value for choice in choices for value in choice.get(name, ())]


def counts(answer: Answer) -> tuple[int, int, int]:
    """The last usage. How many of the prompt's tokens were cached is the engine's matter."""
    last = [chunk for chunk in answer.chunks if chunk.get("usage")][-1]["usage"]
    return last["prompt_tokens"], last["completion_tokens"], last["total_tokens"]


def usages(chunks: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """For each event with a usage: the answer's characters and tokens so far."""
    made, length = [], 0
    for chunk in chunks:
        length += len(text([chunk]))
        if chunk.get("usage"):
            made.append((length, chunk["usage"]["completion_tokens"]))
    return made
