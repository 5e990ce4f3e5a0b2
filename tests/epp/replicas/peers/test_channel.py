"""Two and three replicas over real sockets."""

import asyncio
import logging
from contextlib import AsyncExitStack

import aiohttp
import msgspec
import pytest

from tandem_contract.commandline import HostPort
from tandem_contract.peer_handshake import Challenge, Session
from tandem_epp.replicas.peers import channel, dialer
from tandem_epp.replicas.peers.frames import (
    HANDSHAKE,
    PATH,
    PodEjected,
    RequestStarted,
    encode_event,
    encode_frame,
)
from tandem_epp.replicas.peers.listener import MAX_CONNECTIONS, MAX_HANDSHAKES
from tests.epp.replicas.peers.replicas import (
    KEYS,
    OTHER_KEYS,
    linked,
    mesh,
    new_address,
    replica,
    until,
)

pytestmark = pytest.mark.component


async def test_three_replicas_tell_each_other_and_not_themselves() -> None:
    async with mesh(3) as replicas:
        for number, each in enumerate(replicas):
            each.start(number)
        for number, each in enumerate(replicas):
            others = {0, 1, 2} - {number}
            await each.notes.until(lambda n=each.notes, o=others: n.remote == o)  # type: ignore[misc]
            assert each.figure("tandem_epp_peers", state="connected") == 2
            assert each.figure("tandem_epp_peer_events_sent_total") == 2
        ranks = sorted(each.channel.rank for each in replicas)
        assert ranks == [(0, 3), (1, 3), (2, 3)]
        replicas[0].end(0)
        await replicas[1].notes.until(lambda: replicas[1].notes.remote == {2})
        await until(lambda: replicas[0].figure("tandem_epp_peer_lag_seconds_count") >= 2)
        assert replicas[0].figure("tandem_epp_peer_channel_off", reason="no_keys") == 0


async def test_a_replica_that_joins_gets_a_snapshot() -> None:
    first, second = new_address(), new_address()
    async with replica(first, first, second) as one:
        for number in range(1000):
            one.start(number)
        one.end(500)
        async with replica(second, first, second) as two:
            await two.notes.until(lambda: len(two.notes.remote) == 999)
            assert 500 not in two.notes.remote
            one.start(1000)
            await two.notes.until(lambda: 1000 in two.notes.remote)


async def test_the_requests_of_a_replica_that_is_gone_expire_after_the_grace() -> None:
    first, second = new_address(), new_address()
    async with replica(first, first, second, grace=0.1) as one:
        async with replica(second, first, second) as two:
            two.start(1)
            await one.notes.until(lambda: one.notes.remote == {1})
        await one.notes.until(lambda: not one.notes.remote)
        # It returns as another process at the same address.
        async with replica(second, first, second) as again:
            again.start(2)
            await one.notes.until(lambda: one.notes.remote == {2})


async def test_a_partition_leaves_own_knowledge_and_heals() -> None:
    first, second = new_address(), new_address()
    async with (
        linked(first) as to_first,
        linked(second) as to_second,
        replica(first, to_second.address, grace=0.1) as one,
        replica(second, to_first.address, grace=0.1) as two,
    ):
        one.start(1)
        two.start(2)
        await one.notes.until(lambda: one.notes.remote == {2})
        await two.notes.until(lambda: two.notes.remote == {1})
        to_first.cut()
        to_second.cut()
        await one.notes.until(lambda: not one.notes.remote)
        await two.notes.until(lambda: not two.notes.remote)
        # What happens meanwhile is in the snapshots.
        one.start(3)
        one.end(1)
        to_first.mend()
        to_second.mend()
        await two.notes.until(lambda: two.notes.remote == {3})
        await one.notes.until(lambda: one.notes.remote == {2})


async def test_a_short_break_within_the_grace_drops_nothing() -> None:
    first, second = new_address(), new_address()
    async with (
        linked(first) as to_first,
        replica(first, second, grace=60) as one,
        replica(second, to_first.address) as two,
    ):
        two.start(1)
        await one.notes.until(lambda: one.notes.remote == {1})
        to_first.cut()
        await until(lambda: not one.channel.connected)
        assert one.notes.remote == {1}
        two.end(1)
        to_first.mend()
        await one.notes.until(lambda: not one.notes.remote)


