"""The side that has the KV: holds finished prompts' blocks under a lease and serves readers.

    engine                         Producer                        reader
    open ────────────────────────► may be read
    publish … (any thread) ──────► more may be read ─────────────► segments
    complete ────────────────────► leased ───────────────────────► the rest
    ◄── on_release(id, reason) ─── read │ released │ expired ◄──── Done, Release, or nothing

`on_release` never runs while blocks are being sent: every byte that moves renews the lease, and a
release or an expiry first disconnects the reader. Only `discard` does not wait for the reader. The
segment that is being sent then is worthless, because its digest is never sent.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from ..types import KvLayout, KvLoadError, KvRefused
from .blockio import block_memory
from .hold_table import HoldTable
from .holds import FreeReason, KvHold
from .listener import Connection, Listener
from .read_session import ReadSession
from .threads import shut_down
from .trust import Trust
from .wire import (
    DEFAULT_LIMITS,
    MAX_FRAME,
    MAX_SECONDS,
    VERSION,
    Done,
    Hello,
    Ok,
    Proven,
    Read,
    Refused,
    Release,
    Renew,
    ToProducer,
    TransferLimits,
    Welcome,
    disagreement,
    receive_frame_async,
    send_frames_async,
    to_producer,
)

__all__ = ["FreeReason", "Producer"]

_log = logging.getLogger(__name__)


class Producer:
    """Holds requests' blocks and serves reads.

    Only `publish`, `is_read_early` and `has_reader` may be called off the event loop of `start`.
    `on_release` is called on that loop, exactly once for each completed request; until then the
    request's blocks must not change.
    """

    def __init__(  # noqa: PLR0917 - every caller gives each of them
        self,
        layers: Sequence[torch.Tensor],
        layout: KvLayout,
        engine_id: str,
        host: str,
        port: int,
        lease: float,
        on_release: Callable[[str, FreeReason], None],
        *,
        written: Sequence[torch.cuda.Event] = (),
        limits: TransferLimits = DEFAULT_LIMITS,
        trust: Trust | None = None,
    ) -> None:
        """`lease` is in seconds, `written` as in `block_memory`; without `trust` all are served.

        Raises ValueError when the lease is not above 0 or exceeds a day, and when `layers` do not
        agree with `layout`.
        """
        if not 0 < lease <= MAX_SECONDS:
            raise ValueError(f"a lease of {lease:g} s: it must be above 0 and at most a day")
        self._memory = block_memory(layers, layout, written)
        self._blocks = len(layers[0])
        self._layout = layout
        self._engine_id = engine_id
        self._address = (host, port)
        self._lease = lease
        self._on_release = on_release
        self._limits = limits
        self._trust = trust or Trust()
        self._holds = HoldTable(lease)
        # One thread for each reader at the limit: a slow reader never delays another one.
        self._threads = ThreadPoolExecutor(limits.connections, "kv-send")
        self._listener = Listener(self._serve, limits)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Address that readers connect to: the bound one after `start`."""
        return self._address

    @property
    def hold_count(self) -> int:
        """Number of requests that were opened and neither discarded nor released."""
        return len(self._holds)

    async def start(self) -> None:
        """Listen for readers. Raises OSError when the address cannot be bound."""
        self._loop = asyncio.get_running_loop()
        self._address = await self._listener.start(*self._address)

    async def close(self) -> None:
        """Disconnect every reader and release every hold (`aborted`)."""
        # First, so that no reader is left: the holds below are released at once.
        await self._listener.close()
        self._threads.shutdown()
        for hold in self._holds:
            self._end(hold, FreeReason.ABORTED)
        # What is left are unfinished prompts; `on_release` is for completed ones only.
        self._holds.clear()

    def open(self, request_id: str, prompt_hash: str, stream_id: str | None = None) -> None:
        """Announce a prompt that will be prefilled for a reader, which may connect from now on.

        Its reader names the same `prefix.prompt_hash`; that of a stream may wait for it already,
        by `stream_id`. Raises ValueError when an id is open already, empty or too long.
        """
        self._holds.open(request_id, prompt_hash, stream_id)

    def has_stream(self, stream_id: str) -> bool:
        """Whether a request with this stream is open."""
        return self._holds.has_stream(stream_id)

    def is_read_early(self, request_id: str) -> bool:
        """Whether publishing early is of use: a reader is there, or will be. From any thread."""
        hold = self._holds.get(request_id)
        return (hold is not None and hold.stream_id is not None) or self.has_reader(request_id)

    def has_reader(self, request_id: str) -> bool:
        """Whether a reader is connected. From any thread."""
        hold = self._holds.get(request_id)
        return hold is not None and hold.reader is not None

    def publish(self, request_id: str, block_ids: Sequence[int], tokens: int, layers: int) -> None:
        """Let a reader have the first `tokens` prompt tokens in the first `layers` layers.

        May be called from any thread, one call at a time for each request. `block_ids` are the
        prompt's blocks in order, at least as many as `tokens` fill; they stay the request's until
        `on_release` or `discard`. An unknown request is ignored, since the event loop may have
        discarded it meanwhile. Raises ValueError for blocks that the cache does not have.
        """
        hold = self._holds.get(request_id)
        if hold is None or hold.progress.is_complete:
            return
        blocks = tuple(block_ids)
        if len(blocks) * self._layout.block_size < tokens:
            raise ValueError(f"{len(blocks)} blocks do not hold {tokens} tokens")
        if blocks and not 0 <= min(blocks) <= max(blocks) < self._blocks:
            raise ValueError(f"the cache has {self._blocks} blocks, request names {max(blocks)}")
        # One assignment: other threads see the old progress or the new one, never a mix.
        hold.progress = hold.progress.advance(blocks, tokens, layers, self._layout.layers)
        # asyncio.Event is not thread-safe, and this may be the worker thread.
        if hold.reader is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(hold.changed.set)

    def complete(self, request_id: str, tokens: int) -> None:
        """Take in the end of a prefill of `tokens` prompt tokens, and start the lease.

        A request that was read or released meanwhile is released before this returns. Raises
        KeyError when it is not open, ValueError when its blocks were never published.
        """
        hold = self._holds.get(request_id)
        if hold is None:
            raise KeyError(request_id)
        if len(hold.progress.block_ids) * self._layout.block_size < tokens:
            raise ValueError(f"{request_id!r}: the blocks of {tokens} tokens were never published")
        # Before the lease starts: an ended hold is released only once it is complete.
        hold.progress = hold.progress.complete(tokens)
        hold.changed.set()
        hold.renew()
        # A reader that came before the request left a timer, which has no effect by now.
        if hold.timer is not None:
            hold.timer.cancel()
        # Starts the only timer of this hold; it reschedules itself until the lease has expired.
        self._check_lease(hold)
        self._release_when_idle(hold)

    def discard(self, request_id: str) -> None:
        """Forget a request that will not be completed; its blocks may be reused at once.

        A waiting reader is refused. A reader in the middle of a segment is disconnected and never
        gets the digest, without which it does not accept the bytes. No effect on a completed
        request, which its reader or its lease ends, nor on an unknown one.
        """
        hold = self._holds.get(request_id)
        if hold is not None and not hold.progress.is_complete:
            self._end(hold, FreeReason.ABORTED)
            # Without `on_release`: the engine frees the blocks of a discarded prompt itself.
            self._holds.remove(hold)

    def release(self, request_id: str) -> None:
        """Release a completed request that will not be read. No effect on any other request."""
        hold = self._holds.get(request_id)
        if hold is not None and hold.progress.is_complete:
            self._end(hold, FreeReason.RELEASED)

    def _check_lease(self, hold: KvHold) -> None:
        """End an expired hold, or look again at its deadline: renewals only move the deadline."""
        remaining = hold.deadline - time.monotonic()
        if remaining <= 0:
            self._end(hold, FreeReason.EXPIRED)
        elif self._loop is not None:
            hold.timer = self._loop.call_later(remaining, self._check_lease, hold)

    def _end(self, hold: KvHold, reason: FreeReason) -> None:
        """Start a hold's end; its blocks are released once no reader is connected."""
        if hold.end_reason is None:
            hold.end_reason = reason
            hold.changed.set()
            if hold.is_sending and hold.reader is not None:
                # The worker thread may be blocked in a send: only this ends it at once. A reader
                # that waits is woken by `changed` and gets the reason as a Refused frame.
                shut_down(hold.reader)
        self._release_when_idle(hold)

    def _release_when_idle(self, hold: KvHold) -> None:
        """Release an ending hold, unless a reader or the prefill still uses its blocks."""
        if hold.end_reason is None or hold.reader is not None or not hold.progress.is_complete:
            return
        if self._holds.remove(hold) and hold.request_id is not None:
            if hold.timer is not None:
                hold.timer.cancel()
            self._on_release(hold.request_id, hold.end_reason)

    async def _serve(self, connection: Connection) -> None:
        """Serve one connection, from its Hello to its end."""
        try:
            await self._handle(connection)
        except KvRefused as err:
            _log.info("%s: refused: %s", connection.peer, err)
            await self._refuse(connection, str(err))
        except TimeoutError:
            _log.info("%s: sent nothing within the time limit", connection.peer)
        except (KvLoadError, OSError) as err:
            _log.info("%s: %s", connection.peer, err)

    async def _refuse(self, connection: Connection, reason: str) -> None:
        """Send Refused, then read to the end of the stream.

        Closing a socket with unread bytes resets it, and the reader could lose the frame.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limits.handshake):
                await send_frames_async(connection.sock, Refused(reason))
                connection.sock.shutdown(socket.SHUT_WR)
                while await loop.sock_recv(connection.sock, MAX_FRAME):
                    pass
        except (OSError, TimeoutError) as err:
            _log.info("%s: disconnected before it read the refusal: %s", connection.peer, err)

    async def _handle(self, connection: Connection) -> None:
        async with asyncio.timeout(self._limits.handshake):
            hello = await receive_frame_async(connection.sock, to_producer)
            if not isinstance(hello, Hello):
                raise KvRefused("the first frame is not Hello")
            if hello.version == VERSION:
                # First: the refusals below tell this engine's id and its model.
                await self._trust.admit(connection.sock, hello.challenge)
            if (wrong := disagreement(hello, self._engine_id, self._layout)) is not None:
                raise KvRefused(wrong)
            # After the checks: at the limit, a peer that failed them can still be replaced.
            connection.mark_identified()
            command = await receive_frame_async(connection.sock, to_producer)
            hold = self._find(command)
            # The lease tells the reader how often to renew.
            await send_frames_async(connection.sock, Welcome(self._lease))
            if isinstance(command, Renew | Release):
                self._apply(command, hold)
                await send_frames_async(connection.sock, Ok())
        # Outside the handshake's time limit: a read waits for the prefill and for the network.
        if isinstance(command, Read):
            await self._serve_read(connection, hold, command)

    def _find(self, command: ToProducer) -> KvHold:
        if isinstance(command, Hello | Proven | Done):
            raise KvRefused("the frame after Hello is not Read, Renew or Release")
        request_id = command.request_id
        hold = self._holds.find(request_id)
        if isinstance(command, Read) and command.is_stream and hold is None:
            hold = self._await_stream(request_id)
        if hold is None or hold.end_reason is not None:
            raise KvRefused(
                f"request {command.request_id!r} is not held: "
                "never opened, already read, released or expired"
            )
        return hold

    def _await_stream(self, stream_id: str) -> KvHold:
        """A hold for the reader of a stream that came before the prefill's request.

        Both legs are sent at once, and the prefill's may arrive later. It is refused if the
        request does not come within `limits.idle`: the prefill leg was refused, or its pod died.
        """
        hold = self._holds.await_stream(stream_id)

        def expire() -> None:
            if hold.request_id is None:
                self._end(hold, FreeReason.EXPIRED)

        if self._loop is not None:
            hold.timer = self._loop.call_later(self._limits.idle, expire)
        return hold

    def _apply(self, command: Renew | Release, hold: KvHold) -> None:
        if isinstance(command, Renew):
            hold.renew()
        else:
            self._end(hold, FreeReason.RELEASED)

    async def _serve_read(self, connection: Connection, hold: KvHold, read: Read) -> None:
        if hold.reader is not None:
            raise KvRefused(f"request {hold.request_id!r} is being read by another reader")
        # From here on the blocks are not released before the session has ended.
        hold.reader = connection.sock
        try:
            session = ReadSession(
                connection.sock,
                hold,
                read,
                memory=self._memory,
                layout=self._layout,
                limits=self._limits,
            )
            await session.run(self._threads)
        finally:
            # After a failed read the hold stays: a reader may try again until the lease ends.
            hold.reader = None
            if hold.request_id is None:
                # Its request was never opened, and its reader has gone.
                self._holds.remove(hold)
            self._release_when_idle(hold)
        # Released before Ok is sent: a reader that has Ok knows that the blocks are free.
        self._end(hold, FreeReason.READ)
        await send_frames_async(connection.sock, Ok())
