"""The bodies of all requests are bounded together: in bytes, number and time."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from tandem_contract.commandline import HostPort
from tandem_contract.held_bytes import HeldBytes
from tandem_engine import intake

from ..sidecar.wire import wire
from .fake_engine import FakeEngine, answer_with
from .test_server import Client, Connect, connect, model

__all__ = ["connect", "model"]
HALF = 150_000
"""Bytes of an unfinished body."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
BUSY = {"retry-after": "1"}


def address(client: Client) -> HostPort:
    return HostPort("127.0.0.1", client.port)


async def test_unfinished_bodies_are_bounded_over_all_connections(connect: Connect) -> None:
    held = HeldBytes(8 * HALF)
    client = await connect(FakeEngine(answer_with("x")), held=held)
    async with AsyncExitStack() as stack:
        uploads = [await stack.enter_async_context(wire(address(client))) for _ in range(16)]
        for upload in uploads:
            upload.send(HEAD % (2 * HALF) + bytes(HALF))
        refusals = [asyncio.create_task(upload.response()) for upload in uploads]
        async with asyncio.timeout(20):
            # An eighth of the limit is kept for small requests.
            while sum(refusal.done() for refusal in refusals) < 9:
                await asyncio.sleep(0)
        answers = [refusal.result() for refusal in refusals if refusal.done()]
        assert {answer.status for answer in answers} == {503}
        assert all(answer.headers.items() >= BUSY.items() for answer in answers)
        assert held.size <= 7 * HALF
        await client.complete()
        for refusal in refusals:
            refusal.cancel()
    async with asyncio.timeout(20):
        while held.size:
            await asyncio.sleep(0)


async def test_a_body_is_counted_until_its_answer_has_ended(connect: Connect) -> None:
    held, engine = HeldBytes(), FakeEngine()
    client = await connect(engine, held=held)
    running = asyncio.create_task(client.complete())
    await engine.submitted.wait()
    assert held.size > 0
    engine.generations[0].say(*answer_with("x")(engine.requests[0]))
    await running
    assert held.size == 0


@pytest.mark.parametrize("bound", ["IDLE_SECONDS", "BODY_SECONDS"])
async def test_a_body_that_does_not_arrive_is_timed_out(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(intake, bound, 0.05)
    client = await connect(FakeEngine())
    async with wire(address(client)) as upload:
        upload.send(HEAD % 100 + b"{")
        assert (await upload.response()).status == 408
        await upload.closed()


async def test_requests_are_bounded_in_number(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "REQUESTS", 1)
    engine = FakeEngine()
    client = await connect(engine)
    running = asyncio.create_task(client.complete())
    await engine.submitted.wait()
    status, _ = await client.post("/v1/completions", {"prompt": "x"})
    assert status == 503
    async with client.http.get("/health") as answer:
        assert answer.status == 200
    engine.generations[0].say(*answer_with("x")(engine.requests[0]))
    await running
    assert (await client.post("/tokenize", {"prompt": "x"}))[0] == 200
