"""The engine reads the bytes that the sidecar checked, whatever headers come with them."""

import asyncio
import json
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given, settings

from tandem_engine.chat import ChatTemplate
from tandem_engine.metrics import EngineMetrics
from tandem_engine.served_model import ServedModel
from tandem_engine.server import EngineServer
from tandem_engine.text import Tokenizer
from tandem_http1.reader import RequestReader
from tandem_sidecar.bodies.parse import BadBody, clean_passthrough

from ..engine.fake_engine import FakeEngine, answer_with, write_tokenizer
from ..engine.serving import listening
from .strategies import POLYGLOT, coded_requests

_PATH = b"/tokenize"
Headers = list[tuple[bytes, bytes]]


class Engine:
    """Tandem's engine on a socket, in an event loop of the test."""

    def __init__(self, directory: Path, loop: asyncio.Runner) -> None:
        write_tokenizer(directory)
        model = ServedModel(("m",), "/m", 64, 300, Tokenizer(directory), ChatTemplate(directory))
        server = EngineServer(FakeEngine(answer_with("a")), model, EngineMetrics("m"))
        self._serving, self._loop = listening(server.connections()), loop
        self._url = f"http://127.0.0.1:{loop.run(self._serving.__aenter__())}{_PATH.decode()}"

    def reads_a_prompt(self, headers: Headers, body: bytes) -> bool:
        """Whether the engine finds a prompt in the body."""
        return self._loop.run(self._ask(headers, body)) == 200

    def close(self) -> None:
        self._loop.run(self._serving.__aexit__(None, None, None))

    async def _ask(self, headers: Headers, body: bytes) -> int:
        lines = [(name.decode(), value.decode()) for name, value in headers]
        # What the sidecar removes, or the client would add.
        skip = ("content-type", "accept-encoding")
        async with (
            aiohttp.ClientSession(skip_auto_headers=skip) as http,
            http.post(self._url, data=body, headers=lines) as response,
        ):
            return response.status


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with asyncio.Runner() as loop:
        engine = Engine(tmp_path_factory.mktemp("model"), loop)
        yield engine
        engine.close()


def forwarded(headers: Headers, body: bytes) -> bytes | None:
    """The body that the sidecar sends on; None: it refuses the request."""
    lines = b"".join(b"%b: %b\r\n" % pair for pair in headers)
    reader = RequestReader(max_head=4096, max_body=4096)
    reader.feed(
        b"POST %b HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b"
        % (_PATH, lines, len(body), body)
    )
    if reader.refusal is not None:
        return None
    [request] = reader.requests
    with suppress(BadBody):
        return clean_passthrough(request.body, request.single(b"content-type") or b"")
    return None


def is_json(body: bytes) -> bool:
    with suppress(ValueError):
        return isinstance(json.loads(body), dict)
    return False


@pytest.mark.parametrize("coding", [None, b"identity", b"deflate", b"gzip"])
def test_json_that_is_deflate_as_well_is_read_as_json_or_refused(
    engine: Engine, coding: bytes | None
) -> None:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    inflater.decompress(POLYGLOT)
    assert inflater.eof
    headers = [] if coding is None else [(b"content-encoding", coding)]
    sent = forwarded(headers, POLYGLOT)
    if coding in (None, b"identity"):
        assert sent == POLYGLOT
    else:
        assert sent is None
    # The engine itself refuses what another proxy lets through.
    assert engine.reads_a_prompt(headers, POLYGLOT) is (sent is not None)


@settings(max_examples=150, deadline=None)
@given(coded_requests())
def test_the_engine_finds_no_prompt_where_the_sidecar_saw_none(
    engine: Engine, coded: tuple[Headers, bytes]
) -> None:
    headers, body = coded
    sent = forwarded(headers, body)
    if sent is not None:
        assert engine.reads_a_prompt(headers, sent) is is_json(sent)
