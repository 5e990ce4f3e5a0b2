"""Carries bytes both ways between a client and an engine that switched to another protocol.

    tunnel = Tunnel(client, call, ended)
    tunnel.begin(head)

Each side is read only as fast as the other takes the bytes. Over TLS, where asyncio cannot close
one direction alone, the end of one side ends both.
"""

from collections.abc import Callable

from .client import ClientConnection
from .connection import Call, Failure
from .messages import ResponseHead


class Tunnel:
    """Both connections from the 101 on; receives the engine's bytes and the client's."""

    payload_only = False
    survives_half_close = True

    def __init__(self, client: ClientConnection, call: Call, ended: Callable[[str], None]) -> None:
        """`ended` is called once, with the reason if the engine or the sidecar broke off."""
        self._client = client
        self._call = call
        self._ended: Callable[[str], None] | None = ended
        self._client_done = False
        self._engine_done = False

    def begin(self, head: bytes) -> None:
        """Send the engine's `head` to the client and take over both connections."""
        # First: bytes after the 101 in the same read are passed on when the call's `head` returns.
        self._call.receiver = self
        self._call.server_full = self._server_full
        self._client.write(head)
        self._client.switch(self)

    def cut(self, why: str) -> None:
        """Break off both connections."""
        self._call.abort()
        self._client.abort()
        self._end(why)

    # From the client

    def client_data(self, data: bytes) -> None:
        self._call.write(data)

    def client_eof(self) -> None:
        self._client_done = True
        if self._engine_done or not self._call.can_half_close:
            self._close()
        else:
            self._call.write_eof()

    def client_disconnected(self) -> None:
        self._call.abort()
        self._end()

    def pause_sending(self) -> None:
        self._call.pause()

    def resume_sending(self) -> None:
        self._call.resume()

    # From the engine

    def head(self, head: ResponseHead) -> None:
        raise AssertionError("a connection that switched protocols has no further heads")

    def body(self, data: bytes, last: bool) -> None:
        self._client.touch()
        if data:
            self._client.write(data)
        if not last:
            return
        self._engine_done = True
        if self._client_done or not self._call.can_half_close:
            self._close()
        else:
            self._client.write_eof()

    def failed(self, failure: Failure, detail: str) -> None:
        self._client.abort()
        self._end(detail)

    def _server_full(self, full: bool) -> None:
        self._client.set_reading(not full)

    def _close(self) -> None:
        self._call.close()
        self._client.close()
        self._end()

    def _end(self, why: str = "") -> None:
        # Both connections may report their end; the first one counts.
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(why)
