"""Messages of megabytes: no step of the event loop copies one as a whole."""

import asyncio
import tracemalloc
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from tandem_contract.commandline import HostPort
from tandem_epp.exchange import HttpRequest
from tandem_epp.server.ext_proc import ext_proc_pb2 as pb
from tandem_epp.server.ext_proc.http2_server import Http2Server
from tandem_epp.server.ext_proc.messages import BodyMode
from tandem_epp.server.http2 import frames
from tandem_epp.server.http2.connection import Connection
from tandem_epp.server.http2.frames import Setting
from tandem_epp.server.http2.grpc import MessageReader, framed
from tandem_epp.server.http2.headers import BlockCache
from tandem_epp.server.http2.limits import Limits
from tandem_epp.server.http2.session import GrpcSession

from ...real import until
from ..http2.client import data, headers, parse
from .test_differential import BLOCK
from .test_servers import body, head
from .test_stream import Placement, Placer

LIMIT = 8 << 20
BODY = b"0123456789" * 400_000
CHANGED = b"9876543210" * 400_000
FRAME = 16_384
FIRST = head("/v1/completions", end=False, mode=BodyMode.BUFFERED)


class Changing(Placer):
    """Changes every body to `CHANGED`."""

    def place(self, request: HttpRequest, body: bytes | None, now: float) -> Placement:
        placement = super().place(request, body, now)
        placement.body = CHANGED
        return placement


class Session:
    """The calls of a connection to a server, with one open stream."""

    def __init__(self, placer: Placer | None = None) -> None:
        self.placer = placer or Placer()
        self.written: list[bytes] = []
        """What was written while no bytes were received."""
        self.has_written = asyncio.Event()
        self.server = server = Http2Server(self.placer, HostPort("127.0.0.1", 0), LIMIT)
        limits = Limits(message=LIMIT, stream_window=2 * LIMIT, connection_window=2 * LIMIT)
        self.held = server.held
        self.session = GrpcSession(
            Connection(limits, BlockCache(), self.held),
            server.server.services,
            lambda _: None,
            on_error=lambda _: None,
            on_flush=self._flush,
        )
        self.receive(frames.PREFACE, frames.settings({Setting.INITIAL_WINDOW_SIZE: 1 << 30}))
        self.receive(frames.window_update(0, 1 << 30))
        self.receive(headers(1, BLOCK))
        self.idle = self.held.size

    def _flush(self) -> None:
        self.written.append(self.session.connection.take())
        self.has_written.set()

    def receive(self, *parts: bytes) -> list[str | None]:
        """The kinds of answers to `parts`."""
        self.session.receive(b"".join(parts), 0.0)
        sent = parse(self.session.connection.take())
        content = b"".join(f.payload for f in sent if f.kind is frames.FrameType.DATA)
        answers = MessageReader(1 << 20).feed(content)
        return [pb.ProcessingResponse.FromString(a).WhichOneof("response") for a in answers]

    def upload(self, *messages: pb.ProcessingRequest) -> list[str | None]:
        """The kinds of answers to `messages`, whose frames may end anywhere in them."""
        content = b"".join(framed(message.SerializeToString()) for message in messages)
        parts = (data(1, content[at : at + FRAME]) for at in range(0, len(content), FRAME))
        return [kind for part in parts for kind in self.receive(part)]


@pytest.fixture
async def session() -> Session:
    return Session()


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
async def test_the_end_of_a_large_message_costs_no_copy(session: Session) -> None:
    assert session.upload(FIRST) == ["request_headers"]
    content = framed(body(BODY, end=True).SerializeToString())
    for at in range(0, len(content), FRAME):
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        answers = session.receive(data(1, content[at : at + FRAME]))
        # The first megabyte is joined at once, then memory grows by an eighth at a time.
        assert tracemalloc.get_traced_memory()[1] - before < len(BODY) / 2
    assert answers == ["request_body"]
    assert session.placer.placements[0].mutation.destination.startswith(f"{len(BODY)}:")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "large",
    [
        body(BODY, end=True),
        pb.ProcessingRequest(request_body=pb.HttpBody(body=BODY)),
        pb.ProcessingRequest(
            request_body=pb.HttpBody(body=BODY), protocol_config=pb.ProtocolConfiguration()
        ),
    ],
    ids=["as Envoy sends it", "without the end", "with another field"],
)
async def test_large_messages_of_any_form(session: Session, large: pb.ProcessingRequest) -> None:
    after = pb.ProcessingRequest(response_headers=pb.HttpHeaders())
    kinds = session.upload(FIRST, large, after)
    assert kinds == ["request_headers", "request_body", "response_headers"]
    picked = dict(session.placer.placements[0].mutation.set)["picked"]
    assert picked == str(hash(BODY))
    assert session.held.size == session.idle


async def test_a_large_message_that_breaks_off(session: Session) -> None:
    session.upload(FIRST)
    content = framed(body(BODY, end=True).SerializeToString())
    for at in range(0, len(content) // 2, FRAME):
        session.receive(data(1, content[at : at + FRAME]))
    assert session.held.size > session.idle
    session.receive(frames.rst_stream(1, 8))
    assert session.held.size < session.idle
    assert not session.placer.placements


@pytest.mark.parametrize("stops", [False, True], ids=["serving", "stopping meanwhile"])
async def test_a_changed_body_is_sent_a_part_at_a_time(stops: bool) -> None:
    session = Session(Changing())
    session.server.prepare = lambda *_: nullcontext()
    assert session.upload(FIRST, body(BODY, end=True)) == ["request_headers"]
    if stops:
        await session.has_written.wait()
        assert sum(map(len, session.written)) < len(CHANGED)
        await session.server.stop(0)

    async def is_sent() -> bool:
        return sum(map(len, session.written)) > len(CHANGED)

    await until(is_sent)
    # Others have their turn between two parts.
    assert max(map(len, session.written)) < len(CHANGED) / 4
    sent = parse(b"".join(session.written))
    content = b"".join(f.payload for f in sent if f.kind is frames.FrameType.DATA)
    (answer,) = MessageReader(LIMIT).feed(content)
    response = pb.ProcessingResponse.FromString(answer).request_body.response
    assert response.body_mutation.body == CHANGED
    assert response.header_mutation.set_headers[0].header.key == "picked"
