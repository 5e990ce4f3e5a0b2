"""A fake engine: answers every request at once, in vLLM's format, and computes nothing.

    python -m benchmarks.fake_engine PORT [--chunks 256] [--prompt-ids 100]

A body with `"do_remote_decode":true` is answered with `kv_transfer_params`, one with
`"stream":true` with a stream of events, each sent by a system call of its own, as by an engine that
writes token by token; with `"return_token_ids":true` it has the ids of all tokens. GET shows what
was requested, so that a lost request is noticed. Of a request's framing only `content-length` is
understood: that is what h2load, Envoy, the sidecar and the load generators of `benchmarks.loadtest`
send.
"""

import asyncio
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Final, cast

import click
import uvloop

_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_ENDS: Final = 2048
"""Bytes searched at the start and at the end of a body: the prompt in between may be large."""
# Some clients write a space after the colon.
_STREAM: Final = re.compile(rb'"stream": ?true')
_WITH_USAGE: Final = re.compile(rb'"include_usage": ?true')
_WITH_IDS: Final = re.compile(rb'"return_token_ids": ?true')

_PARAMS: Final = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "fake-engine",
    "remote_request_id": "cmpl-1",
    "remote_block_ids": [list(range(1, 9))],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 100,
    "remote_prefill_cached_tokens": 0,
}


@dataclass(slots=True)
class Counts:
    """Numbers of requests; `ended` counts answers that were written completely."""

    requests: int = 0
    prefills: int = 0
    pulls: int = 0
    with_ids: int = 0
    ended: int = 0


def _answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )


def _completion(tokens: int, **extra: object) -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": " word" * tokens},
        "finish_reason": "length",
    }
    usage = {"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": 100 + tokens}
    answer = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1767225600,
        "model": "bench",
        "choices": [choice],
        "usage": usage,
    }
    return json.dumps(answer | extra, separators=(",", ":")).encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


PLAIN: Final = _completion(16)
_PLAIN: Final = _answer(PLAIN)
_PREFILL: Final = _answer(_completion(1, kv_transfer_params=_PARAMS))
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_ROLE: Final = b'{"role":"assistant","content":""}'
_TOKEN: Final = b'{"content":" word"}'


def _event(delta: bytes, ids: bytes = b"null", finish: bytes = b"null", more: bytes = b"") -> bytes:
    return (
        b'data: {"id":"chatcmpl-7f3a9c0d1e2b4f5a6b7c8d9e0f1a2b3c","object":"chat.completion.chunk",'
        b'"created":1767225600,"model":"bench","choices":[{"index":0,"delta":%b,"logprobs":null,'
        b'"finish_reason":%b,"token_ids":%b}]%b}\n\n' % (delta, finish, ids, more)
    )


def _events(chunks: int, ids: bytes, prompt_ids: bytes) -> list[bytes]:
    """The events of a stream up to its last token."""
    role = _event(_ROLE, more=b',"prompt_token_ids":%b' % prompt_ids)
    token, last = _event(_TOKEN, ids), _event(_TOKEN, ids, b'"length"')
    return [role, *[token] * (chunks - 1), last]


_DONE: Final = b"data: [DONE]\n\n"
# `vllm bench serve` asks for this API first, and uses its own tokenizer when the server lacks it.
_TOKENIZE: Final = b"POST /tokenize "
_METRICS: Final = b"GET /metrics "
_PAGE: Final = _answer(
    b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"
    b"vllm:kv_cache_usage_perc 0.0\nprocess_start_time_seconds 1.0\n"
    b'vllm:cache_config_info{block_size="16",num_gpu_blocks="10000"} 1.0\n'
)
"""The metrics page of an idle engine, for endpoint pickers."""
_NOT_FOUND: Final = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


@cache
def _usage_event(tokens: int) -> bytes:
    usage = {"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": 100 + tokens}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1767225600}
    event = head | {"model": "bench", "choices": [], "usage": usage}
    return b"data: %b\n\n" % json.dumps(event, separators=(",", ":")).encode()


def stream_size(chunks: int) -> int:
    """Bytes of a streamed answer of `chunks` tokens without usage, ids and the chunked coding."""
    return sum(map(len, _events(chunks, b"null", b"null"))) + len(_DONE)


class Streams:
    """The streamed answers, as chunks: `plain`, and those `with_ids`."""

    def __init__(self, chunks: int, prompt_ids: int) -> None:
        """`chunks`: tokens of an answer; `prompt_ids`: of a prompt."""
        self.tokens = chunks
        ids = b"[%b]" % b",".join(b"%d" % token for token in range(prompt_ids))
        self.plain = [*map(_chunk, _events(chunks, b"null", b"null"))]
        self.with_ids = [*map(_chunk, _events(chunks, b"[1000]", ids))]


