"""The measured hit ratio of engines that tell it as vLLM does: with the last event of a stream, to
clients that ask, and in counters."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tandem_contract.metrics import PromptSource
from tandem_local.ports import free_port
from tandem_operator.routing.envoy.bootstrap import EnvoySettings

from ...sidecar.processes import sidecar
from ..backends.engine_pages import VllmPage
from ..real import Epp, envoy, epp, serving_app, until

pytestmark = [pytest.mark.component, pytest.mark.asyncio]

BLOCK = 32
"""Tokens of a KV block."""


@dataclass
class FakeVllm:
    """An engine with a prefix cache. It sends the headers of a stream at once, and its page, usage
    and KV parameters are those of vLLM 0.32."""

    page: VllmPage = field(default_factory=VllmPage)
    computed_prompts: list[tuple[int, int]] = field(default_factory=list)
    """Tokens of each prompt that it computed, and the cached ones."""
    _prompts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        labels = self.page.model, "0"
        self._prompt_tokens = self.page.prompt.labels(*labels)
        self._by_source = {
            source: self.page.by_source.labels(*labels, source) for source in PromptSource
        }

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/health", self.health)
        app.router.add_post("/v1/completions", self.serve)
        return app

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self.page.body())

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params = body.get("kv_transfer_params") or {}
        if not body["stream"]:
            cached = self._compute(body["prompt"], is_remote=False)
            answer: dict[str, Any] = {"choices": [], "usage": _usage(body["prompt"], cached)}
            if params.get("do_remote_decode"):
                answer["kv_transfer_params"] = {
                    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p",
                    "remote_block_ids": [[1]], "remote_request_id": "r", "remote_host": "127.0.0.1",
                    "remote_port": 5600, "tp_size": 1,
                }  # fmt: skip
            return web.json_response(answer)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        cached = self._compute(body["prompt"], is_remote=bool(params.get("do_remote_prefill")))
        await response.write(b'data: {"choices":[{"text":"hello"}]}\n\n')
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"choices": [], "usage": _usage(body["prompt"], cached)}
            await response.write(f"data: {json.dumps(usage)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def _compute(self, prompt: list[int], *, is_remote: bool) -> int:
        """Count a prompt by where its KV comes from; returns the tokens in the cache."""
        shared = (_shared(prompt, other) for other in self._prompts)
        # The last token is always computed.
        cached = min(max(shared, default=0), len(prompt) - 1) // BLOCK * BLOCK
        self._prompts.append(prompt)
        rest = PromptSource.EXTERNAL if is_remote else PromptSource.COMPUTED
        self._prompt_tokens.inc(len(prompt))
        self._by_source[PromptSource.CACHED].inc(cached)
        self._by_source[rest].inc(len(prompt) - cached)
        if not is_remote:
            self.computed_prompts.append((len(prompt), cached))
        return cached


def _shared(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _usage(prompt: list[int], cached: int) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    return {"prompt_tokens": len(prompt), "completion_tokens": 1, "prompt_tokens_details": details}


@dataclass
class Stack:
    """Envoy and an EPP before fake engines, with or without a sidecar."""

    url: str
    http: aiohttp.ClientSession
    epp: Epp
    engines: Mapping[str, FakeVllm]

    async def stream(self, prompt: list[int], **fields: Any) -> None:
        body = {"model": "m", "prompt": prompt, "stream": True, "max_tokens": 2} | fields
        async with self.http.post(self.url, json=body) as answer:
            assert answer.status == 200
            assert b"hello" in await answer.read()

    async def check(self) -> None:
        """Wait until all prompts are measured; their cached tokens must be the engines' own."""
        truth = {
            name: (sum(p for p, _ in prompts), sum(c for _, c in prompts))
            for name, engine in self.engines.items()
            if (prompts := engine.computed_prompts)
        }

        async def is_measured() -> bool:
            measured = await self.measured()
            return {name: prompt for name, (prompt, _) in measured.items()} == {
                name: prompt for name, (prompt, _) in truth.items()
            }

        await until(is_measured)
        assert await self.measured() == truth

    async def measured(self) -> dict[str, tuple[float, float]]:
        """Backend → tokens of its prompts, and the cached ones, as its engine reports them."""
        figures, result = await self.epp.figures(), {}
        for name in self.engines:
            labels = f'{{backend="{name}",reported_by="engine",source="measured"}}'
            prompt = figures.get(f"tandem_epp_prompt_tokens_total{labels}", 0.0)
            if prompt:
                cached = figures[f"tandem_epp_cached_prompt_tokens_total{labels}"]
                result[name] = prompt, cached
        return result


