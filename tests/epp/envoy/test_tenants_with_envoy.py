"""Two tenants behind Envoy, before a real engine: neither learns what the other has sent."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tandem_operator.routing.envoy.http_filters import BodyMode

from ...sidecar.real.engine import SERVED, engines
from ..real import envoy, envoy_settings, epp

pytestmark = [pytest.mark.component, pytest.mark.timeout(600)]

PROMPT = list(range(100, 228))
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "word " * 100}]},
}


class Client:
    """Clients of one Envoy."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, url

    async def cached_tokens(self, tenant: str, path: str, **fields: Any) -> int:
        body = {"model": SERVED, "max_tokens": 1, **BODIES[path], **fields}
        url = self._url + path
        async with self._http.post(url, json=body, headers={"x-tenant": tenant}) as answer:
            text = await answer.text()
            assert answer.status == 200, text
            return int(json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(params=["FULL_DUPLEX_STREAMED", "BUFFERED"])
async def client(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    mode: BodyMode = request.param
    async with AsyncExitStack() as parts:
        (engine,) = engines(tmp_path, engine={})
        parts.callback(engine.kill)
        await engine.up()
        config = tmp_path / "router.yaml"
        backend = {"name": "d", "url": engine.url, "models": [SERVED]}
        salts = {"from_header": "x-tenant"}
        config.write_text(json.dumps({"backends": [backend], "cache_salt": salts}))
        picker = await parts.enter_async_context(epp(config))
        settings = envoy_settings(picker.grpc, body_mode=mode)
        url = await parts.enter_async_context(envoy(tmp_path, settings))
        http = await parts.enter_async_context(aiohttp.ClientSession())
        yield Client(http, url)


async def test_no_tenant_hits_what_another_has_sent(client: Client) -> None:
    for path in BODIES:
        assert await client.cached_tokens("alice", path) == 0
        assert await client.cached_tokens("bob", path) == 0
        assert await client.cached_tokens("alice", path) > 0
        assert await client.cached_tokens("bob", path) > 0
        # A client's own salt separates further, and never joins.
        assert await client.cached_tokens("alice", path, cache_salt="mine") == 0
        assert await client.cached_tokens("bob", path, cache_salt="mine") == 0
