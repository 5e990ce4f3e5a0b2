"""llm-d's own EPP as a router of the simulation, asked over ext_proc as Envoy asks it.

Each request is a stream of its own in mode FULL_DUPLEX_STREAMED: headers and body, then, when its
simulated pod has the first token, the headers and the first event of the response, and at last its
end. Every message is answered before simulated time goes on. With the plugins of `configuration`
the EPP chooses by what passed these streams and by nothing that depends on real time, so that
simulated time may pass at any speed. Its scraper reads the metrics of all pods from servers here.

Beside it the policy rebuilt from its source is asked which pods it may choose, and then told of
the pod that was chosen: `agreement` is the share of choices that it may make too. It knows tokens
exactly; the EPP counts four bytes as one, so that pods whose tokens differ by its error are equal.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Final, TypeVar

import grpc.aio

from tandem_contract import headers as wire
from tandem_contract.commandline import HostPort
from tandem_epp.server.ext_proc import ext_proc_pb2 as pb
from tandem_epp.server.ext_proc.interface import SERVICE
from tandem_epp.server.ext_proc.messages import BodyMode
from tandem_planner.simulation.engine import Engine
from tandem_planner.simulation.routers import Page, Route, Router
from tandem_planner.simulation.work import Work

from ...llmd.programs import Configuration, llmd_epp
from .llmd_policy import LlmdDefault, LlmdSettings
from .workload import body

T = TypeVar("T")
_HOST: Final = "127.0.0.1"
_TOKEN: Final = b'data: {"choices":[{"text":"x"}]}\n\n'
_DONE: Final = b"data: [DONE]\n\n"
_BLOCK_TOKENS: Final = 64
_TOKEN_ERROR: Final = 0.1
"""Share by which a block of simulated text is longer or shorter than four bytes for each token."""
_MOST_TOKENS: Final = 1_000_000
"""Of a prompt, in which the EPP looks for cached blocks: all."""


def configuration(settings: LlmdSettings, cache_tokens: int) -> Configuration:
    """The plugins of llm-d's guide with the parameters `settings`, and an index of `cache_tokens`
    for each pod."""
    index = {
        "autoTune": False,
        "blockSizeTokens": _BLOCK_TOKENS,
        "lruCapacityPerServer": cache_tokens // _BLOCK_TOKENS,
        "maxPrefixTokensToMatch": _MOST_TOKENS,
    }
    affinity = {
        "affinityThreshold": settings.threshold,
        "maxTTFTPenaltyMs": 1000 * settings.penalty,
        "peakPrefillThroughput": settings.throughput,
    }
    return {
        "types": {
            "approx-prefix-cache-producer": index,
            "inflight-load-producer": {},
            "prefix-cache-affinity-filter": affinity,
            "token-load-scorer": {},
            "max-score-picker": {},
            "single-profile-handler": {},
        },
        "profiles": {
            "default": ("prefix-cache-affinity-filter", "token-load-scorer", "max-score-picker")
        },
    }


class _Page(ThreadingHTTPServer):
    """The metrics of one simulated pod."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((_HOST, 0), _PageHandler)
        self.page = b""
        Thread(target=self.serve_forever, daemon=True).start()


class _PageHandler(BaseHTTPRequestHandler):
    server: _Page
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        """Answer until the EPP, as it ends, resets the connection."""
        try:
            super().handle()
        except ConnectionResetError:
            self.close_connection = True

    def do_GET(self) -> None:
        """Answer with the page."""
        self.send_response(200)
        self.send_header("content-type", "text/plain; version=0.0.4")
        self.send_header("content-length", str(len(self.server.page)))
        self.end_headers()
        self.wfile.write(self.server.page)

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


