"""Binary messages on a WebSocket of either side, and the errors of the channel, which the package's
docstring explains.
"""

import asyncio
from typing import Final, TypeVar

import msgspec
from aiohttp import ClientWebSocketResponse, WSMsgType
from aiohttp.web import WebSocketResponse

from tandem_contract.peer_handshake import PeerRejected


class PeerError(Exception):
    """The connection to a peer must be closed; the dialer opens a new one."""


class PeerGone(PeerError):
    """The connection ended, or the peer was silent for too long."""


MAX_MESSAGE: Final = 1 << 20
"""Bytes; a larger message closes the connection. A frame has at most 256 KiB and one more event."""
REFUSED: Final = 1008
"""WebSocket close code of a refusal ("policy violation"); its text is the reason."""

Socket = ClientWebSocketResponse | WebSocketResponse
T = TypeVar("T")


async def receive(socket: Socket, timeout: float) -> bytes:
    """The next message. Raises PeerGone when the connection ends or after `timeout` seconds;
    PeerRejected when the other side closes it with a reason."""
    try:
        message = await socket.receive(timeout)
    except TimeoutError as err:
        raise PeerGone(f"no message for {timeout:g} s") from err
    if message.type is WSMsgType.BINARY and isinstance(message.data, bytes):
        return message.data
    if message.type is WSMsgType.CLOSE and message.data == REFUSED:
        # Shown in a log: cut and quoted, because the other side is not authenticated.
        raise PeerRejected("refused", f"the peer refuses this replica: {str(message.extra)[:80]!r}")
    raise PeerGone("the connection ended")


async def send(socket: Socket, data: bytes, timeout: float) -> None:
    """Send a message. Raises PeerGone when the peer takes none for `timeout` seconds."""
    try:
        async with asyncio.timeout(timeout):
            await socket.send_bytes(data)
    except (ConnectionError, TimeoutError) as err:
        raise PeerGone("the peer takes no message") from err


def decode(data: bytes, kind: type[T]) -> T:
    """A message of the handshake. Raises PeerRejected."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as err:
        raise PeerRejected("malformed", f"a message of the peer is malformed: {err}") from err
