"""A fake engine with a queue: prompts take their time one after the other, answers beside them.

    python -m benchmarks.queueing_engine PORT [--slots 16] [--per-token 0.0001] [--interval 0.01]

It computes nothing and speaks vLLM's API of completions, with prompts of token ids, and vLLM's
gauges. A request beyond the slots waits, in the order of arrival, as vLLM does at `max_num_seqs`.
`GET /queue` tells the longest queue since the last such request.
"""

import asyncio
import json
import time
from typing import Final

import click
from aiohttp import web

from tandem_contract import endpoints
from tandem_contract import metrics as names

_BLOCK: Final = 16
_BLOCKS: Final = 1 << 16


class QueueingEngine:
    """One engine."""

    def __init__(self, slots: int, per_token: float, interval: float) -> None:
        """`per_token`: seconds of a prompt's token; `interval`: between two of an answer."""
        self._slots = asyncio.Semaphore(slots)
        self._prefill = asyncio.Lock()
        self._per_token, self._interval = per_token, interval
        self._running = self._waiting = self._longest = 0
        self._generated = self._prompt_tokens = 0
        self._started = time.time()

    def app(self) -> web.Application:
        """Its server."""
        app = web.Application()
        app.router.add_post(endpoints.COMPLETIONS, self._complete)
        app.router.add_get(endpoints.METRICS, self._metrics)
        app.router.add_get(endpoints.HEALTH, self._health)
        app.router.add_get("/queue", self._queue)
        return app

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self._waiting += 1
        self._longest = max(self._longest, self._waiting)
        is_running = False
        try:
            async with self._slots:
                async with self._prefill:
                    is_running = True
                    self._running += 1
                    self._waiting -= 1
                    await asyncio.sleep(len(body["prompt"]) * self._per_token)
                self._prompt_tokens += len(body["prompt"])
                return await self._answer(request, body)
        finally:
            self._running -= is_running
            self._waiting -= not is_running

    async def _answer(self, request: web.Request, body: dict[str, object]) -> web.StreamResponse:
        tokens = int(str(body.get("max_tokens", 16)))
        usage = {
            "prompt_tokens": len(str(body["prompt"])),
            "completion_tokens": tokens,
            "total_tokens": tokens,
        }
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"]}
        if not body.get("stream"):
            await asyncio.sleep((tokens - 1) * self._interval)
            self._generated += tokens
            choice = {"index": 0, "text": "a " * tokens, "finish_reason": "length"}
            return web.json_response({**head, "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(tokens):
            if number:
                await asyncio.sleep(self._interval)
            finish = "length" if number == tokens - 1 else None
            choice = {"index": 0, "text": "a ", "finish_reason": finish}
            event = json.dumps({**head, "choices": [choice]})
            self._generated += 1
            await response.write(f"data: {event}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _metrics(self, _request: web.Request) -> web.Response:
        lines = {
            names.ENGINE_RUNNING: self._running,
            names.ENGINE_WAITING: self._waiting,
            names.ENGINE_KV_USAGE: 0.0,
            names.PROCESS_START_TIME: self._started,
            names.ENGINE_PROMPT_TOKENS: self._prompt_tokens,
            names.ENGINE_GENERATION_TOKENS: self._generated,
            f'{names.ENGINE_CACHE_CONFIG}{{block_size="{_BLOCK}",num_gpu_blocks="{_BLOCKS}"}}': 1,
        }
        return web.Response(text="".join(f"{name} {value}\n" for name, value in lines.items()))

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _queue(self, _request: web.Request) -> web.Response:
        longest, self._longest = self._longest, self._waiting
        return web.json_response({"longest": longest})


@click.command()
@click.argument("port", type=int)
@click.option("--slots", default=16, show_default=True, help="Requests that it computes at once.")
@click.option("--per-token", default=1e-4, show_default=True, help="Seconds per prompt token.")
@click.option("--interval", default=0.01, show_default=True, help="Seconds between two tokens.")
def main(port: int, slots: int, per_token: float, interval: float) -> None:
    """Serve a fake engine with a queue on 127.0.0.1."""
    engine = QueueingEngine(slots, per_token, interval)
    web.run_app(engine.app(), host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main()
