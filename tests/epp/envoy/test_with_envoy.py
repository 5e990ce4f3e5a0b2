"""The EPP behind real Envoy, in both body modes, with HTTP backends."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from tandem_contract import headers as wire
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import load_keys
from tandem_contract.plan_verification import verify
from tandem_operator.routing.envoy.clusters import Json
from tandem_operator.routing.envoy.http_filters import BodyMode

from ..real import Backend, Epp, envoy, envoy_settings, epp, serving, until

pytestmark = [
    pytest.mark.component,
    pytest.mark.asyncio(loop_scope="module"),
]

LONG = "word " * 400
COMPLETIONS = "/v1/completions"


@dataclass
class Stack:
    url: str
    session: aiohttp.ClientSession
    epp: Epp
    decode: list[Backend]
    prefill: Backend
    keys: Path

    @property
    def received(self) -> int:
        return sum(len(backend.received) for backend in self.decode)


MODES = pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
SERVERS = pytest.mark.parametrize("server", ["http2", "grpcio"])


@asynccontextmanager
async def running(
    directory: Path,
    mode: BodyMode,
    change: Callable[[Json, list[Backend]], None] = lambda *_: None,
    plugins: Sequence[str | Json] = (),
    server: str = "http2",
    flags: tuple[str, ...] = (),
) -> AsyncIterator[Stack]:
    """Two decode backends and one prefill backend behind an EPP and Envoy; `change` may edit
    Envoy's configuration, given the decode backends; `plugins`, by type or with parameters, choose
    instead of the cost, `flags` are further ones of the EPP."""
    decode = [Backend("decode-1"), Backend("decode-2")]
    for backend in decode:
        backend.prefilled_by = "prefill-1"
    prefill = Backend("prefill-1")
    keys = directory / "keys"
    keys.mkdir()
    (keys / "k1").write_bytes(b"0123456789abcdef")
    async with AsyncExitStack() as parts:
        await parts.enter_async_context(serving(*decode, prefill))
        config = directory / "router.yaml"
        config.write_text(router_yaml(decode, prefill, plugins))
        flags = ("--plan-key-dir", str(keys), "--max-body", str(4 << 20), *flags)
        picker = await parts.enter_async_context(epp(config, *flags, "--ext-proc-server", server))
        fallback = [f"127.0.0.1:{backend.port}" for backend in decode]
        settings = envoy_settings(picker.grpc, fallback, mode, 4 << 20)
        url = await parts.enter_async_context(
            envoy(directory, settings, change=lambda bootstrap: change(bootstrap, decode))
        )
        session = await parts.enter_async_context(aiohttp.ClientSession())
        yield Stack(url, session, picker, decode, prefill, keys)


SCORERS = ("prefix-cache-scorer", "active-request-scorer", "queue-scorer")


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        ("FULL_DUPLEX_STREAMED", "http2"),
        ("BUFFERED", "http2"),
        ("FULL_DUPLEX_STREAMED", "grpcio"),
        ("BUFFERED", "grpcio"),
    ],
    ids="-".join,
)
async def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    # These backends report the same times whatever they do: the cost would learn nonsense.
    directory = tmp_path_factory.mktemp("envoy")
    mode, server = request.param
    async with running(directory, mode, plugins=SCORERS, server=server) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def stack(shared: Stack) -> Stack:
    """The shared stack with no request under way and no recorded request. Each test uses other
    prompts, because the prefix index is shared too."""
    for backend in (*shared.decode, shared.prefill):
        # A test that failed may have left requests that wait.
        backend.release.set()
    await until(lambda: at_rest(shared))
    for backend in (*shared.decode, shared.prefill):
        backend.received.clear()
        backend.release.clear()
    return shared


def router_yaml(decode: list[Backend], prefill: Backend, plugins: Sequence[str | Json] = ()) -> str:
    return json.dumps(
        {
            "plugins": [{"type": p} if isinstance(p, str) else p for p in plugins],
            "disaggregated_serving": {"enabled": True},
            "backends": [
                {"name": b.name, "url": f"http://127.0.0.1:{b.port}", "role": role, "models": ["m"]}
                for b, role in [*((b, "decode") for b in decode), (prefill, "prefill")]
            ],
        }
    )


async def post(stack: Stack, body: object, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    # A file, because aiohttp warns about large bodies given as bytes.
    data = io.BytesIO(json.dumps(body).encode())
    headers = {"content-type": "application/json", **headers}
    async with stack.session.post(stack.url + COMPLETIONS, data=data, headers=headers) as response:
        answer = await response.read()
        return response.status, answer, {k.lower(): v for k, v in response.headers.items()}


async def test_a_long_prompt_is_split_and_a_repetition_is_not(stack: Stack) -> None:
    body = {"model": "m", "prompt": LONG, "big": 9007199254740993}
    status, answer, headers = await post(stack, body)
    assert (status, answer) == (200, b"first last")
    assert wire.TIMING not in headers
    (first,) = [b for b in stack.decode if b.received]
    request = first.received[0]
    assert request.body == json.dumps(body).encode()
    assert request.headers[wire.PREFILLER_HOST_PORT] == f"127.0.0.1:{stack.prefill.port}"
    assert request.headers[wire.REQUEST_ID] == headers[wire.REQUEST_ID]
    plan = verify(
        request.headers[wire.PLAN],
        load_keys(stack.keys),
        request_id=request.headers[wire.REQUEST_ID],
        now=0.0,
    )
    assert plan.path is RoutingPath.PREFILL_THEN_DECODE
    assert (plan.decode.name, plan.prefill[0].name) == (first.name, "prefill-1")

    _, _, headers = await post(stack, body)
    assert len(first.received) == 2, "the repetition goes to the pod that caches the prompt"
    # The backends here have no sidecar, which would tell.
    assert headers[wire.ROUTING_PATH] == RoutingPath.FAST_DECODE
    assert headers[wire.DECODE_BACKEND] == first.name
    assert wire.PREFILLER_HOST_PORT not in first.received[1].headers
    figures = await stack.epp.figures()
    assert figures['tandem_epp_decisions_total{path="fast_decode",reason="cached"}'] == 1
    assert figures['tandem_epp_prefill_tokens_per_second{backend="prefill-1"}'] > 0


async def test_internal_headers_of_a_client_have_no_effect(stack: Stack) -> None:
    forged = dict.fromkeys(wire.INTERNAL, "127.0.0.1:1")
    body = {"model": "m", "prompt": "short"}
    status, _, headers = await post(stack, body, **forged, **{wire.REQUEST_ID: "mine"})
    assert status == 200
    (request,) = [request for backend in stack.decode for request in backend.received]
    internal_headers = {name for name in wire.INTERNAL if name in request.headers}
    assert internal_headers == {wire.DESTINATION_ENDPOINT, wire.ALTERNATE_ENDPOINT, wire.PLAN}
    assert "127.0.0.1:1" not in {request.headers[name] for name in internal_headers}
    assert request.headers[wire.REQUEST_ID] == headers[wire.REQUEST_ID] == "mine"


async def test_an_unusable_request_id_is_replaced_for_backend_and_client(stack: Stack) -> None:
    body = {"model": "m", "prompt": "unusable id " * 200}
    status, _, headers = await post(stack, body, **{wire.REQUEST_ID: "two words"})
    assert status == 200
    (request,) = [request for backend in stack.decode for request in backend.received]
    request_id = request.headers[wire.REQUEST_ID]
    assert headers[wire.REQUEST_ID] == request_id != "two words"
    keys = load_keys(stack.keys)
    plan = verify(request.headers[wire.PLAN], keys, request_id=request_id, now=0.0)
    assert plan.path is RoutingPath.PREFILL_THEN_DECODE


async def test_a_body_nested_too_deeply_gets_400_through_envoy(stack: Stack) -> None:
    body = b'{"model": "m", "prompt": ' + b"[" * 100_000
    headers = {"content-type": "application/json"}
    async with stack.session.post(
        stack.url + COMPLETIONS, data=io.BytesIO(body), headers=headers
    ) as response:
        assert response.status == 400
        assert "nested too deeply (byte " in (await response.json())["error"]["message"]
    assert stack.received == 0


async def test_one_mebibyte_passes_unchanged_and_five_are_refused(stack: Stack) -> None:
    body = {"model": "m", "prompt": "é" * (1 << 19)}
    status, _, _ = await post(stack, body)
    assert status == 200
    (request,) = [request for backend in stack.decode for request in backend.received]
    assert request.body == json.dumps(body).encode()
    status, answer, _ = await post(stack, {"model": "m", "prompt": "x" * (5 << 20)})
    assert (status, json.loads(answer)["error"]["code"]) == (413, 413)
    assert stack.received == 1


async def test_the_epps_errors_have_openais_format(stack: Stack) -> None:
    status, answer, _ = await post(stack, {"model": "other", "prompt": "x"})
    assert (status, json.loads(answer)["error"]["param"]) == (404, "model")
    async with stack.session.post(
        stack.url + COMPLETIONS, data=b'{"model": }', headers={"content-type": "application/json"}
    ) as response:
        assert response.status == 400
        assert "byte 10" in (await response.json())["error"]["message"]
    assert stack.received == 0


async def test_envoys_own_errors_have_openais_format(stack: Stack) -> None:
    async with stack.session.get(stack.url + "/v1/responses/die") as response:
        assert (response.status, response.content_type) == (503, "application/json")
        error = (await response.json())["error"]
    assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
    assert error["message"]


async def test_errors_of_the_messages_api_have_anthropics_format(stack: Stack) -> None:
    """Envoy's own where it buffers, else the EPP's. Not by a body that kills its engine: with those
    of the tests around it the pod would be ejected."""
    large = json.dumps({"model": "m", "messages": [], "user": "x" * (5 << 20)}).encode()
    headers = {"content-type": "application/json"}
    async with stack.session.post(
        stack.url + "/v1/messages", data=io.BytesIO(large), headers=headers
    ) as response:
        assert (response.status, response.content_type) == (413, "application/json")
        answer = await response.json()
    assert (answer["type"], answer["error"]["type"]) == ("error", "request_too_large")
    assert answer["error"]["message"]


async def test_no_header_of_a_client_makes_envoy_retry(stack: Stack) -> None:
    retry_headers = {
        "x-envoy-retry-on": "5xx,reset,gateway-error,retriable-4xx",
        "x-envoy-max-retries": "5",
        "x-envoy-hedge-on-per-try-timeout": "true",
        "x-envoy-original-dst-host": f"127.0.0.1:{stack.prefill.port}",
    }
    async with stack.session.get(
        stack.url + "/v1/responses/die", headers=retry_headers
    ) as response:
        assert response.status == 503
    (request,) = [request for backend in stack.decode for request in backend.received]
    assert "x-envoy-retry-on" not in request.headers
    assert not stack.prefill.received


async def test_a_prefill_pod_that_serves_alone_is_reported(stack: Stack) -> None:
    for backend in stack.decode:
        backend.is_down = True
    try:
        await until(lambda: stack.epp.serves("prefill-1"))
        status, answer, headers = await post(stack, {"model": "m", "prompt": "alone " + LONG})
    finally:
        for backend in stack.decode:
            backend.is_down = False
    assert (status, answer) == (200, b"first last")
    assert headers[wire.ROUTING_PATH] == RoutingPath.FALLBACK
    assert headers[wire.PREFILL_BACKEND] == headers[wire.DECODE_BACKEND] == "prefill-1"
    fallbacks = 'disaggregated_requests_total{routing_path="fallback"}'

    async def is_counted() -> bool:
        return (await stack.epp.figures())[fallbacks] == 1.0

    await until(is_counted)
    await until(lambda: stack.epp.serves("decode-1", "decode-2", "prefill-1"))


async def test_other_requests_pass_through(stack: Stack) -> None:
    async with stack.session.get(stack.url + "/v1/models") as response:
        assert response.status == 200
    blob = bytes(range(256)) * 1024
    async with stack.session.post(stack.url + "/v1/audio/transcriptions", data=blob) as response:
        assert response.status == 200
    requests = [request for backend in stack.decode for request in backend.received]
    assert sorted(request.body for request in requests) == [b"", blob]
    assert not stack.prefill.received


async def test_parallel_requests_are_spread_and_counted_to_their_end(stack: Stack) -> None:
    sent = [
        asyncio.create_task(post(stack, {"model": "m", "prompt": f"{i} slow", "user": "slow"}))
        for i in range(12)
    ]

    async def all_placed() -> bool:
        return stack.received == 12

    await until(all_placed)
    # The response headers have passed; the requests have not ended.
    assert await stack.epp.in_flight() == 12
    assert [len(backend.received) for backend in stack.decode] == [6, 6]
    for backend in stack.decode:
        backend.release.set()
    assert {status for status, _, _ in await asyncio.gather(*sent)} == {200}
    await until(lambda: nothing_in_flight(stack))


@pytest.mark.parametrize(
    "path", ["/v1/responses/hang", "/v1/responses/slow"], ids=["before", "within"]
)
async def test_a_request_is_no_longer_counted_after_its_client_disconnects(
    stack: Stack, path: str
) -> None:
    async def call() -> None:
        async with stack.session.post(stack.url + path, data=b"x") as response:
            await response.read()

    call_task = asyncio.create_task(call())

    async def placed() -> bool:
        return stack.received == 1 and await stack.epp.in_flight() == 1

    await until(placed)
    call_task.cancel()
    await until(lambda: nothing_in_flight(stack))


async def at_rest(stack: Stack) -> bool:
    figures = await stack.epp.figures()
    healthy = [v for k, v in figures.items() if k.startswith("tandem_epp_backend_healthy{")]
    return await stack.epp.in_flight() == 0 and all(healthy)


async def nothing_in_flight(stack: Stack) -> bool:
    return await stack.epp.in_flight() == 0


@MODES
async def test_without_an_epp_envoy_balances_over_decode_pods(
    tmp_path: Path, mode: BodyMode
) -> None:
    async with running(tmp_path, mode) as stack:
        stack.epp.process.kill()
        await stack.epp.process.wait()

        async def noticed() -> bool:
            return (await post(stack, {"model": "m", "prompt": "x"}))[0] == 200

        await until(noticed)
        forged = {wire.DESTINATION_ENDPOINT: f"127.0.0.1:{stack.prefill.port}"}
        for i in range(8):
            assert (await post(stack, {"model": "m", "prompt": f"p{i}"}, **forged))[0] == 200
        assert all(backend.received for backend in stack.decode)
        assert not stack.prefill.received


@MODES
@SERVERS
async def test_stopping_the_epp_cuts_no_answer(tmp_path: Path, mode: BodyMode, server: str) -> None:
    async with running(tmp_path, mode, server=server) as stack:
        slow = asyncio.create_task(post(stack, {"model": "m", "prompt": "x", "user": "slow"}))

        async def placed() -> bool:
            return stack.received == 1

        await until(placed)
        stack.epp.process.terminate()
        await stack.epp.process.wait()
        for backend in stack.decode:
            backend.release.set()
        assert (await slow)[:2] == (200, b"first last")


@SERVERS
async def test_stopping_the_epp_under_load_loses_no_request(tmp_path: Path, server: str) -> None:
    """Requests that arrive while the EPP drains are picked by it, or pass without a pick."""
    async with running(tmp_path, "BUFFERED", server=server) as stack:
        statuses: list[int] = []
        is_stopped = False

        async def client(number: int) -> None:
            while not is_stopped:
                body = {"model": "m", "prompt": f"{number} {len(statuses)}"}
                statuses.append((await post(stack, body))[0])

        clients = [asyncio.create_task(client(number)) for number in range(8)]

        async def busy() -> bool:
            return len(statuses) > 100

        await until(busy)
        stack.epp.process.terminate()
        await stack.epp.process.wait()
        before = len(statuses)

        async def went_on() -> bool:
            return len(statuses) > before + 50

        await until(went_on)
        is_stopped = True
        await asyncio.gather(*clients)
        assert set(statuses) == {200}


async def test_no_timing_header_reaches_a_client_after_the_epp_died(tmp_path: Path) -> None:
    async with running(tmp_path, "BUFFERED") as stack:

        async def call() -> tuple[int, bool]:
            async with stack.session.post(stack.url + "/v1/responses/hang", data=b"x") as response:
                await response.read()
                return response.status, wire.TIMING in response.headers

        waiting = asyncio.create_task(call())

        async def placed() -> bool:
            return stack.received == 1

        await until(placed)
        stack.epp.process.kill()
        await stack.epp.process.wait()
        for backend in stack.decode:
            backend.release.set()
        assert await waiting == (200, False)
