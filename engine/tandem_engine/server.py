"""The HTTP server with vLLM's API, as an aiohttp application.

    body ──protocol──► Call ──admit──► RunningSequences ──► one object, or a stream of chunks

When a client disconnects, its sequences are aborted at once. When a decode request is refused
before the engine has it, the engine has the producer free its KV, which nothing will read.

Every error is OpenAI's error object. After the 200 of a stream has been sent, an error is an event
of the stream, which then ends without `[DONE]`.
"""

import asyncio
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

from aiohttp import web

from tandem_contract import endpoints, headers
from tandem_contract.held_bytes import HeldBytes
from tandem_contract.openai_errors import error_body, error_event
from tandem_contract.request_ids import usable_request_id
from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_contract.transfer_params import TransferParams
from tandem_contract.web_connections import WebConnections

from .answers import DONE, Answer, ChatAnswer, Choice, CompletionAnswer, Head, Usage
from .body import ApiError, check_coding, decode_json, parse_kv_transfer, rejection
from .info import info_routes
from .intake import BODY, CONNECTIONS, Intake
from .long_work import work_on
from .metrics import EngineMetrics
from .output import OutputText
from .protocol import Call, parse_chat, parse_completion, resolve
from .sequences import RunningSequence, ServedEngine, merge_pieces
from .served_model import ServedModel
from .settings import DEFAULT_BODY_LIMIT
from .types import KvTransfer, Request, RequestRejected, SamplingParams

_LAST_WRITES: Final = 5.0
"""Seconds for the last writes when the server stops; `drain` has waited for the answers."""
_LONGEST_ID: Final = 256
"""Most characters of a request id. Longer than a client's limit at the EPP and the sidecar, whose
attempt ids add a suffix; with the engine's own suffix it must fit in a transfer frame."""
Parse = Callable[[Mapping[str, Any], KvTransfer], Call]


