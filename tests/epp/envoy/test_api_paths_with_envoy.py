"""No path beside the API's gets past Envoy, nor past the EPP behind a gateway of another kind."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem_contract.api_paths import API, NOT_SERVED, ApiPaths
from tandem_operator.routing.envoy.clusters import Json
from tandem_operator.routing.envoy.http_filters import BodyMode

from ..real import Backend, envoy, envoy_settings, epp, serving, until

pytestmark = pytest.mark.component

TARGETS = (
    *("/sleep", "//sleep", "/./sleep", "/v1/../sleep", "/v1/%2e%2e/sleep", "/%73leep", "/sleep/"),
    *("/v1/models;/../sleep", "/v1/models/../../sleep", "/v1/models%2f..%2f..%2fsleep", "/SLEEP"),
    *("/sleep?/v1/models", "/v1/responses/..", "/v1/responses/../../sleep", "/\\sleep", "/"),
    *("/v1/load_lora_adapter", "/reset_prefix_cache", "/collective_rpc", "/update_weights"),
    *("/abort_requests", "/inference/v1/abort_requests", "/start_profile", "/metrics", "/docs"),
    *("/v1/messages/x", "/V1/chat/completions", "/v1/chat/completions/", "/v1//chat/completions"),
)


@dataclass
class Answer:
    status: int
    body: bytes
    content_type: str


async def ask(url: str, target: str, method: str = "POST", body: bytes = b"{}") -> Answer:
    """The answer to a request whose target is sent as it is written."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = f"{method} {target} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(f"{lines}content-length: {len(body)}\r\n\r\n".encode() + body)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:] if line)
    # A backend's answer is chunked, and of no interest here.
    content = await reader.readexactly(int(headers.get("content-length", "0")))
    writer.close()
    return Answer(int(head[0].split()[1]), content, headers.get("content-type", ""))


@asynccontextmanager
async def endpoint(
    directory: Path,
    mode: BodyMode = "BUFFERED",
    *,
    foreign: bool = False,
    added: tuple[str, ...] = (),
    flags: tuple[str, ...] = (),
) -> AsyncIterator[tuple[str, Backend]]:
    """The URL of an Envoy with an EPP, and the backend. `foreign`: Envoy has no list of paths;
    `added` are in the EPP's configuration, `flags` on its command line."""

    def change(bootstrap: Json) -> None:
        if foreign:
            (listener,) = bootstrap["static_resources"]["listeners"]
            manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
            (host,) = manager["route_config"]["virtual_hosts"]
            host["routes"] = host["routes"][:2]
            for route in host["routes"]:
                route["match"] = {**route["match"], "prefix": "/"}
                del route["match"]["path"]

    backend = Backend("decode-1")
    async with AsyncExitStack() as parts:
        await parts.enter_async_context(serving(backend))
        config = directory / "router.yaml"
        serves = {"name": backend.name, "url": f"http://127.0.0.1:{backend.port}"}
        config.write_text(
            json.dumps({"disaggregated_serving": {"api_paths": added}, "backends": [serves]})
        )
        picker = await parts.enter_async_context(epp(config, *flags))
        settings = envoy_settings(picker.grpc, body_mode=mode, api=ApiPaths(added))
        yield await parts.enter_async_context(envoy(directory, settings, change=change)), backend


@pytest.mark.parametrize("foreign", [False, True], ids=["ours", "foreign"])
@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
async def test_only_paths_of_the_api_reach_an_engine(
    tmp_path: Path, mode: BodyMode, foreign: bool
) -> None:
    async with endpoint(tmp_path, mode, foreign=foreign) as (url, backend):
        for method in ("POST", "GET", "DELETE"):
            for target in TARGETS:
                answer = await ask(url, target, method)
                # Envoy itself refuses a path that is not valid.
                assert answer.status in (404, 400), (method, target)
                if answer.status == 404:
                    error = json.loads(answer.body)["error"]
                    kind = "not_found_error" if "/messages/" in target else "NotFoundError"
                    assert (error["message"], error["type"]) == (NOT_SERVED, kind)
                    assert answer.content_type == "application/json"
        assert backend.received == []
        paths = [path.replace("*", "resp_1") for path in API]
        for path in paths:
            assert (await ask(url, path + "?x=1")).status == 200
        assert [request.path for request in backend.received] == paths


async def test_an_operator_adds_paths(tmp_path: Path) -> None:
    async with endpoint(tmp_path, added=("/version", "/custom/**")) as (url, backend):
        for target, status in (("/version", 200), ("/custom/a/b", 200), ("/custom/../x", 404)):
            assert (await ask(url, target, "GET")).status == status
        assert [request.path for request in backend.received] == ["/version", "/custom/a/b"]


async def test_a_flag_adds_paths_to_those_of_the_file(tmp_path: Path) -> None:
    flags = ("--api-path", "/version", "--api-path", "/custom/*")
    async with endpoint(tmp_path, foreign=True, added=("/info",), flags=flags) as (url, _):
        file = tmp_path / "router.yaml"
        for target, status in (("/version", 200), ("/custom/a", 200), ("/info", 200), ("/x", 404)):
            assert (await ask(url, target, "GET")).status == status
        file.write_text(file.read_text().replace("/info", "/changed"))

        async def is_reloaded() -> bool:
            return (await ask(url, "/changed", "GET")).status == 200

        await until(is_reloaded)
        for target, status in (("/version", 200), ("/info", 404)):
            assert (await ask(url, target, "GET")).status == status
