"""Token ids of prompts: from a model directory, from a render endpoint, and from the request."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_engine.chat import ChatTemplate
from tandem_engine.text import Tokenizer
from tandem_epp.prefix.block_keys import MediaItem, TokenizedPrompt
from tandem_epp.prefix.tokenization import TokenizerUnusable, tokenizer
from tandem_epp.prefix.tokenization.local import LocalTokenizer
from tandem_epp.prefix.tokenization.source import TextPrompt
from tandem_epp.prefix.tokenization.tokenizer import PromptTokenizer, TokenizerSettings

from ....engine.engines import tiny_model
from ...real import serving_app

COMPLETIONS, CHAT = RequestKind.COMPLETIONS, RequestKind.CHAT
MESSAGES = [{"role": "user", "content": "Which ship finds harbour?"}]


class _Tokenizer:
    """A `PromptTokenizer` and the results that it reported."""

    def __init__(self, **settings: Any) -> None:
        self.results = Counter[str]()
        settings = {"deadline": 60.0, **settings}
        self.tokenizer = PromptTokenizer(TokenizerSettings(**settings), self._observe)

    def _observe(self, result: str, seconds: float) -> None:
        assert seconds >= 0
        self.results[result] += 1

    async def tokens(self, kind: RequestKind, **body: Any) -> TokenizedPrompt | None:
        return await self.tokenizer.tokenize(kind, json.dumps(body).encode())

    async def ids(self, kind: RequestKind, **body: Any) -> list[int] | None:
        prompt = await self.tokens(kind, **body)
        return list(prompt.token_ids) if prompt is not None else None


Make = Callable[..., _Tokenizer]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[_Tokenizer] = []

    def new(**settings: Any) -> _Tokenizer:
        made.append(_Tokenizer(**settings))
        return made[-1]

    yield new
    for each in made:
        await each.tokenizer.close()


async def test_a_model_directory_gives_the_engines_own_tokens(make: Make) -> None:
    local, reference = make(directory=str(tiny_model())), Tokenizer(tiny_model())
    text = "A prompt with Ümläuts, 数 and\n\nblank lines."
    assert await local.ids(COMPLETIONS, prompt=text) == list(reference.encode(text))
    rendered = ChatTemplate(tiny_model()).render(MESSAGES, {"add_generation_prompt": True})
    expected = list(reference.encode(rendered, add_special_tokens=False))
    assert await local.ids(CHAT, messages=MESSAGES) == expected
    parts = [{**MESSAGES[0], "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    assert await local.ids(CHAT, messages=parts) == expected
    assert local.results == {"tokenized": 3}


async def test_a_response_is_the_chat_that_the_engine_makes_of_it(make: Make) -> None:
    local = make(directory=str(tiny_model()))
    question = MESSAGES[0]["content"]
    asked = await local.ids(CHAT, messages=MESSAGES)
    assert await local.ids(RequestKind.RESPONSES, input=question) == asked
    parts = [{"role": "user", "content": [{"type": "input_text", "text": question}]}]
    assert await local.ids(RequestKind.RESPONSES, input=parts) == asked
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": "All."},
        {"role": "user", "content": "Why?"},
    ]
    answer = {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "id": "msg_1",
        "content": [{"type": "output_text", "text": "All.", "annotations": []}],
    }
    system = {"role": "system", "content": "Be brief."}
    assert await local.ids(
        RequestKind.RESPONSES, instructions="Be brief.", input=[parts[0], answer, turns[-1]]
    ) == await local.ids(CHAT, messages=[system, *turns])


async def test_token_ids_need_no_tokenizer(make: Make) -> None:
    none = make()
    assert await none.ids(COMPLETIONS, prompt=[1, 2, 3]) == [1, 2, 3]
    prompt = await none.tokens(RequestKind.GENERATE, token_ids=[4, 5], cache_salt="tenant")
    assert prompt == TokenizedPrompt([4, 5], cache_salt="tenant")
    assert await none.ids(COMPLETIONS, prompt="text") is None
    assert none.results == {"given": 2, "refused": 1}


async def test_other_models_are_adapters_of_the_one_that_is_named(make: Make) -> None:
    local = make(directory=str(tiny_model()), model="base")
    for model, adapter in (("base", None), ("sql", "sql"), (None, None)):
        body = {"prompt": "hello"} if model is None else {"prompt": "hello", "model": model}
        prompt = await local.tokens(COMPLETIONS, **body)
        assert prompt is not None
        assert prompt.adapter == adapter


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (COMPLETIONS, {"prompt": ["one", "two"]}),
        (COMPLETIONS, {"prompt": [[1], [2]]}),
        (COMPLETIONS, {}),
        (CHAT, {"messages": "hello"}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (CHAT, {"messages": MESSAGES, "chat_template": "{{ messages }}"}),
        (CHAT, {"messages": [{"content": "no role"}]}),
        (CHAT, {"messages": [{"role": "user", "content": {"text": "an object"}}]}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": ["no function"]}]}),
        (CHAT, {"messages": MESSAGES, "truncate_prompt_tokens": 4}),
        (COMPLETIONS, {"prompt": "hello", "truncate_prompt_tokens": 4}),
        (COMPLETIONS, {"prompt": [1, 2, 3], "truncate_prompt_tokens": 2}),
        (RequestKind.RESPONSES, {"input": "hello", "previous_response_id": "resp_1"}),
        (RequestKind.RESPONSES, {"input": "hello", "tools": [{"type": "web_search"}]}),
        (RequestKind.RESPONSES, {"input": "hello", "reasoning": {"effort": "low"}}),
        (RequestKind.RESPONSES, {"input": [{"type": "reasoning", "summary": []}]}),
        (
            RequestKind.RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
        ),
        (
            RequestKind.RESPONSES,
            {"input": [{"role": "assistant", "content": "hel", "status": "incomplete"}]},
        ),
    ],
)
async def test_what_cannot_be_tokenized_is_placed_without(
    make: Make, kind: RequestKind, body: dict[str, Any]
) -> None:
    local = make(directory=str(tiny_model()))
    assert await local.ids(kind, **body) is None
    assert local.results == {"refused": 1}


async def test_a_prompt_is_tokenized_once_and_kept_within_the_memory(make: Make) -> None:
    local = make(directory=str(tiny_model()), cache_bytes=1200)
    ids = await local.ids(COMPLETIONS, prompt="first")
    assert await local.ids(COMPLETIONS, prompt="first") == ids
    for word in ("second", "third"):
        await local.ids(COMPLETIONS, prompt=word)
    await local.ids(COMPLETIONS, prompt="first")
    assert local.results == {"tokenized": 4, "cached": 1}


@pytest.mark.component
async def test_the_same_body_is_another_prompt_in_another_kind_of_request(make: Make) -> None:
    async def answer(path: str, body: Any) -> Any:
        rendered = {"token_ids": [len(path)]}
        return [rendered] if path.startswith("/v1/completions") else rendered

    kinds = (COMPLETIONS, CHAT, RequestKind.MESSAGES, RequestKind.RESPONSES)
    async with fake_render(answer) as url:
        client = make(url=url)
        ids = [await client.ids(kind, prompt="x", messages=[]) for kind in kinds]
        assert ids == [await client.ids(kind, prompt="x", messages=[]) for kind in kinds]
    assert ids == [[len(PATHS[kind] + "/render")] for kind in kinds]
    assert client.results == {"tokenized": 4, "cached": 4}
    assert len(set(tokenizer.SEEDS.values())) == len(RequestKind)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{", "not a tokenizer"),
        ("tokenizer.json", None, "cannot read it"),
        ("tokenizer_config.json", "[", "cannot read it"),
        ("chat_template.jinja", "{% if %}", "chat template, line 1"),
    ],
)
def test_an_unusable_directory_is_named(
    tmp_path: Path, file: str, content: str | None, message: str
) -> None:
    if file != "tokenizer.json":
        (tmp_path / "tokenizer.json").write_text((tiny_model() / "tokenizer.json").read_text())
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(TokenizerUnusable, match=message):
        PromptTokenizer(TokenizerSettings(directory=str(tmp_path)), lambda *_: None)


@asynccontextmanager
async def fake_render(answer: Callable[[str, Any], Awaitable[Any]]) -> AsyncIterator[str]:
    """A server with vLLM's render paths; `answer` gets path and body."""

    async def serve(request: web.Request) -> web.Response:
        data = await answer(request.path, await request.json())
        return data if isinstance(data, web.Response) else web.json_response(data)

    app = web.Application()
    app.router.add_post("/{path:.*}", serve)
    async with serving_app(app) as url:
        yield url


