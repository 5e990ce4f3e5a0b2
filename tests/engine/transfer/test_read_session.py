import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

from tandem_engine.transfer import wire
from tandem_engine.transfer.blockio import block_memory
from tandem_engine.transfer.holds import KvHold, PrefillProgress
from tandem_engine.transfer.read_session import ReadSession

from .support import LAYOUT, Peer, cache, read


async def test_every_byte_that_moves_renews_the_lease() -> None:
    hold = KvHold("r", lease=60.0, progress=PrefillProgress().advance((1, 2), 8, 3, 3))
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1, "kv-test") as threads:
        ours.setblocking(False)
        theirs.setblocking(False)
        session = ReadSession(
            ours, hold, read(tokens=8),
            memory=block_memory(cache(1), LAYOUT), layout=LAYOUT, limits=wire.DEFAULT_LIMITS,
        )  # fmt: skip
        running = asyncio.create_task(session.run(threads))
        peer = Peer(theirs)
        assert hold.deadline == 0.0
        assert await peer.from_producer() == wire.Segment(0, 0, 2)
        await peer.read(2 * LAYOUT.block_bytes + wire.DIGEST_BYTES)
        assert hold.deadline > 0.0
        for _ in range(2):
            await peer.from_producer()
            await peer.read(2 * LAYOUT.block_bytes + wire.DIGEST_BYTES)
        await peer.send(wire.Done())
        await running
