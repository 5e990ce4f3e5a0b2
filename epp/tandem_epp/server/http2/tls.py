"""TLS of the servers: certificate, versions and ciphers; and a port that serves clear text beside
it, because gateways differ in which of both they speak to an EPP.

The first byte of a client tells: a TLS handshake begins with 22 (RFC 8446, 5.1), HTTP with a
letter. asyncio cannot begin TLS on a connection that it has read from, so the byte is looked at,
and left in the socket, before asyncio gets it.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tandem_contract.connections import Beginning, address_of, to_evict
from tandem_contract.server_tls import CERTIFICATE, KEY, load_pem, require_clients, self_signed_pem

_HTTP2: Final = ("h2", "http/1.1")
"""HTTP/1.1 is for probes."""


@dataclass(frozen=True, kw_only=True)
class TlsSettings:
    """How a server serves TLS."""

    directory: Path | None = None
    """Directory of tls.crt and tls.key, as Kubernetes mounts a TLS secret; None: a certificate that
    the process makes at its start, which encrypts and cannot be verified."""
    minimum: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    """HTTP/2 needs 1.2 (RFC 9113, 9.2)."""
    ciphers: str = ""
    """OpenSSL's names for the ciphers of TLS 1.2, with colons between them; empty: its default."""
    is_mutual: bool = False
    """Whether clients need a certificate of the authorities in the directory's ca.crt."""
    allows_clear_text: bool = False
    """Whether clients may also connect without TLS, for ext_proc only."""
    client_ca: Path | None = None
    """PEM file of the authorities of client certificates, which are then required; None: clients
    need none."""


def tls_context(settings: TlsSettings, protocols: Sequence[str] = _HTTP2) -> ssl.SSLContext:
    """The context for new connections. `protocols` are offered by ALPN, the preferred first.

    Raises OSError, which ssl.SSLError is.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = settings.minimum
    # Python's default context rules out compression already.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(list(protocols))
    if settings.ciphers:
        context.set_ciphers(settings.ciphers)
    if settings.client_ca is not None:
        context.load_verify_locations(settings.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    if settings.is_mutual and settings.directory is not None:
        require_clients(context, settings.directory)
    if settings.directory is None:
        load_pem(context, self_signed_pem())
    else:
        load_certificate(context, settings.directory)
    return context


def load_certificate(context: ssl.SSLContext, directory: Path) -> None:
    """Use the files' current content for new connections. Raises OSError; the context then keeps
    what it had."""
    # Tried on another context first: a key that does not fit would leave half of the pair.
    for target in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
        target.load_cert_chain(directory / CERTIFICATE, directory / KEY)


_HANDSHAKE: Final = b"\x16"
_PAUSE_SECONDS: Final = 1.0
"""Seconds without accepting, when the process has no file descriptor left."""
_BACKLOG: Final = 1024

log: Final = logging.getLogger(__name__)


class EitherListener:
    """Accepts connections, and keeps those that have not begun."""

    def __init__(
        self,
        protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext,
        *,
        limit: int,
        seconds: float,
    ) -> None:
        """At most `limit` connections wait for their first byte or their handshake, each for
        `seconds`; a further one gets the place of one that waits for long."""
        self._protocol, self._tls = protocol, tls
        self._limit, self._seconds = limit, seconds
        self._accepting: asyncio.Task[None] | None = None
        self._beginning: dict[asyncio.Task[None], Beginning] = {}

    def listen(self, host: str, port: int) -> int:
        """Accept connections; returns the port. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        listening.setblocking(False)
        bound: int = listening.getsockname()[1]
        self._accepting = asyncio.create_task(self._accept(listening))
        # Not before the event loop has ceased to wait for it.
        self._accepting.add_done_callback(lambda _: listening.close())
        return bound

    def close(self) -> None:
        """Accept no connection, and give up those that have not begun."""
        for task in (self._accepting, *self._beginning):
            if task is not None:
                task.cancel()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, address = await loop.sock_accept(listening)
            except ConnectionError:
                # The client has left already.
                continue
            except OSError as err:
                log.warning("cannot accept a connection: %s", err)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            self._start(client, address_of(address))

    def _start(self, client: socket.socket, peer: str) -> None:
        if len(self._beginning) >= self._limit and not self._evict():
            client.close()
            return

        def end(task: asyncio.Task[None]) -> None:
            self._beginning.pop(task, None)
            # Here, because it may be cancelled before it has run.
            if task.cancelled():
                client.close()

        task = asyncio.create_task(self._begin(client))
        self._beginning[task] = Beginning(task, client, peer, asyncio.get_running_loop().time())
        task.add_done_callback(end)

    def _evict(self) -> bool:
        """Give up connections for a newcomer; False: none has waited for long."""
        found = to_evict(self._beginning.values(), asyncio.get_running_loop().time())
        for beginning in found:
            del self._beginning[beginning.task]
            beginning.evict()
        return bool(found)

    async def _begin(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._seconds):
                tls = self._tls if await _first_byte(client) == _HANDSHAKE else None
                # A message must not wait for the acknowledgement of the one before.
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.connect_accepted_socket(self._protocol, client, ssl=tls)
        # A timeout and an error of TLS are OSErrors, too.
        except OSError as err:
            log.debug("a connection has not begun: %s", err)
            client.close()


async def _first_byte(client: socket.socket) -> bytes:
    """The first byte, which stays in the socket; none if the client has closed. Raises OSError."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    client.setblocking(False)
    while True:
        readable.clear()
        loop.add_reader(client.fileno(), readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(client.fileno())
        with suppress(BlockingIOError):
            return client.recv(1, socket.MSG_PEEK)


def bound_port(server: asyncio.Server) -> int:
    """The port at which `server` listens. Not in a compiled module, which would take `sockets` for
    the tuple that asyncio declares; uvloop's is a list."""
    port: int = server.sockets[0].getsockname()[1]
    return port
