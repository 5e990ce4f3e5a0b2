"""The engine reads bodies as they are: whatever has to be decoded first is refused."""

import json
import zlib

import pytest

from .fake_engine import FakeEngine, answer_with
from .test_server import Connect, connect, model

__all__ = ["connect", "model"]

BODY = json.dumps({"prompt": "hello"}).encode()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("coding", ["gzip", "deflate", "Deflate", "identity, deflate", "br"])
@pytest.mark.parametrize("body", [BODY, zlib.compress(BODY), zlib.compress(BODY)[2:-4]])
async def test_a_coded_body_is_refused(
    connect: Connect, path: str, coding: str, body: bytes
) -> None:
    client = await connect(FakeEngine(answer_with("world")))
    headers = {"content-encoding": coding, "content-type": "application/json"}
    async with client.http.post(path, data=body, headers=headers) as response:
        assert response.status == 415
        assert response.headers["accept-encoding"] == "identity"
        assert "uncompressed" in (await response.json())["error"]["message"]
    assert client.engine.requests == []


@pytest.mark.parametrize("coding", ["", "identity"])
async def test_a_body_as_it_is_may_say_so(connect: Connect, coding: str) -> None:
    client = await connect(FakeEngine(answer_with("world")))
    async with client.http.post(
        "/v1/completions", data=BODY, headers={"content-encoding": coding}
    ) as response:
        assert response.status == 200


async def test_a_transfer_coding_other_than_chunked_is_refused(connect: Connect) -> None:
    client = await connect(FakeEngine(answer_with("world")))
    headers = {"transfer-encoding": "gzip, chunked"}
    async with client.http.post("/v1/completions", data=BODY, headers=headers) as response:
        assert response.status in (400, 501)
    assert client.engine.requests == []
