"""Scripted engines: real servers that follow the hand-off's protocol, or break it on purpose."""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, Self

from tandem_contract.commandline import HostPort

_BACKLOG: Final = 2048
"""Connections that wait to be accepted, as at vLLM: all streams of a dead engine come at once."""
PARAMS = (
    b'{"do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "engine-p",'
    b' "remote_block_ids": [[1, 2, 3]], "remote_request_id": "cmpl-p-0",'
    b' "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1,'
    b' "remote_num_tokens": 9007199254740993, "unknown": 1.50}'
)
"""Unusual spacing and numbers, so that only a verbatim copy is equal."""


@dataclass
class Received:
    """One request as an engine received it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.body)
        return parsed


@dataclass
class Turn:
    """One request being answered; `gone` is set when the peer closes meanwhile."""

    request: Received
    writer: asyncio.StreamWriter
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def answer(self, status: int, body: bytes, *headers: str) -> None:
        lines = "".join(f"{line}\r\n" for line in headers)
        head = f"HTTP/1.1 {status} Scripted\r\ncontent-type: application/json\r\n{lines}"
        self.send(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    def stream(self, *headers: str) -> None:
        lines = "".join(f"{line}\r\n" for line in headers)
        self.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            + lines.encode()
            + b"transfer-encoding: chunked\r\n\r\n"
        )

    def event(self, text: str) -> None:
        self.chunk(f"data: {text}\n\n".encode())

    def chunk(self, data: bytes) -> None:
        self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        self.send(b"0\r\n\r\n")

    def die(self) -> None:
        self.writer.transport.abort()


Script = Callable[[Turn], Awaitable[None]]


async def healthy(turn: Turn) -> None:
    turn.answer(200, b"")


async def hangs(turn: Turn) -> None:
    """Send no answer; wait until the peer closes."""
    await turn.gone.wait()


async def no_list(turn: Turn) -> None:
    turn.answer(404, b"{}")


class Peer:
    """A server on a free port whose answers come from `script`."""

    def __init__(self, script: Script | None = None) -> None:
        self.script: Script = script or self.default
        self.requests: list[Received] = []
        self.connections = 0
        self.host = "127.0.0.1"
        self.port = 0
        """Port to listen on; 0: a free one."""
        self.tls: ssl.SSLContext | None = None
        """TLS context of the server; to be set before it starts."""
        self.health: Script = healthy
        self.metrics: Script = healthy
        """Script of `/metrics`: an empty page by default."""
        self.models: Script = no_list
        """Script of the list of models for who asks on their own account, and not for a client."""
        self.arrived = asyncio.Condition()
        self._tasks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        """One for each open connection."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(
            self._serve, self.host, self.port, limit=2**26, ssl=self.tls, backlog=_BACKLOG
        )
        self.address = HostPort(self.host, self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def close_port(self) -> None:
        """Refuse connections from now on."""
        self._server.close()

    def crash(self) -> None:
        """Refuse connections, and cut those that are open, as if the process were killed."""
        self.close_port()
        for writer in self._tasks.values():
            writer.transport.abort()

    async def restart(self) -> None:
        """Serve again at the same port."""
        self.port = self.address.port
        await Peer.__aenter__(self)

    async def default(self, turn: Turn) -> None:
        turn.answer(200, b"{}")

    async def received(self, count: int) -> list[Received]:
        """The requests, once there are `count`."""
        async with self.arrived:
            await asyncio.wait_for(self.arrived.wait_for(lambda: len(self.requests) >= count), 10)
        return self.requests

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = writer
        self.connections += 1
        try:
            while request := await read_request(reader):
                await self._turn(request, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            del self._tasks[task]
            writer.close()

    async def _turn(
        self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        turn = Turn(request, writer)
        of_its_own = {"/health": self.health, "/metrics": self.metrics}
        if "x-request-id" not in request.headers:
            # What clients send gets an id on its way.
            of_its_own["/v1/models"] = self.models
        script = of_its_own.get(request.target, self.script)
        if request.target not in of_its_own:
            async with self.arrived:
                self.requests.append(request)
                self.arrived.notify_all()
        watch = asyncio.create_task(self._watch(reader, turn))
        try:
            await script(turn)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch(self, reader: asyncio.StreamReader, turn: Turn) -> None:
        """Nothing is pipelined, so a successful read means the end of the connection."""
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
        turn.gone.set()


async def read_request(reader: asyncio.StreamReader) -> Received | None:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    method, target, _ = first.split(" ")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(method, target, headers, body)


def free_pair() -> int:
    """The first of two neighbouring ports that are free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return port
            except OSError:
                continue


class FakePrefill(Peer):
    """Answers as a NIXL producer does."""

    async def default(self, turn: Turn) -> None:
        assert is_prefill(turn.request)
        await produces(turn)


async def produces(turn: Turn) -> None:
    """Answer a prefill leg."""
    body = b'{"id": "cmpl-1", "choices": [], "kv_transfer_params": ' + PARAMS + b"}"
    turn.answer(200, body, "x-tandem-timing: queue=0.5;compute=1.25;cached=7;computed=9")


def is_prefill(request: Received) -> bool:
    """Whether it is the prefill leg of a hand-off."""
    params = (request.json if request.body else {}).get("kv_transfer_params") or {}
    return params.get("do_remote_decode") is True


class FakeDecode(Peer):
    """Answers as a decode engine does; refuses models it does not serve, as the release needs."""

    def __init__(self, script: Script | None = None) -> None:
        super().__init__()
        self.generate: Script = script or self.complete
        self.releases: list[Received] = []
        self.released = asyncio.Event()

    async def default(self, turn: Turn) -> None:
        request = turn.request
        if request.body and request.json.get("model") == "tandem-release-kv":
            self.requests.remove(request)
            self.releases.append(request)
            turn.answer(404, b'{"error": {}}')
            self.released.set()
        else:
            await self.generate(turn)

    async def complete(self, turn: Turn) -> None:
        timing = "x-tandem-timing: transfer=0.125;bytes=4096"
        if not turn.request.body or not turn.request.json.get("stream"):
            turn.answer(200, b'{"choices": [{"text": "hello"}]}', timing)
            return
        turn.stream(timing)
        for word in ("one", "two"):
            turn.event(f'{{"text": "{word}"}}')
        turn.event("[DONE]")
        turn.end()


class FakeResponses(FakeDecode):
    """Stores responses as vLLM's engines do: in its own memory, under the body's `request_id`."""

    def __init__(self) -> None:
        super().__init__(self.respond)
        self.stored: dict[str, bytes] = {}

    async def respond(self, turn: Turn) -> None:
        path, _, verb = turn.request.target.removeprefix("/v1/responses").strip("/").partition("/")
        if path:
            known = path in self.stored
            answer = self.stored.get(path, self.not_found(path))
            if turn.request.method == "DELETE":
                self.stored.pop(path, None)
            turn.answer(200 if known else 404, b'{"cancelled": true}' if known and verb else answer)
            return
        body = turn.request.json
        previous = body.get("previous_response_id")
        if previous is not None and str(previous) not in self.stored:
            turn.answer(404, self.not_found(str(previous)))
            return
        response_id = body.get("request_id", f"resp_{len(self.requests)}")
        answer = json.dumps({"id": response_id, "previous_response_id": previous}).encode()
        if body.get("store", True):
            self.stored[response_id] = answer
        if not body.get("stream"):
            turn.answer(200, answer)
            return
        turn.stream()
        turn.event(json.dumps({"type": "response.created", "response": json.loads(answer)}))
        turn.event(json.dumps({"type": "response.completed", "response": json.loads(answer)}))
        turn.end()

    def not_found(self, response_id: str) -> bytes:
        message = f"Response with id '{response_id}' not found."
        return json.dumps({"error": {"message": message, "code": 404}}).encode()
