"""`routing.maxRequestBytes` above its default: a large body through Envoy, EPP and sidecar.

They have the flags that the operator gives them. The engine is a scripted one, which keeps what it
received.
"""

import io
import json
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from tandem_operator.pods.containers import body_limit_flag
from tandem_operator.routing.envoy.http_filters import BodyMode

from ...sidecar.peers import FakeDecode
from ...sidecar.processes import sidecar
from ..real import envoy, envoy_settings, epp
from .test_with_envoy import MODES

pytestmark = pytest.mark.component

LIMIT = 24 << 20
HEADERS = {"content-type": "application/json"}


def chat_with_image(size: int) -> bytes:
    """A chat request of `size` bytes, nearly all of which are an image."""
    parts = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
    ]
    body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": parts}]}
    start, end = json.dumps(body).encode().split(b"base64,")
    start += b"base64,"
    return start + b"A" * (size - len(start) - len(end)) + end


@MODES
async def test_a_body_over_16_mib_reaches_the_engine_unchanged(
    tmp_path: Path, mode: BodyMode
) -> None:
    flags = (*body_limit_flag(LIMIT), "--held-bytes", str(4 * LIMIT))
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeDecode())
        front = await stack.enter_async_context(sidecar("--engine", engine.url, *flags))
        backend = {"name": "d", "role": "decode", "url": f"http://{front.listen}", "models": ["m"]}
        config = tmp_path / "router.yaml"
        config.write_text(
            json.dumps({"disaggregated_serving": {"enabled": False}, "backends": [backend]})
        )
        picker = await stack.enter_async_context(epp(config, *flags))
        settings = envoy_settings(picker.grpc, [str(front.listen)], mode, LIMIT)
        url = await stack.enter_async_context(envoy(tmp_path, settings))
        url += "/v1/chat/completions"
        http = await stack.enter_async_context(aiohttp.ClientSession())
        with_image = chat_with_image(LIMIT - 1)
        async with http.post(url, data=io.BytesIO(with_image), headers=HEADERS) as answer:
            assert answer.status == 200, await answer.text()
        generations = [each for each in engine.requests if each.method == "POST"]
        assert [each.body == with_image for each in generations] == [True]
        try:
            async with http.post(
                url, data=io.BytesIO(chat_with_image(LIMIT + 1)), headers=HEADERS
            ) as answer:
                assert answer.status == 413
        except aiohttp.ClientConnectionError:
            # Envoy closes the connection behind an answer to a body that is still coming.
            pass
        assert [each for each in engine.requests if each.method == "POST"] == generations
