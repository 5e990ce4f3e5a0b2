"""A client and an engine that agreed on another protocol: bytes both ways until both ended.

    tunnel = Tunnel(client, call, ended)
    tunnel.begin(head)

Each side is read only as fast as the other takes it. Where the engine's connection is TLS, which
has no half-closing here, the end of one side is the end of both.
"""

from collections.abc import Callable

from .client import Client
from .connection import Failure
from .messages import ResponseHead
from .upstream import Call


class Tunnel:
    """Both connections from the 101 on; receives the engine's bytes and the client's."""

    payload_only = False
    survives_half_close = True

    def __init__(self, client: Client, call: Call, ended: Callable[[str], None]) -> None:
        """`ended` is called once, with why the engine or we broke it off, if one did."""
        self._client = client
        self._call = call
        self._ended: Callable[[str], None] | None = ended
        self._client_done = False
        self._engine_done = False

    def begin(self, head: bytes) -> None:
        """Give the client the engine's `head` and take both connections over."""
        self._call.receiver = self
        self._call.engine_full = self._engine_full
        self._client.write(head)
        self._client.switch(self)

    def cut(self, why: str) -> None:
        """Break both off."""
        self._call.abort()
        self._client.abort()
        self._end(why)

    # The client

    def client_data(self, data: bytes) -> None:
        self._call.write(data)

    def client_eof(self) -> None:
        self._client_done = True
        if self._engine_done or not self._call.half_closes:
            self._close()
        else:
            self._call.write_eof()

    def client_left(self) -> None:
        self._call.abort()
        self._end()

    def client_full(self) -> None:
        self._call.pause()

    def client_ready(self) -> None:
        self._call.resume()

    # The engine

    def head(self, head: ResponseHead) -> None:
        raise AssertionError("a connection that switched has no more heads")

    def body(self, data: bytes, last: bool) -> None:
        self._client.touch()
        if data:
            self._client.write(data)
        if not last:
            return
        self._engine_done = True
        if self._client_done or not self._call.half_closes:
            self._close()
        else:
            self._client.write_eof()

    def failed(self, failure: Failure, detail: str) -> None:
        self._client.abort()
        self._end(detail)

    def _engine_full(self, full: bool) -> None:
        self._client.read(not full)

    def _close(self) -> None:
        self._call.close()
        self._client.close()
        self._end()

    def _end(self, why: str = "") -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(why)
