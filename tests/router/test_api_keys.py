"""The router serves only clients with an API key (--api-key-dir), as Envoy does."""

from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from tandem_contract import headers
from tandem_contract.api_keys import ApiKeys
from tandem_router.main import main

from ..contract.test_api_keys import WITHOUT_KEY
from ..sidecar.peers import FakeDecode
from ..sidecar.wire import wire
from .conftest import Harness
from .processes import router

BODY = {"model": "m", "prompt": "Hi"}


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    directory = tmp_path / "keys"
    directory.mkdir()
    for client, key in (("alice", "key-a\n"), ("bob", "key-b")):
        (directory / client).write_text(key)
    return ApiKeys(directory)


async def status(harness: Harness, path: str = "/v1/completions", **sent: str) -> int:
    named = {name.replace("_", "-"): value for name, value in sent.items()}
    async with harness.http.post(harness.url(path), json=BODY, headers=named) as answer:
        await answer.read()
        return answer.status


async def test_only_clients_with_a_key_are_served(harness: Harness, keys: ApiKeys) -> None:
    decode = await harness.decode("d")
    await harness.start(api_keys=keys)
    assert await status(harness, authorization="Bearer key-a") == 200
    assert await status(harness, x_api_key="key-b") == 200
    for sent in WITHOUT_KEY:
        assert await status(harness, **sent) == 401, sent
    for path in ("/v1/models", "/health", "/no/such/path"):
        assert await status(harness, path) == 401, path
    assert await status(harness, "/no/such/path", x_api_key="key-b") == 404
    assert len(decode.requests) == 2


async def test_a_header_with_a_key_counts_once_only(harness: Harness, keys: ApiKeys) -> None:
    await harness.decode("d")
    await harness.start(api_keys=keys)
    twice = [("x-api-key", "key-a"), ("x-api-key", "other")]
    async with harness.http.post(harness.url(), json=BODY, headers=twice) as answer:
        assert answer.status == 401


async def test_no_body_is_read_of_a_client_without_a_key(harness: Harness, keys: ApiKeys) -> None:
    decode = await harness.decode("d")
    await harness.start(api_keys=keys)
    post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    for body in (
        b"content-length: 1000\r\n\r\n",
        b"content-length: 1000\r\nexpect: 100-continue\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n3e8\r\n" + bytes(1000),
    ):
        async with wire(harness.router.listen) as client:
            client.send(post + body)
            answer = await client.response()
            assert (answer.status, answer.headers["connection"]) == (401, "close")
            assert harness.router.components.server.clients.held.size == 0
    assert not decode.requests


async def test_requests_before_one_without_a_key_are_answered(
    harness: Harness, keys: ApiKeys
) -> None:
    await harness.decode("d")
    await harness.start(api_keys=keys)
    health = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    async with wire(harness.router.listen) as client:
        client.send(health + b"x-api-key: key-a\r\n\r\n" + 2 * (health + b"\r\n"))
        assert [(await client.response()).status for _ in range(2)] == [200, 401]
        assert await client.closed() == b""


async def test_head_and_upgrades_need_a_key(harness: Harness, keys: ApiKeys) -> None:
    await harness.decode("d")
    await harness.start(api_keys=keys)
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\n"
    for head, is_head in ((b"HEAD /health", True), (b"GET /v1/realtime", False)):
        async with wire(harness.router.listen) as client:
            client.send(head + b" HTTP/1.1\r\nhost: x\r\n" + upgrade + b"\r\n")
            assert (await client.response(head=is_head)).status == 401
            assert await client.closed() == b""


async def test_a_refusal_has_the_form_of_its_api(harness: Harness, keys: ApiKeys) -> None:
    await harness.decode("d")
    await harness.start(api_keys=keys)
    for path, kind in (
        ("/v1/completions", "AuthenticationError"),
        ("/v1/messages", "authentication_error"),
    ):
        async with harness.http.post(harness.url(path), data=b"{}") as answer:
            assert (answer.status, answer.content_type) == (401, "application/json")
            error = (await answer.json())["error"]
        assert error["type"] == kind
        assert error["message"]


async def test_no_engine_sees_the_key(harness: Harness, keys: ApiKeys) -> None:
    decode = await harness.decode("d")
    await harness.start(api_keys=keys)
    await status(harness, authorization="Bearer key-a")
    await status(harness, x_api_key="key-b")
    for request in decode.requests:
        assert not {"authorization", "x-api-key"} & {name.lower() for name in request.headers}


async def test_clients_are_tenants_by_their_names(harness: Harness, keys: ApiKeys) -> None:
    decode = await harness.decode("d")
    await harness.start(api_keys=keys, cache_salt={"from_header": headers.CLIENT})
    for sent in ({}, {"x_tandem_client": "bob"}):
        await status(harness, authorization="Bearer key-a", **sent)
    await status(harness, x_api_key="key-b")
    first, second, other = (request.json["cache_salt"] for request in decode.requests)
    assert first == second != other


def test_a_key_that_cannot_be_read_ends_the_start_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "alice").symlink_to("alice")  # unreadable, for root, too
    (tmp_path / "router.yaml").write_text("backends: [{name: d, url: 'http://d.invalid:8000'}]\n")
    flags = ["--config", str(tmp_path / "router.yaml"), "--api-key-dir", str(tmp_path / "keys")]
    result = CliRunner().invoke(main, flags)
    assert result.exit_code == 2
    assert f"--api-key-dir: {tmp_path}/keys/alice cannot be read" in result.output


@pytest.mark.component
async def test_keys_are_rotated_without_a_restart(tmp_path: Path, keys: ApiKeys) -> None:
    file, directory = tmp_path / "router.yaml", tmp_path / "keys"
    async with FakeDecode() as engine, aiohttp.ClientSession() as http:
        file.write_text(f"backends: [{{name: d, url: 'http://{engine.address}'}}]\n")
        async with router(file, "--api-key-dir", str(directory)) as process:

            async def answered(key: str) -> int:
                sent = {"x-api-key": key}
                async with http.post(process.url(), json=BODY, headers=sent) as answer:
                    return answer.status

            assert (await answered("key-b"), await answered("new")) == (200, 401)
            (directory / "new").write_text("new")
            (directory / "new").replace(directory / "bob")
            await process.wait_for_log("API keys of 2 clients")
            assert (await answered("key-b"), await answered("new")) == (401, 200)
