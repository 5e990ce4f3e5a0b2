"""One reader's read: send the KV that is final, wait for more, wait for the reader's Done."""

import asyncio
import socket
import time
from concurrent.futures import Executor

from ..types import KvBroken, KvLayout
from .blockio import BlockMemory, block_plan, send_segment
from .holds import KvHold
from .threads import run_on_socket
from .wire import (
    Done,
    Read,
    Segment,
    ToProducer,
    TransferLimits,
    Waiting,
    receive_frame_async,
    send_frames_async,
    to_producer,
)


class ReadSession:
    """Serves one Read over a non-blocking socket, which the caller closes."""

    def __init__(
        self,
        sock: socket.socket,
        hold: KvHold,
        read: Read,
        *,
        memory: BlockMemory,
        layout: KvLayout,
        limits: TransferLimits,
    ) -> None:
        self._sock = sock
        self._hold = hold
        self._read = read
        self._memory = memory
        self._layout = layout
        self._limits = limits
        self._total_blocks = -(-read.tokens // layout.block_size)
        self._sent = [min(read.skip_blocks, self._total_blocks)] * layout.layers
        """Per layer: number of leading blocks that were sent, or that the reader has already."""

    async def run(self, threads: Executor) -> None:
        """Serve the read. Returns when the reader has sent Done.

        Raises KvRefused when the hold ends during the read; KvBroken, OSError or TimeoutError when
        the reader disconnects, is silent for too long or sends a frame that is not expected.
        """
        # Awaited all along: the reader sends nothing before Done, so a frame or an end of stream
        # during the transfer means that it has failed.
        next_frame = asyncio.create_task(receive_frame_async(self._sock, to_producer))
        try:
            while not await self._send_ready(threads):
                async with asyncio.timeout(self._limits.idle):
                    # Without it the reader would take a long prefill for a dead producer.
                    await send_frames_async(self._sock, Waiting())
                if await self._wait(next_frame, self._read.patience / 3):
                    raise KvBroken("the reader sent a frame before it had every block")
            # The last bytes are sent, so no byte renews the time limit: Done must come within it.
            until = time.monotonic() + self._limits.idle
            while not await self._wait(next_frame, until - time.monotonic()):
                if time.monotonic() >= until:
                    raise TimeoutError
            if not isinstance(next_frame.result(), Done):
                raise KvBroken("the reader sent another frame than Done")
        finally:
            next_frame.cancel()
            await asyncio.gather(next_frame, return_exceptions=True)

    async def _send_ready(self, threads: Executor) -> bool:
        """Send the blocks that are final and not sent yet. Returns whether they were the last."""
        hold = self._hold
        hold.check(self._read)
        if self._due_segments():
            # From here until it is False again, ending the hold shuts the socket down.
            hold.is_sending = True
            try:
                # A timeout belongs to the Python object: `next_frame` needs the original without.
                with self._sock.dup() as blocking:
                    blocking.settimeout(self._limits.idle)
                    await run_on_socket(threads, blocking, lambda: self._send_blocking(blocking))
            finally:
                hold.is_sending = False
            hold.check(self._read)
        return all(sent == self._total_blocks for sent in self._sent)

    def _due_segments(self) -> list[Segment]:
        """The blocks that are final and not sent yet, one segment for each layer."""
        progress, tokens, size = self._hold.progress, self._read.tokens, self._layout.block_size
        ready = [progress.ready_blocks(layer, tokens, size) for layer in range(len(self._sent))]
        return [
            Segment(layer, sent, end - sent)
            for layer, (sent, end) in enumerate(zip(self._sent, ready, strict=True))
            if end > sent
        ]

    def _send_blocking(self, sock: socket.socket) -> None:
        # Until nothing is due: the prefill may publish more while this thread is sending.
        while due := self._due_segments():
            ids, size = self._hold.progress.block_ids, self._layout.block_bytes
            runs = {(segment.first, segment.blocks) for segment in due}
            # All layers of a chunk have the same run of blocks: plan it once.
            plans = {run: block_plan(ids[run[0] : sum(run)], size) for run in runs}
            for segment in due:
                plan = plans[segment.first, segment.blocks]
                batches = self._memory.outgoing(segment.layer, plan)
                send_segment(sock, segment, batches, self._hold.renew, self._still_held)
                # Only after the digest: an interrupted segment counts as not sent.
                self._sent[segment.layer] += segment.blocks

    def _still_held(self) -> bool:
        return self._hold.end_reason is None

    async def _wait(self, next_frame: "asyncio.Task[ToProducer]", seconds: float) -> bool:
        """Wait at most `seconds` for a frame of the reader (True) or for a change of the hold.

        Raises KvRefused when the hold ends, and KvBroken or OSError when the reader disconnected.
        """
        changed = asyncio.create_task(self._hold.changed.wait())
        try:
            await asyncio.wait(
                [next_frame, changed], timeout=max(seconds, 0), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            changed.cancel()
        if next_frame.done():
            next_frame.result()
            return True
        # Clear before reading the state: a change after this line sets the event again.
        self._hold.changed.clear()
        self._hold.check(self._read)
        return False