async def test_replicas_with_other_keys_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    first, second = new_address(), new_address()
    async with (
        replica(first, first, second) as one,
        replica(second, first, second, keys=OTHER_KEYS) as two,
    ):
        await until(lambda: one.figure("tandem_epp_peers", state="refused") == 1)
        await until(lambda: one.figure("tandem_epp_peer_refused_total", reason="other_keys") >= 3)
        two.start(1)
        assert not one.notes.peers
        assert not one.channel.connected
        refusals = [r for r in caplog.records if "no key in common" in r.getMessage()]
        assert len(refusals) == 2, "each side logs it once"


async def test_a_rotation_of_keys_interrupts_nothing_until_the_old_key_goes() -> None:
    async with mesh(2) as (one, two):
        for each in (one, two):
            each.channel.use_keys(KEYS | OTHER_KEYS)
        one.start(1)
        await two.notes.until(lambda: two.notes.remote == {1})
        before = one.channel.connected
        one.channel.use_keys(OTHER_KEYS)
        one.start(2)
        await two.notes.until(lambda: two.notes.remote == {1, 2})
        two.channel.use_keys(OTHER_KEYS)
        one.start(3)
        await two.notes.until(lambda: two.notes.remote == {1, 2, 3})
        await until(lambda: one.channel.connected == before)


async def test_without_keys_there_is_no_channel_until_keys_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = new_address(), new_address()
    caplog.set_level(logging.WARNING)
    async with replica(first, second, keys={}) as one, replica(second, first) as two:
        assert one.figure("tandem_epp_peer_channel_off", reason="no_keys") == 1
        assert "without plan keys" in caplog.text
        one.start(1)
        one.channel.use_keys(KEYS)
        await two.notes.until(lambda: two.notes.remote == {1})
        assert one.figure("tandem_epp_peer_channel_off", reason="no_keys") == 0


