"""The side that needs the KV: pulls a prompt's blocks into its own cache, or releases them.

    queued     renew_lease(params) ──Renew──►  every sixth of the lease, until cancelled
    admitted   pull(params, blocks, …)        returns PullResult, or raises and nothing counts
    unwanted   release(params)                freed on the producer without a read

No thread writes into the blocks of a pull that has returned, raised or been cancelled.

Errors: `KvRefused` when the producer refuses, `KvBroken` when it is unreachable or silent, or sends
wrong bytes.
"""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import torch

from tandem_contract.transfer_params import TransferParams

from ..types import KvBroken, KvLayout, KvLoadError, KvRefused, PullResult
from .blockio import block_memory, receive_segment
from .pull_progress import PullProgress
from .threads import run_on_socket, shut_down
from .trust import Trust
from .wire import (
    DEFAULT_LIMITS,
    Done,
    Frame,
    Ok,
    Read,
    Refused,
    Release,
    Renew,
    Segment,
    ToReader,
    TransferLimits,
    Waiting,
    Welcome,
    pack,
    prepare,
    receive_frame,
    receive_frame_async,
    send_frames_async,
    to_reader,
)

_log = logging.getLogger(__name__)


class LeaseRenewal:
    """Renews one request's lease until it is cancelled or the producer refuses."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def cancel(self) -> None:
        """Stop renewing; no effect when it has stopped already."""
        self._task.cancel()


class Puller:
    """Reads from any producer into one paged cache. All methods are for one event loop."""

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        layout: KvLayout,
        *,
        limits: TransferLimits = DEFAULT_LIMITS,
        trust: Trust | None = None,
    ) -> None:
        """Without `trust` any producer is read from. Raises ValueError when `layers` do not
        agree with `layout`."""
        self._memory = block_memory(layers, layout)
        self._blocks = len(layers[0])
        self._layout = layout
        self._limits = limits
        self._trust = trust or Trust()
        self._threads = ThreadPoolExecutor(limits.connections, "kv-pull")
        # Sockets of running pulls; shutting one down ends its worker thread.
        self._sockets: set[socket.socket] = set()
        self._renewals: set[asyncio.Task[None]] = set()
        self._closed = False

    async def close(self) -> None:
        """Break every pull off and stop every renewal; returns when no thread is left."""
        # First: a pull that is connecting now sees it and ends before it starts its thread.
        self._closed = True
        renewals = list(self._renewals)
        for renewal in renewals:
            renewal.cancel()
        for sock in self._sockets:
            shut_down(sock)
        await asyncio.gather(*renewals, return_exceptions=True)
        self._threads.shutdown()

    def renew_lease(self, params: TransferParams) -> LeaseRenewal:
        """Renew the lease now and after every sixth of it, while the request is queued.

        It ends when the producer refuses; that of a stream goes on until it is cancelled."""
        task = asyncio.create_task(self._renew(params))
        self._renewals.add(task)
        task.add_done_callback(self._renewals.discard)
        return LeaseRenewal(task)

    async def release(self, params: TransferParams) -> None:
        """Have the producer free the KV unread; an unknown or unreachable producer is logged."""
        try:
            await self._send_command(params, Release(params.remote_request_id))
        except KvLoadError as err:
            _log.info("release of %s: %s", params.remote_request_id, err)

    async def pull(
        self, params: TransferParams, block_ids: Sequence[int], skip_blocks: int, tokens: int
    ) -> PullResult:
        """Load the KV of the first `tokens` prompt tokens into the blocks `block_ids`.

        `block_ids` are the whole prompt's, in order; the first `skip_blocks` have their KV already
        and are not written. May start before the producer's prefill has ended. Returns when every
        block is verified; Done is then sent, on which the producer frees its blocks. Raises
        KvRefused, KvBroken; ValueError when the blocks are not this cache's or are too few.
        """
        progress = PullProgress(self._layout, tuple(block_ids), skip_blocks, tokens)
        # Before connecting: wrong block ids are an error of this engine, not of the producer.
        progress.check(self._blocks)
        with _as_load_errors(params, self._limits.idle):
            async with asyncio.timeout(self._limits.handshake):
                sock = await self._connect(params)
            with sock:
                # `close` may have run while this connected; it shut only known sockets down.
                if self._closed:
                    raise KvBroken("the puller is closed")
                self._sockets.add(sock)
                try:
                    async with _time_limit(self._limits.pull):
                        seconds = await run_on_socket(
                            self._threads, sock, lambda: self._read(sock, params, progress)
                        )
                finally:
                    self._sockets.discard(sock)
        return PullResult(progress.new_tokens, progress.new_bytes, seconds)

    def _read(self, sock: socket.socket, params: TransferParams, progress: PullProgress) -> float:
        """The whole exchange, in a worker thread. Returns the seconds until the last block."""
        # Blocking from here on: only the worker thread uses the socket until it has ended.
        sock.settimeout(self._limits.idle)
        started = time.perf_counter()
        prompt_hash = params.tandem_prompt_hash
        if prompt_hash is None:
            raise KvRefused("tandem_prompt_hash is missing: nothing says which prompt the KV is of")
        read = Read(
            params.remote_request_id,
            progress.skip_blocks,
            progress.tokens,
            self._limits.idle,
            prompt_hash,
            params.is_stream,
        )
        sock.sendall(pack(read))
        _expect(receive_frame(sock, to_reader), Welcome)
        receiving = 0.0
        while progress.missing:
            frame = receive_frame(sock, to_reader)
            # Its arrival has restarted the socket's time limit: the producer is alive.
            if isinstance(frame, Waiting):
                continue
            segment = _expect(frame, Segment)
            # Checks the segment before a byte of it is written into the cache.
            plan = progress.accept(segment)
            began = time.perf_counter()
            receive_segment(sock, self._memory.incoming(segment.layer, plan))
            receiving += time.perf_counter() - began
        # Before Done: the producer's confirmation is not part of the transfer.
        seconds = time.perf_counter() - started
        self._confirm(sock, params)
        # A stream waits for the prefill between its segments.
        return receiving if params.is_stream else seconds

    def _confirm(self, sock: socket.socket, params: TransferParams) -> None:
        """Send Done. A failure is only logged: every block here is verified already."""
        try:
            sock.sendall(pack(Done()))
            _expect(receive_frame(sock, to_reader), Ok)
        except (KvLoadError, OSError) as err:
            _log.warning(
                "%s was read, but Done was not confirmed: %s", params.remote_request_id, err
            )

    async def _renew(self, params: TransferParams) -> None:
        # Until the first answer tells the length of the lease.
        pause = self._limits.handshake
        while True:
            try:
                lease = await self._send_command(params, Renew(params.remote_request_id))
                pause = lease / 6
            except KvRefused as err:
                _log.warning("lease of %s not renewed: %s", params.remote_request_id, err)
                # The prefill leg of a stream may arrive after its decode leg.
                if not params.is_stream:
                    return
            except KvBroken as err:
                # The producer may be reachable again before the lease ends.
                _log.warning("lease of %s not renewed: %s", params.remote_request_id, err)
            await asyncio.sleep(pause)

    async def _send_command(self, params: TransferParams, command: Renew | Release) -> float:
        """Send a command on a new connection. Returns the producer's lease; raises as `pull`."""
        with _as_load_errors(params, self._limits.handshake):
            async with asyncio.timeout(self._limits.handshake):
                with await self._connect(params) as sock:
                    await send_frames_async(sock, command)
                    welcome = _expect(await receive_frame_async(sock, to_reader), Welcome)
                    _expect(await receive_frame_async(sock, to_reader), Ok)
                    return welcome.lease

    async def _connect(self, params: TransferParams) -> socket.socket:
        """A connection to the producer, which has proven itself. Raises as `pull`, and OSError."""
        # Before connecting: a client must not choose which host this engine connects to.
        self._trust.check_producer(params)
        sock = await _open_connection(params, self._limits)
        try:
            await self._trust.introduce(sock, params.remote_engine_id, self._layout)
        # On cancellation, too: no caller has the socket yet.
        except BaseException:
            sock.close()
            raise
        return sock


