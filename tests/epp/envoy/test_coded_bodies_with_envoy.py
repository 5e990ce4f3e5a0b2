"""Bodies with a Content-Encoding, refused by the EPP through Envoy before the body is read."""

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tandem_operator.routing.envoy.http_filters import BodyMode

from .test_with_envoy import COMPLETIONS, MODES, running

pytestmark = pytest.mark.component

BODY = b'{"model": "m", "prompt": "hello"}'


async def ask(url: str, lines: bytes) -> bytes:
    """The answer to a completion with header `lines`, until Envoy closes the connection."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        writer.write(
            b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n%b\r\n%b"
            % (COMPLETIONS.encode(), len(BODY), lines, BODY)
        )
        return await reader.read()
    finally:
        writer.close()


@MODES
async def test_a_coded_body_reaches_no_pod(tmp_path: Path, mode: BodyMode) -> None:
    async with running(tmp_path, mode) as stack:
        for lines in (
            b"content-encoding: deflate\r\n",
            b"Content-Encoding: identity, gzip\r\n",
            b"content-encoding: gzip\r\ncontent-encoding: identity\r\n",
            b"content-encoding: identity\r\ncontent-encoding: gzip\r\n",
        ):
            answer = await ask(stack.url, lines)
            assert answer.startswith(b"HTTP/1.1 415 "), (lines, answer)
            assert b"accept-encoding: identity\r\n" in answer
            assert b"send it uncompressed" in answer
        assert stack.received == 0
        for backend in stack.decode:
            backend.release.set()
        assert (await ask(stack.url, b"content-encoding: identity\r\n")).startswith(b"HTTP/1.1 200")