async def test_without_peers_nothing_listens() -> None:
    address = new_address()
    async with replica(address) as one:
        assert one.figure("tandem_epp_peer_channel_off", reason="no_peers") == 1
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries, heartbeats and look-ups come often."""
    monkeypatch.setattr(dialer, "MAX_PAUSE", 0.02)
    monkeypatch.setattr(dialer, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(channel, "RESOLVE_SECONDS", 0.02)


@pytest.mark.usefixtures("quick")
async def test_its_own_and_a_second_address_of_a_peer_are_dialed_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    first, second = new_address(), new_address()
    async with (
        linked(first) as itself,
        linked(second) as again,
        replica(first, itself.address, second, again.address) as one,
        replica(second, first) as two,
    ):
        await until(lambda: one.figure("tandem_epp_peers", state="connected") == 1)
        await until(lambda: one.channel.dialing == 1)
        dialed = itself.connections, again.connections
        acknowledged = one.figure("tandem_epp_peer_lag_seconds_count")
        await until(lambda: one.figure("tandem_epp_peer_lag_seconds_count") > acknowledged + 10)
        assert (itself.connections, again.connections) == dialed
        one.start(1)
        await two.notes.until(lambda: two.notes.remote == {1})
        assert "lost the connection" not in caplog.text


@pytest.mark.usefixtures("quick")
async def test_a_second_address_takes_over_when_the_first_is_cut() -> None:
    first, second = new_address(), new_address()
    async with (
        linked(second) as main,
        linked(second) as spare,
        replica(first, main.address, spare.address) as one,
        replica(second, first) as two,
    ):
        await until(lambda: one.channel.dialing == 1)
        for number in range(2):
            for link in (main, spare):
                link.cut()
            await until(lambda: not one.channel.connected)
            (main, spare)[number].mend()
            one.start(number)
            await two.notes.until(lambda n=number: n in two.notes.remote)  # type: ignore[misc]


@pytest.mark.usefixtures("quick")
async def test_replicas_are_kept_while_their_name_does_not_resolve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = new_address(), new_address()
    lookups = 0

    async def unresolvable(names: object) -> dict[HostPort, frozenset[HostPort]]:
        nonlocal lookups
        lookups += 1
        return {}

    async with (
        linked(second) as link,
        replica(first, link.address) as one,
        replica(second, first) as two,
    ):
        await until(lambda: len(one.channel.connected) == 1)
        monkeypatch.setattr(channel, "resolve", unresolvable)
        link.cut()
        await until(lambda: not one.channel.connected)
        before = lookups
        await until(lambda: lookups > before + 2)
        link.mend()
        one.start(1)
        await two.notes.until(lambda: two.notes.remote == {1})


async def test_an_error_in_a_snapshot_is_logged_and_the_next_connection_works(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = new_address(), new_address()
    async with replica(first, first, second) as one:
        one.start(1)

        def broken() -> list[RequestStarted]:
            monkeypatch.undo()
            raise ArithmeticError("a bug")

        monkeypatch.setattr(one.notes, "snapshot", broken)
        async with replica(second, first, second) as two:
            await two.notes.until(lambda: two.notes.remote == {1})
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert f"{second} ended by an unexpected error" in record.getMessage()
    assert record.exc_info is not None


async def introduce(socket: aiohttp.ClientWebSocketResponse, instance: str) -> Session:
    """Authenticate as a peer, and send an empty snapshot."""
    first = HANDSHAKE.hello(instance, KEYS)
    await socket.send_bytes(msgspec.msgpack.encode(first))
    answer = msgspec.msgpack.decode(await socket.receive_bytes(), type=Challenge)
    proof, session = HANDSHAKE.prove(first, answer, KEYS)
    await socket.send_bytes(msgspec.msgpack.encode(proof))
    await socket.send_bytes(session.frames.seal(encode_frame(0, 0, [], is_snapshot=True)))
    session.acknowledgements.open(await socket.receive_bytes())
    return session


async def test_connections_without_a_key_do_not_keep_peers_out() -> None:
    address = new_address()
    url = f"http://{address}{PATH}"
    elsewhere = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0), limit=0)
    async with (
        replica(address, address) as one,
        aiohttp.ClientSession(connector=elsewhere) as stranger,
        aiohttp.ClientSession() as peer,
        AsyncExitStack() as open_sockets,
    ):
        idle = [
            await open_sockets.enter_async_context(stranger.ws_connect(url)) for _ in range(300)
        ]
        assert len(idle) > MAX_CONNECTIONS
        socket = await open_sockets.enter_async_context(peer.ws_connect(url))
        # The peer has not sent anything yet: those who have most connections make room.
        for _ in range(2 * MAX_HANDSHAKES):
            await open_sockets.enter_async_context(stranger.ws_connect(url))
        await introduce(socket, "peer")
        assert "peer" in one.notes.peers


async def test_a_repeated_message_and_one_too_large_end_the_connection() -> None:
    address = new_address()
    frame = encode_frame(0, 1, [encode_event(RequestStarted(1, "d"))], is_snapshot=False)
    async with replica(address, address) as one, aiohttp.ClientSession() as client:
        for attack in ("repeat", "large"):
            async with client.ws_connect(f"http://{address}{PATH}") as socket:
                session = await introduce(socket, attack)
                sealed = session.frames.seal(frame)
                await socket.send_bytes(sealed)
                session.acknowledgements.open(await socket.receive_bytes())
                await socket.send_bytes(sealed if attack == "repeat" else bytes(2 << 20))
                message = await socket.receive()
                assert message.type is aiohttp.WSMsgType.CLOSE
        assert one.figure("tandem_epp_peer_refused_total", reason="wrong_mac") == 1
        assert len(one.notes.events) == 2


async def test_a_peer_without_proof_changes_nothing() -> None:
    address = new_address()
    async with replica(address, address) as one, aiohttp.ClientSession() as client:
        async with client.ws_connect(f"http://{address}{PATH}") as socket:
            await socket.send_bytes(msgspec.msgpack.encode(HANDSHAKE.hello("stranger", KEYS)))
            await socket.receive_bytes()
            await socket.send_bytes(msgspec.msgpack.encode([b"x" * 32]))
            message = await socket.receive()
            assert (message.data, message.extra) == (1008, "wrong_proof")
        assert one.notes.peers == {}


async def test_a_burst_beyond_the_queue_arrives_as_a_snapshot() -> None:
    async with mesh(2) as (one, two):
        for _ in range(300_000):
            one.channel.publish(PodEjected("pod-with-a-name-of-some-length", 1.0))
        one.start(7)
        await two.notes.until(lambda: two.notes.remote == {7})
        assert one.figure("tandem_epp_peer_events_dropped_total") > 0
        assert two.figure("tandem_epp_peer_events_received_total", result="applied") < 300_000