class LlmdEpp(Router):
    """Runs llm-d's EPP over unified pods, until `close`."""

    def __init__(
        self,
        engines: Sequence[Engine],
        seed: int,
        *,
        program: Path,
        directory: Path,
        settings: LlmdSettings | None = None,
    ) -> None:
        """`program`: the EPP; `directory`: where its log and its list of pods go."""
        settings = settings or LlmdSettings()
        self.rebuilt = LlmdDefault(engines, seed, settings=settings)
        self.requests = self.agreed = 0
        """Requests placed, and those for which the rebuilt policy may choose the same."""
        self._loop, self._stack = asyncio.new_event_loop(), AsyncExitStack()
        self._streams: dict[int, Any] = {}
        self._pages = [_Page() for _ in engines]
        for page, engine in zip(self._pages, engines, strict=True):
            page.page = _metrics(Page(0, 0, 0.0, engine.pool.capacity, {}))
        self._ports = [page.server_address[1] for page in self._pages]
        plugins = configuration(settings, engines[0].pool.capacity)
        self._call = self._run(self._begin(program, directory, plugins))

    @property
    def agreement(self) -> float:
        """Share of the requests for which the rebuilt policy may choose the same pod."""
        return self.agreed / self.requests

    def close(self) -> None:
        """End the EPP."""
        self._run(self._stack.aclose())
        self._loop.close()
        for page in self._pages:
            page.shutdown()
            page.server_close()

    def choose(self, work: Work, now: float, replica: int = 0) -> Route:
        """What the EPP answers."""
        choice = Route(self._run(self._place(work)))
        self.requests += 1
        self.agreed += choice.decode in self.rebuilt.about_equal(work, _TOKEN_ERROR)
        self.rebuilt.place(work, choice, now)
        return choice

    def on_response(self, work: Work, status: int, now: float) -> None:
        """The response begins."""
        self._run(self._respond(self._streams[work.index]))
        self.rebuilt.on_response(work, status, now)

    def on_end(self, work: Work, now: float) -> None:
        """The response ends."""
        self._run(self._finish(self._streams.pop(work.index)))
        self.rebuilt.on_end(work, now)

    def on_scrape(self, pages: Sequence[Page], now: float) -> None:
        """What the EPP's own scraper reads from now on."""
        for server, page in zip(self._pages, pages, strict=True):
            server.page = _metrics(page)

    def _run(self, step: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(step)

    async def _begin(
        self, program: Path, directory: Path, plugins: Configuration
    ) -> Callable[[], Any]:
        pods = [(f"pod-{i}", "both", HostPort(_HOST, p)) for i, p in enumerate(self._ports)]
        port = await self._stack.enter_async_context(llmd_epp(program, directory, pods, plugins))
        # Every stream is open at once.
        channel = await self._stack.enter_async_context(
            grpc.aio.insecure_channel(f"{_HOST}:{port}")
        )
        return channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )

    async def _place(self, work: Work) -> int:
        call = self._streams[work.index] = self._call()
        await call.write(_request_headers(work))
        data = pb.HttpBody(body=body(work), end_of_stream=True)
        await call.write(pb.ProcessingRequest(request_body=data))
        destination = None
        async for answer in _answers(call):
            if answer.HasField("immediate_response"):
                raise ValueError(f"llm-d's EPP refused a request: {answer.immediate_response}")
            for option in answer.request_headers.response.header_mutation.set_headers:
                if option.header.key == wire.DESTINATION_ENDPOINT:
                    destination = option.header.raw_value.decode()
            mutation = answer.request_body.response.body_mutation
            if mutation.streamed_response.end_of_stream:
                break
        if destination is None:
            raise ValueError("llm-d's EPP named no pod")
        return self._ports.index(int(destination.rpartition(":")[2]))

    @staticmethod
    async def _respond(call: Any) -> None:
        message = pb.ProcessingRequest()
        for name, value in ((":status", b"200"), ("content-type", b"text/event-stream")):
            message.response_headers.headers.headers.add(key=name, raw_value=value)
        await call.write(message)
        await anext(_answers(call))
        await call.write(pb.ProcessingRequest(response_body=pb.HttpBody(body=_TOKEN)))
        await anext(_answers(call))

    @staticmethod
    async def _finish(call: Any) -> None:
        end = pb.HttpBody(body=_DONE, end_of_stream=True)
        await call.write(pb.ProcessingRequest(response_body=end))
        await anext(_answers(call))
        await call.done_writing()


async def _answers(call: Any) -> AsyncIterator[pb.ProcessingResponse]:
    while (answer := await call.read()) is not grpc.aio.EOF:
        yield answer


def _request_headers(work: Work) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    message.protocol_config.request_body_mode = BodyMode.FULL_DUPLEX_STREAMED
    message.protocol_config.response_body_mode = BodyMode.FULL_DUPLEX_STREAMED
    for name, value in (
        (":method", "POST"),
        (":path", "/v1/completions"),
        ("content-type", "application/json"),
        (wire.REQUEST_ID, f"r{work.index}"),
    ):
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    return message


def _metrics(page: Page) -> bytes:
    """The page of a pod, with vLLM's names."""
    blocks = page.cache_tokens // _BLOCK_TOKENS
    config = f'block_size="{_BLOCK_TOKENS}",num_gpu_blocks="{blocks}"'
    rows = (
        ("num_requests_running", 'model_name="m"', page.running),
        ("num_requests_waiting", 'model_name="m"', page.waiting),
        ("kv_cache_usage_perc", 'model_name="m"', page.used),
        ("cache_config_info", config, 1.0),
    )
    lines = [
        f"# TYPE vllm:{name} gauge\nvllm:{name}{{{labels}}} {value}" for name, labels, value in rows
    ]
    return "\n".join([*lines, ""]).encode()