_F = TypeVar("_F", bound=Frame)


def _expect(frame: ToReader, kind: type[_F]) -> _F:
    """The frame, when it is of the expected kind. Raises KvRefused, KvBroken."""
    if isinstance(frame, Refused):
        raise KvRefused(frame.reason)
    if not isinstance(frame, kind):
        raise KvBroken(f"got the frame {type(frame).__name__}, expected {kind.__name__}")
    return frame


async def _open_connection(params: TransferParams, limits: TransferLimits) -> socket.socket:
    """A non-blocking connection to the producer's side channel. Raises OSError."""
    loop = asyncio.get_running_loop()
    where = (params.remote_host, params.remote_port)
    # An IP address is resolved here; only a host name needs the resolver's thread.
    try:
        addresses = socket.getaddrinfo(*where, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        addresses = await loop.getaddrinfo(*where, type=socket.SOCK_STREAM)
    except (ValueError, OverflowError) as err:
        raise KvBroken(f"not an address: {err}") from err
    family, kind, protocol, _, address = addresses[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        prepare(sock, limits)
        await loop.sock_connect(sock, address)
    # On cancellation, too: no caller has the socket yet.
    except BaseException:
        sock.close()
        raise
    return sock


@asynccontextmanager
async def _time_limit(seconds: float) -> AsyncIterator[None]:
    """Break a pull off after `seconds`. Raises KvBroken then."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as err:
        # Other TimeoutErrors are those of the socket, which `_as_load_errors` describes.
        if limit.expired():
            raise KvBroken(f"the pull took longer than {seconds:g} s") from err
        raise


@contextmanager
def _as_load_errors(params: TransferParams, silence: float) -> Iterator[None]:
    """Turn errors of the connection into a KvLoadError that names the producer.

    `silence` is the socket's time limit in seconds, for the message.
    """
    peer = f"producer {params.remote_host}:{params.remote_port}"
    try:
        yield
    except KvRefused as err:
        raise KvRefused(f"{peer} refused: {err}") from err
    except KvBroken as err:
        raise KvBroken(f"{peer}: {err}") from err
    except TimeoutError as err:
        raise KvBroken(f"{peer}: silent for {silence:g} s") from err
    except OSError as err:
        raise KvBroken(f"{peer}: {err}") from err