@pytest.mark.component
async def test_vllm_renders_prompts_with_media_and_salts(make: Make) -> None:
    asked = []

    async def answer(path: str, body: Any) -> Any:
        asked.append((path, body["model"]))
        rendered = {
            "token_ids": [7, 8, 9, 9, 9],
            "cache_salt": "tenant",
            "features": {
                "mm_hashes": {"image": ["cat", "dog"]},
                "mm_placeholders": {
                    "image": [{"offset": 4, "length": 1}, {"offset": 2, "length": 2}]
                },
            },
            "sampling_params": {},
        }
        return [rendered] if path.startswith("/v1/completions") else rendered

    async with fake_render(answer) as url:
        client = make(url=url + "/", model="base")
        expected = TokenizedPrompt(
            [7, 8, 9, 9, 9], "sql", "tenant", (MediaItem("dog", 2, 2), MediaItem("cat", 4, 1))
        )
        for kind in (COMPLETIONS, CHAT, RequestKind.MESSAGES):
            assert await client.tokens(kind, model="sql", prompt="x", messages=[]) == expected
    assert asked == [
        ("/v1/completions/render", "base"),
        ("/v1/chat/completions/render", "base"),
        ("/v1/messages/render", "base"),
    ]


def _rendered(hashes: dict[str, list[str]], placeholders: dict[str, list[Any]]) -> str:
    features = {"mm_hashes": hashes, "mm_placeholders": placeholders}
    return json.dumps([{"token_ids": [1, 2], "features": features}])


