"""Begins a NIXL handshake as a reader would, and reads what the engine says of itself.

vLLM listens with ZeroMQ for (get_meta_msg, pipeline rank, tensor rank) and answers a hash of what
two engines must share, and its metadata. The reference engine's own protocol begins with the
reader's layout; of it only that the port answers is looked at.
"""

import asyncio
import os
from contextlib import suppress
from typing import Any, Final

import msgspec

from tandem_contract.commandline import HostPort

from .facts import SideChannel

TIMEOUT: Final = 3.0
"""Seconds: the listener of a busy vLLM shares its interpreter with the scheduler."""
_GET: Final = msgspec.msgpack.encode((b"get_meta_msg", 0, 0))


class _Payload(msgspec.Struct):
    compatibility_hash: str
    agent_metadata_bytes: bytes


async def ask_nixl(address: HostPort) -> SideChannel:
    """What vLLM's side channel says at `address`."""
    reached = await ask_port(address)
    if reached.trouble is not None:
        return reached
    try:
        import zmq.asyncio  # noqa: PLC0415 - comes with the extra `engine`
    except ImportError:
        return reached
    with zmq.asyncio.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://{address}")
        try:
            async with asyncio.timeout(TIMEOUT):
                await socket.send(_GET)
                parts = await socket.recv_multipart()
            payload = msgspec.msgpack.decode(parts[0], type=_Payload)
            metadata: dict[str, Any] = msgspec.msgpack.decode(payload.agent_metadata_bytes)
        except TimeoutError:
            return SideChannel(str(address), f"no handshake within {TIMEOUT:.0f} s")
        except msgspec.MsgspecError as err:
            return SideChannel(str(address), f"its handshake is not vLLM's: {err}")
    return SideChannel(str(address), None, payload.compatibility_hash, metadata)


async def ask_port(address: HostPort) -> SideChannel:
    """Whether something listens at `address`."""
    try:
        async with asyncio.timeout(TIMEOUT):
            _, writer = await asyncio.open_connection(*address)
    except TimeoutError:
        return SideChannel(str(address), f"no connection within {TIMEOUT:.0f} s")
    except OSError as err:
        said = os.strerror(err.errno) if err.errno and err.errno > 0 else str(err)
        return SideChannel(str(address), said.lower())
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return SideChannel(str(address))
