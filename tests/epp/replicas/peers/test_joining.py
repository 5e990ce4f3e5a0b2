"""A replica that starts is ready once it knows what the others know."""

import asyncio

import aiohttp
import pytest

from tandem_epp.replicas.peers import channel
from tandem_epp.replicas.peers.frames import PATH
from tandem_epp.replicas.peers.outbox import MAX_FRAME
from tests.epp.replicas.peers.replicas import (
    OTHER_KEYS,
    mesh,
    new_address,
    replica,
    until,
)

pytestmark = pytest.mark.component


@pytest.fixture(autouse=True)
def no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on the bound, except where a test sets it."""
    monkeypatch.setattr(channel, "JOIN_SECONDS", 60.0)


async def test_a_joining_replica_is_informed_once_every_snapshot_is_complete() -> None:
    first, second, third = addresses = [new_address() for _ in range(3)]
    async with replica(first, *addresses) as one, replica(second, *addresses) as two:
        await until(lambda: one.channel.is_informed and two.channel.is_informed)
        # Several frames: the first one alone is not the snapshot.
        for number in range(8):
            one.start(number, chain=bytes(MAX_FRAME // 2))
        two.start(100)
        async with replica(third, *addresses) as three:
            assert not three.channel.is_informed
            await until(lambda: three.channel.is_informed)
            assert three.notes.remote == {*range(8), 100}


async def test_replicas_that_cannot_be_reached_or_refuse_do_not_delay() -> None:
    address, unused, other = (new_address() for _ in range(3))
    async with (
        replica(other, keys=OTHER_KEYS) as _,
        replica(address, address, unused, other) as one,
    ):
        await until(lambda: one.channel.is_informed)


@pytest.mark.parametrize("keys", [{}, None], ids=["no keys", "no peers"])
async def test_without_a_channel_a_replica_is_informed(keys: dict[str, bytes] | None) -> None:
    peers = [] if keys is None else [new_address()]
    async with replica(new_address(), *peers, keys=keys or {}) as one:
        assert one.channel.is_informed


async def test_a_peer_that_hangs_delays_for_no_longer_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "JOIN_SECONDS", 0.3)
    hanging = new_address()
    release = asyncio.Event()

    async def hang(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.close()

    server = await asyncio.start_server(hang, *hanging)
    try:
        async with replica(new_address(), hanging) as one:
            assert not one.channel.is_informed
            await until(lambda: one.channel.is_informed)
    finally:
        release.set()
        server.close()
        await server.wait_closed()


async def test_snapshots_wait_until_the_replica_knows_its_pods() -> None:
    first, second = new_address(), new_address()
    async with (
        replica(first, first, second) as one,
        replica(second, first, second, is_open=False) as two,
        aiohttp.ClientSession() as client,
    ):
        one.start(1)
        await until(lambda: len(two.channel._local.connected) == 1)
        with pytest.raises(aiohttp.WSServerHandshakeError, match="503"):
            await client.ws_connect(f"http://{second}{PATH}")
        assert not two.channel.is_informed
        assert not two.notes.remote
        two.channel.open()
        await until(lambda: two.channel.is_informed)
        assert two.notes.remote == {1}


async def test_a_replica_that_discovers_pods_gets_a_snapshot_again() -> None:
    async with mesh(2) as (one, two):
        one.start(1)
        await two.notes.until(lambda: two.notes.remote == {1})
        # As if the pod had not been known yet.
        two.notes.peers.clear()
        two.notes.has_lost = True
        await two.notes.until(lambda: two.notes.remote == {1})
        assert not two.notes.has_lost
