"""A chat server with known latencies and known faults, for `benchmarks.loadtest`.

    python -m benchmarks.load_server PORT --fault truncates

POST /v1/chat/completions answers with as many tokens as were asked for: the first after `--ttft`
seconds, each further token `--itl` seconds after the one before. With a fault, every fifth request
ends otherwise (`Fault`). GET /served lists what the server really did (`Served`): the truth
that the report of a load generator is compared with.
"""

import asyncio
import json
import socket
import struct
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import click
import msgspec
from aiohttp import web

_BACKLOG: Final = 4096
"""Connections that the kernel accepts while the server stalls: none of them is refused."""
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
"""SO_LINGER with zero seconds: closing the socket sends a TCP reset."""
_ERROR: Final = {
    "error": {"message": "the engine stopped", "type": "InternalServerError", "code": 500}
}


class Fault(StrEnum):
    """What goes wrong."""

    NONE = "none"
    TRUNCATES = "truncates"
    """The answer ends after one token or after half of them, in turn, without finish reason, usage
    and `[DONE]`. The HTTP response is complete."""
    IN_BAND_ERRORS = "in-band-errors"
    """The status is 200; after half of the tokens comes a chunk with `error`, and then `[DONE]`, as
    vLLM sends it."""
    CUTS = "cuts"
    """The connection is reset after half of the tokens."""
    SHEDS = "sheds"
    """Status 429 or 503, in turn."""
    STALLS = "stalls"
    """Once, the server does nothing for a second: it reads no byte and sends none."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Times in seconds."""

    ttft: float
    itl: float
    fault: Fault = Fault.NONE
    every: int = 5
    """One of so many requests meets the fault, unless it is a stall."""
    stall_at: int = 70
    """Index of the request at whose arrival the server stalls."""
    stall: float = 1.0


class Served(msgspec.Struct):
    """What the server did with one request. Times are seconds of the system's monotonic clock."""

    arrived: float
    ok: bool = False
    """Whether the answer was written completely and without a fault."""
    tokens: list[float] = msgspec.field(default_factory=list)
    """When each token was written."""


@dataclass(frozen=True, slots=True)
class Script:
    """What to do with one request."""

    tokens: int
    """How many tokens to send."""
    fault: Fault = Fault.NONE
    """What comes after these tokens; never a stall."""
    status: int = 200


def script(index: int, tokens: int, behaviour: Behaviour) -> Script:
    """What to do with the request that arrives as number `index`, from 0, and asks for `tokens`."""
    turn, place = divmod(index, behaviour.every)
    # The last of each `every` requests: the first request of a run is always answered well, which
    # load generators that probe the server first rely on.
    if behaviour.fault in (Fault.NONE, Fault.STALLS) or place != behaviour.every - 1:
        return Script(tokens)
    if behaviour.fault is Fault.SHEDS:
        return Script(0, behaviour.fault, status=503 if turn % 2 else 429)
    if behaviour.fault is Fault.TRUNCATES and not turn % 2:
        return Script(1, behaviour.fault)
    return Script(tokens // 2, behaviour.fault)


class Server:
    """Answers requests, and keeps what it did with each."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self._served: list[Served] = []
        self._arrival = asyncio.Condition()

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/served", self._list)
        app.router.add_get("/arrived/{count}", self._wait)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "bench", "object": "model"}]})

    async def _list(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._served), content_type="application/json")

    async def _wait(self, request: web.Request) -> web.Response:
        """Answer once as many requests have arrived."""
        count = int(request.match_info["count"])
        async with self._arrival:
            await self._arrival.wait_for(lambda: len(self._served) >= count)
        return web.Response()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        behaviour, index = self._behaviour, len(self._served)
        record = Served(time.monotonic())
        self._served.append(record)
        async with self._arrival:
            self._arrival.notify_all()
        if behaviour.fault is Fault.STALLS and index == behaviour.stall_at:
            # Blocks the event loop, so that every connection of the server stalls.
            asyncio.get_running_loop().call_soon(time.sleep, behaviour.stall)
        body = await request.json()
        tokens = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        plan = script(index, tokens, behaviour)
        if plan.status != 200:
            await request.read()
            return web.json_response(_ERROR, status=plan.status)
        if body.get("stream"):
            return await self._stream(request, plan, record)
        return await self._whole(request, plan, record)

    async def _stream(
        self, request: web.Request, plan: Script, record: Served
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(plan.tokens):
            await asyncio.sleep(self._behaviour.itl if number else self._behaviour.ttft)
            await response.write(_event(_delta(" word")))
            record.tokens.append(time.monotonic())
        if plan.fault is Fault.CUTS:
            _reset(request)
        elif plan.fault is Fault.IN_BAND_ERRORS:
            await response.write(_event(_ERROR) + b"data: [DONE]\n\n")
        elif plan.fault is Fault.NONE:
            await response.write(_event(_delta(None, finish="length")))
            await response.write(_event(_chunk([], usage=_usage(plan.tokens))))
            await response.write(b"data: [DONE]\n\n")
            record.ok = True
        return response

    async def _whole(
        self, request: web.Request, plan: Script, record: Served
    ) -> web.StreamResponse:
        await asyncio.sleep(self._behaviour.ttft + self._behaviour.itl * (plan.tokens - 1))
        record.ok = plan.fault is Fault.NONE
        if plan.fault is Fault.CUTS:
            _reset(request)
        if plan.fault is Fault.IN_BAND_ERRORS:
            return web.json_response(_ERROR)
        message = {"role": "assistant", "content": " word" * plan.tokens}
        choice = {"index": 0, "message": message}
        answer: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1}
        if record.ok:
            choice["finish_reason"] = "length"
            answer["usage"] = _usage(plan.tokens)
        return web.json_response(answer | {"model": "bench", "choices": [choice]})


def _reset(request: web.Request) -> None:
    transport = request.transport
    # None: the client has closed the connection already.
    if transport is not None:
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        transport.abort()


def _event(data: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % json.dumps(data, separators=(",", ":")).encode()


def _chunk(choices: list[dict[str, Any]], **extra: object) -> dict[str, Any]:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "bench"}
    return head | {"choices": choices} | extra


def _delta(content: str | None, finish: str | None = None) -> dict[str, Any]:
    delta = {} if content is None else {"content": content}
    return _chunk([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}])


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": 100 + tokens}


@click.command()
@click.argument("port", type=int)
@click.option("--ttft", default=0.1, show_default=True, help="seconds to the first token")
@click.option("--itl", default=0.02, show_default=True, help="seconds between two tokens")
@click.option("--fault", type=click.Choice([str(f) for f in Fault]), default="none")
def main(port: int, ttft: float, itl: float, fault: str) -> None:
    """Serve on 127.0.0.1:PORT until killed."""
    application = Server(Behaviour(ttft, itl, Fault(fault))).application()
    web.run_app(
        application, host="127.0.0.1", port=port, backlog=_BACKLOG, print=None, access_log=None
    )


if __name__ == "__main__":
    main()