class Engine(asyncio.Protocol):
    """One connection."""

    def __init__(self, counts: Counts, streams: "Streams", interval: float) -> None:
        self._counts = counts
        self._answers, self._interval = streams, interval
        self._data = b""
        self._streams: set[asyncio.Task[None]] = set()
        """Streams with an interval that are not complete."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._fd: int = transport.get_extra_info("socket").fileno()

    def data_received(self, data: bytes) -> None:
        self._data = self._data + data if self._data else data
        # Requests may be pipelined: serve all that are complete.
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._data, 0, end)
            whole = end + 4 + (int(length[1]) if length else 0)
            # The rest of the body follows with the next read.
            if len(self._data) < whole:
                return
            request, self._data = self._data[:whole], self._data[whole:]
            self._serve(request, end + 4)

    def _serve(self, request: bytes, body: int) -> None:
        if request.startswith(_METRICS):
            self._transport.write(_PAGE)
            return
        if request.startswith(b"GET"):
            self._transport.write(_answer(json.dumps(asdict(self._counts)).encode()))
            return
        if request.startswith(_TOKENIZE):
            self._transport.write(_NOT_FOUND)
            return
        counts = self._counts
        counts.requests += 1
        # The fields are at one of the ends of the body, the prompt between them.
        searched = request[body : body + _ENDS] + request[max(body, len(request) - _ENDS) :]
        if b'"do_remote_decode":true' in searched:
            counts.prefills += 1
            self._transport.write(_PREFILL)
        else:
            counts.pulls += b'"do_remote_prefill":true' in searched
            with_ids = _WITH_IDS.search(searched)
            counts.with_ids += with_ids is not None
            events = self._answers.with_ids if with_ids else self._answers.plain
            if _STREAM.search(searched) and self._interval:
                task = asyncio.get_running_loop().create_task(self._stream_slowly(events))
                self._streams.add(task)
                task.add_done_callback(self._streams.discard)
            elif _STREAM.search(searched):
                self._stream(events, with_usage=bool(_WITH_USAGE.search(searched)))
            else:
                self._transport.write(_PLAIN)
        counts.ended += 1

    def _stream(self, events: Sequence[bytes], *, with_usage: bool) -> None:
        self._send(_STREAM_HEAD)
        for event in events:
            self._send(event)
        usage = _chunk(_usage_event(self._answers.tokens)) if with_usage else b""
        self._send(usage + _chunk(_DONE) + b"0\r\n\r\n")

    async def _stream_slowly(self, events: Sequence[bytes]) -> None:
        """A stream whose events come one by one: proxies cannot combine them."""
        self._send(_STREAM_HEAD)
        *events, last = events
        for event in events:
            await asyncio.sleep(self._interval)
            self._send(event)
        self._send(last + _chunk(_DONE) + b"0\r\n\r\n")

    def _send(self, data: bytes) -> None:
        """Send now, in a TCP segment of its own; the transport would combine several writes."""
        # Only with an empty buffer, or these bytes would overtake older ones.
        if not self._transport.get_write_buffer_size():
            try:
                # Directly to the socket: the transport would combine events into one segment.
                data = data[os.write(self._fd, data) :]
            # The socket's buffer is full: the transport sends the rest when it can.
            except BlockingIOError:
                pass
            except ConnectionError:
                self._transport.abort()
                return
        if data:
            self._transport.write(data)


async def serve(
    hosts: Sequence[str], port: int, chunks: int, interval: float, prompt_ids: int = 100
) -> None:
    """Serve on the addresses `hosts` until cancelled; `interval`: seconds between the events of a
    stream, 0: as fast as possible. `prompt_ids`: how many a stream has."""
    counts, streams = Counts(), Streams(chunks, prompt_ids)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Engine(counts, streams, interval), hosts, port)
    await server.serve_forever()


@click.command()
@click.argument("port", type=int)
@click.option("--chunks", default=256, show_default=True, help="events in a stream")
@click.option("--host", "hosts", multiple=True, default=["127.0.0.1"], show_default=True)
@click.option("--interval", default=0.0, help="seconds between events")
@click.option("--prompt-ids", default=100, show_default=True, help="token ids of a prompt")
def main(port: int, chunks: int, hosts: tuple[str, ...], interval: float, prompt_ids: int) -> None:
    """Serve on PORT until killed."""
    uvloop.run(serve(hosts, port, chunks, interval, prompt_ids))


if __name__ == "__main__":
    main()