@pytest.mark.component
@pytest.mark.parametrize(
    "answer",
    [
        web.Response(status=404),
        web.Response(text="{"),
        web.Response(text="[]"),
        web.Response(text=_rendered({"image": ["cat"]}, {})),
        web.Response(text=_rendered({"image": ["cat"]}, {"image": []})),
        web.Response(text='[{"token_ids": [1, -1]}]'),
        web.Response(text='[{"token_ids": [1, 4294967296]}]'),
    ],
)
async def test_an_endpoint_that_does_not_render_is_no_obstacle(
    make: Make, answer: web.Response
) -> None:
    async def reply(path: str, body: Any) -> web.Response:
        return answer

    async with fake_render(reply) as url:
        client = make(url=url)
        assert await client.ids(COMPLETIONS, prompt="x") is None
    assert await client.ids(COMPLETIONS, prompt="y") is None, "nothing listens any more"
    assert client.results == {"refused": 2}


@pytest.mark.component
async def test_past_the_deadline_and_past_the_limit_requests_do_not_wait(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "MAX_PENDING", 1)
    release = asyncio.Event()

    async def answer(path: str, body: Any) -> Any:
        await release.wait()
        return [{"token_ids": [1, 2]}]

    async with fake_render(answer) as url:
        client = make(url=url, deadline=0.01)
        assert await client.ids(COMPLETIONS, prompt="x") is None
        assert await client.ids(COMPLETIONS, prompt="y") is None
        assert client.results == {"late": 1, "busy": 1}
        release.set()
        async with asyncio.timeout(30):
            # It was tokenized to its end, and is found in the cache.
            while await client.ids(COMPLETIONS, prompt="x") != [1, 2]:
                await asyncio.sleep(0.005)


def test_other_threads_run_while_a_long_prompt_is_tokenized() -> None:
    local = LocalTokenizer(tiny_model())
    prompt = TextPrompt("word " * 200_000, add_special_tokens=True, cache_salt=None)
    with ThreadPoolExecutor(1) as threads:
        tokenizing = threads.submit(local.tokenize, prompt)
        turns = 0
        while wait_for([tokenizing], timeout=0.001).not_done:
            turns += 1
    assert len(tokenizing.result().token_ids) > 200_000
    # With the interpreter's lock held there are two or three: before, after, and at the copy.
    assert turns > 10
