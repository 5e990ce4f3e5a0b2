"""One reader's read: sends what is final, waits for more, and hears whether all was right."""

import asyncio
import socket
import time
from concurrent.futures import Executor

from ..types import KvBroken, KvLayout
from .blockio import BlockMemory, block_plan, send_segment
from .holds import Hold
from .threads import run_on_socket
from .wire import (
    Done,
    Limits,
    Read,
    Segment,
    ToProducer,
    Waiting,
    receive_frame_async,
    send_frames_async,
    to_producer,
)


class ReadSession:
    """Serves one Read over a non-blocking socket, which stays the caller's to close."""

    def __init__(
        self,
        sock: socket.socket,
        hold: Hold,
        read: Read,
        *,
        memory: BlockMemory,
        layout: KvLayout,
        limits: Limits,
    ) -> None:
        self._sock = sock
        self._hold = hold
        self._read = read
        self._memory = memory
        self._layout = layout
        self._limits = limits
        self._wanted = -(-read.tokens // layout.block_size)
        self._sent = [min(read.skip_blocks, self._wanted)] * layout.layers
        """Per layer, how many of the first blocks the reader has."""

    async def run(self, threads: Executor) -> None:
        """Return when the reader has said Done.

        Raises KvRefused when the request ends under the reader, KvBroken, OSError or TimeoutError
        when the reader goes away, falls silent or says what it must not.
        """
        heard = asyncio.create_task(receive_frame_async(self._sock, to_producer))
        try:
            while not await self._send_ready(threads):
                async with asyncio.timeout(self._limits.idle):
                    await send_frames_async(self._sock, Waiting())
                if await self._wait(heard, self._read.patience / 3):
                    raise KvBroken("the reader spoke before it had everything")
            until = time.monotonic() + self._limits.idle
            while not await self._wait(heard, until - time.monotonic()):
                if time.monotonic() >= until:
                    raise TimeoutError
            if not isinstance(heard.result(), Done):
                raise KvBroken("the reader answered with something else than Done")
        finally:
            heard.cancel()
            await asyncio.gather(heard, return_exceptions=True)

    async def _send_ready(self, threads: Executor) -> bool:
        """Send what is final and not yet sent; whether that was the last."""
        hold = self._hold
        hold.check(self._read)
        hold.sending = True
        try:
            with self._sock.dup() as blocking:
                blocking.settimeout(self._limits.idle)
                await run_on_socket(threads, blocking, lambda: self._send_blocking(blocking))
        finally:
            hold.sending = False
        hold.check(self._read)
        return all(sent == self._wanted for sent in self._sent)

    def _send_blocking(self, sock: socket.socket) -> None:
        while self._send_round(sock):
            pass

    def _send_round(self, sock: socket.socket) -> bool:
        """One pass over the layers; whether there was anything to send."""
        size, progress, moved = self._layout.block_size, self._hold.progress, False
        planned, plan = (0, 0), block_plan((), self._layout.block_bytes)
        for layer, first in enumerate(self._sent):
            end = progress.ready_blocks(layer, self._read.tokens, size)
            if end <= first:
                continue
            if planned != (first, end):
                planned = (first, end)
                plan = block_plan(progress.block_ids[first:end], self._layout.block_bytes)
            send_segment(
                sock,
                Segment(layer, first, end - first),
                self._memory.outgoing(layer, plan),
                self._hold.renew,
                lambda: self._hold.ending is None,
            )
            self._sent[layer], moved = end, True
        return moved

    async def _wait(self, heard: "asyncio.Task[ToProducer]", seconds: float) -> bool:
        """Wait for the reader to speak (True), or for progress, an ending, or the time limit.

        Raises KvRefused for an ending, and KvBroken or OSError when the reader has gone.
        """
        changed = asyncio.create_task(self._hold.changed.wait())
        try:
            await asyncio.wait(
                [heard, changed], timeout=max(seconds, 0), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            changed.cancel()
        if heard.done():
            heard.result()
            return True
        self._hold.changed.clear()
        self._hold.check(self._read)
        return False
