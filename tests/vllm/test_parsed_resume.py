"""Chats of real vLLM whose answers are parsed go on at another engine, and the client cannot tell.

Their reasoning, content and tool call are cut after each token: their engine breaks off, or drains.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from tandem_contract import endpoints
from tandem_contract.plan import Target

from ..engine.parsed_model import CALL, CONTENT, REASONING, make_parsed_model
from ..router.real.conftest import routed, write
from ..router.real.cutting import HoldingProxy, cutting_proxy, cutting_router
from ..router.real.same_stream import Streamed, as_chat, stream
from ..sidecar.processes import drain, sidecar
from ..sidecar.real.page import figure, figures
from ..sidecar.real.test_resume import plan, with_keys
from .single import SingleVllm, single_vllm
from .test_resume import PROMPTS, TOOL, asked, read_again
from .test_unified import TIMES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

MODEL: Final = "model"
"""Name of the directory of an engine's model."""
MOVES: Final = "tandem_sidecar_stream_moves_total"
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
    tools = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "auto"}
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


@pytest.fixture(scope="module")
def next_engine(
    parsing_engine: SingleVllm, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SingleVllm]:
    """Another engine like the one of `QWEN3`."""
    model, directory = parsing_engine.log.parent / MODEL, tmp_path_factory.mktemp("next")
    with single_vllm(model, directory, *parsing_flags(QWEN3[0])) as engine:
        yield engine


class HeldChats:
    """Chats that are parsed, one for each number of tokens after which their engine, which is
    `proxy`, sends nothing more."""

    def __init__(self, proxy: HoldingProxy, cuts: dict[str, int], whole: Streamed) -> None:
        self.proxy = proxy
        self._cuts, self._whole = cuts, whole
        self._streams: list[asyncio.Task[Streamed]] = []
        self._sent: list[int] = []

    async def begin(self, ask: Callable[[dict[str, Any]], Awaitable[Streamed]]) -> None:
        """Return once all are held; `ask` sends one."""
        for after in range(self._whole.counts[1]):
            self._cuts[str(after)] = after
            asking = ask({**asked_with_tool(return_token_ids=True), "user": str(after)})
            self._streams.append(asyncio.ensure_future(asking))
        self._sent = await self.proxy.holds(len(self._streams))

    async def check(self, admin: str) -> None:
        """Wait for their ends. Fail unless all went on elsewhere, as the server with this admin URL
        counts them, because their engine drained."""
        for after, got in enumerate(await asyncio.gather(*self._streams)):
            assert read_again(got) == read_again(self._whole), after
            assert got.joined("token_ids") == self._whole.joined("token_ids") != [], after
        page = await figures(admin)
        # Where vLLM joined its first tokens to one event, nothing was delivered.
        empty = self._sent.count(0)
        for method, count in (("continued", len(self._sent) - empty), ("begun_again", empty)):
            moved = {"cause": "drain", "method": method, "result": "done"}
            assert figure(page, MOVES, **moved) == count, method
        assert figure(page, MOVES) == len(self._sent)


@pytest.fixture
async def held(
    parsing_engine: SingleVllm, next_engine: SingleVllm, http: aiohttp.ClientSession
) -> AsyncIterator[HeldChats]:
    await asyncio.gather(parsing_engine.ready(), next_engine.ready())
    whole = await stream(http, next_engine.url, asked_with_tool(return_token_ids=True))
    cuts = dict[str, int]()
    async with cutting_proxy(HoldingProxy, parsing_engine.url, cuts) as proxy:
        yield HeldChats(proxy, cuts, whole)


@pytest.mark.parametrize("parsing_engine", [QWEN3], indirect=True)
async def test_a_chat_that_is_parsed_leaves_a_sidecar_that_drains(
    held: HeldChats, next_engine: SingleVllm, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    flags = (*with_keys(tmp_path), *TIMES)
    async with (
        sidecar(*flags, "--engine", held.proxy.url, "--pod-name", "decode-0") as first,
        sidecar(*flags, "--engine", next_engine.url, "--pod-name", "decode-1") as second,
    ):

        async def ask(body: dict[str, Any]) -> Streamed:
            alternate, request_id = Target("decode-1", str(second.listen)), f"r-{body['user']}"
            head = plan(tmp_path, first, "decode-0", request_id, (), alternate)
            return await stream(http, first.url(""), body, headers=head)

        await held.begin(ask)
        await drain(first.admin, wait=True)
        await held.check(first.admin_url(endpoints.METRICS))


@pytest.mark.parametrize("parsing_engine", [QWEN3], indirect=True)
async def test_a_chat_that_is_parsed_leaves_a_backend_that_drains(
    held: HeldChats, next_engine: SingleVllm, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    file, first, second = tmp_path / "router.yaml", (held.proxy, "decode"), (next_engine, "decode")
    flags = ("--resume", "--silence-timeout", "30s")
    async with routed(file, {"decode-0": first}, *flags) as router:
        await held.begin(lambda body: stream(http, router.url, body))
        write(file, {"decode-0": first, "decode-1": second})
        await router.wait_until_ready("decode-0", "decode-1")
        write(file, {"decode-1": second})
        await held.check(router.process.admin_url(endpoints.METRICS))
