"""Only the paths of the API reach the engine, however a client writes another one."""

import json

import pytest

from tandem_contract.api_paths import API, NOT_SERVED, ApiPaths
from tandem_contract.endpoints import HEALTH

from ..conftest import Harness
from ..wire import wire
from .test_passthrough import echo

SPELLINGS = (
    *("/sleep", "//sleep", "/./sleep", "/v1/../sleep", "/v1/models/../../sleep", "/%73leep"),
    *("/v1/models;/../sleep", "/sleep?/v1/models", "/sleep/", "/SLEEP", "/v1/%2e%2e/sleep"),
    *("http://x/sleep", "http://x//v1/../sleep", "/v1/responses/..", "/v1/responses/../sleep"),
    *("/v1/load_lora_adapter", "/collective_rpc", "/inference/v1/abort_requests", "*", "/"),
)


@pytest.mark.parametrize("method", ["POST", "OPTIONS"])
async def test_other_paths_do_not_reach_the_engine(harness: Harness, method: str) -> None:
    await harness.start(echo)
    async with wire(harness.sidecar.listen) as client:
        for target in SPELLINGS:
            if target == "*" and method != "OPTIONS":
                continue
            head = f"{method} {target} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            client.send(f"{head}content-length: 2\r\n\r\n{{}}".encode())
            answer = await client.response()
            assert answer.status == 404, target
            error = json.loads(answer.body)["error"]
            assert (error["message"], error["code"]) == (NOT_SERVED, 404)
        client.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.response()).status == 200
    assert [request.target for request in harness.decode.requests] == ["/v1/models"]


async def test_all_paths_of_the_api_reach_the_engine(harness: Harness) -> None:
    await harness.start(echo)
    targets = [path.replace("*", "x") for path in API if path != HEALTH]
    async with wire(harness.sidecar.listen) as client:
        for target in targets:
            client.post(b'{"prompt": "Hi"}', path=target)
            assert (await client.response()).status == 200
    assert [request.target for request in harness.decode.requests] == targets


async def test_an_upgrade_to_another_path_is_refused(harness: Harness) -> None:
    await harness.start(echo)
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"
    async with wire(harness.sidecar.listen) as client:
        client.send(b"GET /debug HTTP/1.1\r\nhost: x\r\n" + upgrade)
        assert (await client.response()).status == 404
        client.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.response()).status == 200


async def test_an_operator_adds_a_path(harness: Harness) -> None:
    await harness.start(echo, api=ApiPaths(["/version"]))
    async with wire(harness.sidecar.listen) as client:
        for target, status in (("/version", 200), ("/server_info", 404)):
            client.send(f"GET {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            assert (await client.response()).status == status


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /metrics HTTP/1.1\r\n", 200),
        ("GET /metrics HTTP/1.1\r\nx-forwarded-proto: http\r\n", 404),
        ("GET /metrics HTTP/1.1\r\nX-Forwarded-For: 10.0.0.1\r\n", 404),
        ("GET /metrics HTTP/1.1\r\nvia: 1.1 proxy\r\n", 404),
        ("POST /metrics HTTP/1.1\r\n", 404),
        ("GET /metrics/ HTTP/1.1\r\n", 404),
    ],
)
async def test_metrics_are_for_scrapes_only(harness: Harness, head: str, status: int) -> None:
    await harness.start(echo)
    async with wire(harness.sidecar.listen) as client:
        client.send(f"{head}host: x\r\n\r\n".encode())
        assert (await client.response()).status == status