@asynccontextmanager
async def running(directory: Path, *, has_sidecar: bool, is_split: bool) -> AsyncIterator[Stack]:
    keys = directory / "keys"
    keys.mkdir()
    (keys / "k1").write_bytes(b"0123456789abcdef")
    async with AsyncExitStack() as parts:
        engines = {
            name: FakeVllm() for name in (["decode", "prefill"] if is_split else ["unified"])
        }
        urls = {
            name: await parts.enter_async_context(serving_app(engine.app()))
            for name, engine in engines.items()
        }
        first = next(iter(urls))
        if has_sidecar:
            flags = ("--engine", urls[first], "--plan-key-dir", str(keys))
            urls[first] = (await parts.enter_async_context(sidecar(*flags))).url("")
        backends = [
            {"name": name, "url": url, "role": name, "models": ["m"]} for name, url in urls.items()
        ]
        config = directory / "router.yaml"
        config.write_text(
            json.dumps(
                {
                    "disaggregated_serving": {"enabled": is_split},
                    "plugins": [{"type": "always-disagg-pd-decider"}] if is_split else [],
                    "backends": backends,
                }
            )
        )
        picker = await parts.enter_async_context(epp(config, "--plan-key-dir", str(keys)))
        await until(lambda: picker.serves(*urls))
        settings = EnvoySettings(
            epp_address="127.0.0.1",
            epp_port=picker.grpc,
            fallback=(urls[first].removeprefix("http://"),),
            listen_address="127.0.0.1",
            listen_port=free_port("127.0.0.1"),
            admin_port=free_port("127.0.0.1"),
        )
        url = await parts.enter_async_context(envoy(directory, settings))
        http = await parts.enter_async_context(aiohttp.ClientSession())
        yield Stack(f"{url}/v1/completions", http, picker, engines)


def prompt(conversation: int, length: int) -> list[int]:
    return [1000 * conversation + i for i in range(length)]


@pytest.mark.parametrize("has_sidecar", [False, True], ids=["vLLM alone", "with a sidecar"])
async def test_streams_of_one_engine(tmp_path: Path, has_sidecar: bool) -> None:
    async with running(tmp_path, has_sidecar=has_sidecar, is_split=False) as stack:
        for usage in (False, True, False):
            for conversation in (1, 2):
                options = {"include_usage": usage}
                await stack.stream(prompt(conversation, 500), stream_options=options)
        await stack.stream(prompt(1, 900))
        await stack.check()
        [(_, cached)] = (await stack.measured()).values()
        assert cached == 4 * 480 + 480, "two conversations repeated twice, one continued"


async def test_streams_that_are_split_and_others_on_the_same_decode_pod(tmp_path: Path) -> None:
    async with running(tmp_path, has_sidecar=True, is_split=True) as stack:
        for _ in range(3):
            for conversation in (1, 2):
                await stack.stream(prompt(conversation, 500))
                # Several answers to one prompt are never split.
                await stack.stream(prompt(conversation + 4, 300), n=2)
        await stack.check()
        measured = await stack.measured()
        assert measured["prefill"] == (6 * 500, 4 * 480)
        assert measured["decode"] == (6 * 300, 4 * 288)
