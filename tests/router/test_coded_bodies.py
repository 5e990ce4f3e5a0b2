"""Bodies with a Content-Encoding, which the router refuses: it checks bodies as they are."""

import json
import zlib

import pytest

from .conftest import Harness

BODY = json.dumps({"model": "m", "prompt": "hello"}).encode()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/tokenize"])
async def test_a_coded_body_reaches_no_engine(harness: Harness, path: str) -> None:
    decode = await harness.decode("d")
    await harness.start()
    for coding in ("deflate", "gzip", "identity, deflate"):
        for body in (BODY, zlib.compress(BODY)):
            for content_type in ("application/json", "application/octet-stream"):
                headers = {"content-encoding": coding, "content-type": content_type}
                async with harness.http.post(
                    harness.url(path), data=body, headers=headers
                ) as response:
                    assert response.status == 415
                    assert response.headers["accept-encoding"] == "identity"
                    assert "uncompressed" in (await response.json())["error"]["message"]
    assert decode.requests == []
    plain = {"content-encoding": "identity", "content-type": "application/json"}
    async with harness.http.post(harness.url(path), data=BODY, headers=plain) as response:
        assert response.status == 200