class EngineServer:
    """Serves the API of `engine`; `drain` lets requests finish before a stop."""

    def __init__(
        self,
        engine: ServedEngine,
        model: ServedModel,
        metrics: EngineMetrics,
        *,
        body_limit: int = DEFAULT_BODY_LIMIT,
        held: HeldBytes | None = None,
        reads_streams: bool = False,
    ) -> None:
        """`held` counts the bodies of all requests; None: without a limit. `reads_streams`: the
        engine can read KV while a prefill engine computes it."""
        self._engine = engine
        self._model = model
        self._metrics = metrics
        self._intake = Intake(body_limit, held or HeldBytes())
        self._reads_streams = reads_streams
        self._active: set[RunningSequence] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._releases: set[asyncio.Task[None]] = set()

    def connections(self, limit: int = CONNECTIONS) -> WebConnections:
        """Serve the application on `limit` connections. A client that disconnects cancels its
        handler."""
        app = web.Application(middlewares=[self._error_middleware])
        app.add_routes(
            [
                web.post(PATHS[RequestKind.COMPLETIONS], self._completions),
                web.post(PATHS[RequestKind.CHAT], self._chat),
                web.get(endpoints.HEALTH, self._health),
                *info_routes(self._model, self._metrics.registry),
            ]
        )
        return WebConnections(
            app, limit=limit, shutdown_seconds=_LAST_WRITES, handler_cancellation=True
        )

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests, let running ones finish and held KV be read.

        Returns whether that took at most `timeout` seconds. Requests that still run are aborted
        then: they end with an error, not with a shortened answer.
        """
        # First: requests that are parsed now are refused in `_admit`.
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
                await self._engine.wait_until_unheld()
        except TimeoutError:
            # Their handlers get ApiError 503, write it, and free their sequences.
            for sequence in self._active:
                sequence.abort()
            return False
        finally:
            # Sent before this process ends: producers would hold the unused KV for the lease.
            await asyncio.gather(*self._releases)
        return True

    @web.middleware
    async def _error_middleware(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Turn errors into OpenAI's object, aiohttp's 404 and 405 included."""
        try:
            request[BODY] = b""
            if not request.can_read_body:
                return await handler(request)
            check_coding(request.raw_headers)
            async with self._intake.body(request) as request[BODY]:
                return await handler(request)
        except ApiError as err:
            return _error(err.status, err.message, param=err.param, extra=err.headers)
        except web.HTTPException as err:
            if err.status < 400:
                raise
            message = f"{request.method} {request.path}: {err.reason}"
            # RFC 9110: a 405 answer must list the allowed methods.
            allow = {k: v for k, v in err.headers.items() if k.lower() == "allow"}
            return _error(err.status, message, extra=allow)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, parse_completion, CompletionAnswer)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, parse_chat, ChatAnswer)

    async def _generate(
        self, http: web.Request, parse: Parse, kind: type[Answer]
    ) -> web.StreamResponse:
        body = http[BODY]
        raw = await work_on(len(body), decode_json, body)
        kv = parse_kv_transfer(raw)
        request_id = _request_id(http)
        try:
            call = await work_on(len(body), parse, raw, kv)
            sequences = await self._admit(call, request_id, len(body))
        except (ApiError, asyncio.CancelledError):
            # The engine never got the request: without this, its KV would be held for the lease.
            if isinstance(kv, TransferParams):
                self._start_release(kv)
            raise
        answer = kind(
            self._model.tokenizer,
            Head(request_id, int(time.time()), call.model or self._model.names[0]),
            logprobs=call.sampling.logprobs,
            token_ids=call.return_token_ids,
        )
        params_delivered = False
        try:
            respond = self._stream if call.stream else self._respond
            response = await respond(http, call, answer, sequences)
            # A stream carries no transfer parameters, so its reader never learns where the KV is.
            params_delivered = await _is_written(http, response) and not call.stream
            return response
        finally:
            # Also when the handler is cancelled: aiohttp cancels it when the client disconnects.
            self._finish(sequences)
            if not params_delivered:
                for sequence in sequences:
                    sequence.release_hold()

    async def _admit(self, call: Call, request_id: str, size: int) -> list[RunningSequence]:
        """Submit every sequence of `call`, a body of `size` bytes, or none. Raises ApiError."""
        self._model.check_name(call.model)
        prompts = await work_on(size, self._model.prompt_ids, call)
        # After the last await above: no request slips in behind the drain.
        if self._draining:
            raise ApiError(503, "the engine is shutting down")
        samplings = [
            resolve(call, prompt, self._model.max_model_len, self._model.vocab_size)
            for prompt in prompts
        ]
        sequences: list[RunningSequence] = []
        try:
            for prompt, sampling in zip(prompts, samplings, strict=True):
                for copy in range(call.n):
                    # A client may repeat its request id; the engine needs a unique one.
                    engine_id = f"{request_id}-{secrets.token_hex(4)}"
                    request = Request(
                        *(engine_id, prompt, _seeded(sampling, copy), call.kv, call.cache_salt)
                    )
                    sequences.append(self._submit(request, call, len(sequences)))
        # All or none: the prompts of one call share one answer.
        except RequestRejected as err:
            for sequence in sequences:
                sequence.close()
            raise rejection(err) from err
        self._active.update(sequences)
        # No await since `submit`: `drain` sees either none of these sequences or all.
        self._idle.clear()
        return sequences

    def _submit(self, request: Request, call: Call, index: int) -> RunningSequence:
        prompt = request.prompt_token_ids
        return RunningSequence(
            self._engine,
            request,
            choice=Choice(index, prompt),
            output=OutputText(self._model.tokenizer, call.text, prompt),
            times=self._metrics.start_sequence(),
        )

    def _finish(self, sequences: Sequence[RunningSequence]) -> None:
        for sequence in sequences:
            sequence.close()
        self._active.difference_update(sequences)
        if not self._active:
            self._idle.set()

    async def _respond(
        self, _: web.Request, call: Call, answer: Answer, sequences: Sequence[RunningSequence]
    ) -> web.StreamResponse:
        async with aclosing(merge_pieces(sequences)) as pieces:
            async for sequence, piece in pieces:
                sequence.choice.add(piece)
        body = answer.body(
            [sequence.choice for sequence in sequences],
            _usage(call, sequences),
            sequences[0].kv_transfer_params,
        )
        return web.Response(
            body=body, content_type="application/json", headers=self._internal_headers(sequences)
        )

    async def _stream(
        self, http: web.Request, call: Call, answer: Answer, sequences: Sequence[RunningSequence]
    ) -> web.StreamResponse:
        """Send the headers with the first piece, since one of them has its timing."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        try:
            async with aclosing(merge_pieces(sequences)) as pieces:
                async for sequence, piece in pieces:
                    if not response.prepared:
                        response.headers.update(self._internal_headers(sequences))
                        await response.prepare(http)
                    usage = _usage(call, [sequence]) if call.continuous_usage else None
                    first = not sequence.started
                    sequence.started = True
                    await response.write(answer.event(sequence.choice, piece, usage, first=first))
        except ApiError as err:
            if not response.prepared:
                raise
            # The status is sent already: an error event, and a closed connection without [DONE].
            await response.write(error_event(err.status, err.message))
            response.force_close()
            return response
        if call.include_usage:
            await response.write(answer.usage_event(_usage(call, sequences)))
        await response.write(DONE)
        return response

    async def _health(self, _: web.Request) -> web.Response:
        if not self._engine.healthy:
            raise ApiError(503, "the engine has failed: its log says why")
        if self._draining:
            raise ApiError(503, "the engine is shutting down")
        return web.Response()

    def _internal_headers(self, sequences: Sequence[RunningSequence]) -> dict[str, str]:
        """What a sidecar wants to know of the engine, and the EPP of the answer."""
        if not self._reads_streams:
            return _timing(sequences)
        return {**_timing(sequences), headers.READS_STREAMS: "1"}

    def _start_release(self, params: TransferParams) -> None:
        """Release in a task of its own: a client does not wait for a producer that may be down."""
        task = asyncio.create_task(self._engine.release_remote_hold(params))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)


async def _is_written(http: web.Request, response: web.StreamResponse) -> bool:
    """Write the rest of a response. Returns whether the client was still connected."""
    try:
        await response.prepare(http)
        await response.write_eof()
    # The client has gone. That is no error here, but its KvHold must be freed.
    except OSError:
        return False
    return True


def _request_id(http: web.Request) -> str:
    """The client's request id, or a new one when it is unusable in answers or hand-offs."""
    request_id = http.headers.get(headers.REQUEST_ID)
    return usable_request_id(request_id, _LONGEST_ID) or uuid.uuid4().hex


def _seeded(sampling: SamplingParams, copy: int) -> SamplingParams:
    """Each sequence of one prompt gets a seed of its own, the same in every run."""
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=sampling.seed + copy)


def _usage(call: Call, sequences: Sequence[RunningSequence]) -> Usage:
    """The call's token counts; a prompt with several sequences counts once."""
    prompts = sequences[:: call.n]
    return Usage(
        prompt=sum(sequence.prompt_tokens for sequence in prompts),
        completion=sum(sequence.completion_tokens for sequence in sequences),
        cached=sum(_cached(call, sequence) for sequence in prompts),
    )


def _cached(call: Call, sequence: RunningSequence) -> int:
    """Tokens that the engine which computed the prompt had cached: this one, or the producer."""
    remote = call.kv.remote_prefill_cached_tokens if isinstance(call.kv, TransferParams) else None
    if remote is not None:
        return remote
    return (sequence.timing.cached if sequence.timing else None) or 0


def _timing(sequences: Sequence[RunningSequence]) -> dict[str, str]:
    value = next((s.timing.encode() for s in sequences if s.timing is not None), "")
    return {headers.TIMING: value} if value else {}


def _error(
    status: int, message: str, *, param: str | None = None, extra: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(
        status=status,
        body=error_body(status, message, param=param),
        content_type="application/json",
        headers=extra,
    )
