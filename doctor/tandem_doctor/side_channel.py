"""Begins a NIXL handshake as a reader would, and reads what the engine says of itself.

vLLM listens with ZeroMQ for (get_meta_msg, pipeline rank, tensor rank) and answers a hash of what
two engines must share, and its metadata. One question is asked of it, so ZMTP 3.0 is spoken here:
the image that the doctor runs from inside a cluster has no ZeroMQ. The reference engine's own
protocol begins with the reader's layout; of it only that the port answers is looked at.
"""

import asyncio
import os
import struct
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import msgspec

from tandem_contract.commandline import HostPort

from .facts import SideChannel

TIMEOUT: Final = 3.0
"""Seconds: the listener of a busy vLLM shares its interpreter with the scheduler."""
_GET: Final = msgspec.msgpack.encode((b"get_meta_msg", 0, 0))

# rfc.zeromq.org/spec/23: a greeting, a READY command, then messages in frames.
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY: Final = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 3) + b"REQ"
_MORE, _LONG, _COMMAND = 1, 2, 4
_LARGEST: Final = 64 * 1024**2
"""Bytes of a frame: more is no handshake."""


class _Payload(msgspec.Struct):
    compatibility_hash: str
    agent_metadata_bytes: bytes


class _NotSpoken(Exception):
    """What listens there is no ZeroMQ; the message says what it did."""


async def ask_nixl(address: HostPort) -> SideChannel:
    """What vLLM's side channel says at `address`."""
    where = str(address)
    try:
        async with asyncio.timeout(TIMEOUT), _connected(address) as (reader, writer):
            answer = await _asked(reader, writer, _GET)
        payload = msgspec.msgpack.decode(answer, type=_Payload)
        metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=dict[str, Any])
    except TimeoutError:
        return SideChannel(where, f"no handshake within {TIMEOUT:.0f} s")
    except OSError as err:
        return SideChannel(where, _said(err))
    except (_NotSpoken, IncompleteReadError, msgspec.MsgspecError) as err:
        return SideChannel(where, f"its handshake is not vLLM's: {err}")
    return SideChannel(where, None, payload.compatibility_hash, metadata)


async def ask_port(address: HostPort) -> SideChannel:
    """Whether something listens at `address`."""
    try:
        async with asyncio.timeout(TIMEOUT), _connected(address):
            return SideChannel(str(address))
    except TimeoutError:
        return SideChannel(str(address), f"no connection within {TIMEOUT:.0f} s")
    except OSError as err:
        return SideChannel(str(address), _said(err))


@asynccontextmanager
async def _connected(address: HostPort) -> AsyncIterator[tuple[StreamReader, StreamWriter]]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _asked(reader: StreamReader, writer: StreamWriter, question: bytes) -> bytes:
    """The first part of the answer to one question, asked as a REQ socket does."""
    writer.write(_GREETING + _frame(_COMMAND, _READY))
    greeting = await reader.readexactly(len(_GREETING))
    if greeting[0] != _GREETING[0] or greeting[9] != _GREETING[9]:
        raise _NotSpoken("it greets with something else")
    # ZeroMQ takes a message for a command until it has said that it is ready itself.
    while not (await _read(reader))[0] & _COMMAND:
        pass
    writer.write(_frame(_MORE, b"") + _frame(0, question))
    while (await _read(reader)) != (_MORE, b""):
        pass
    return (await _read(reader))[1]


def _frame(flags: int, body: bytes) -> bytes:
    return bytes((flags, len(body))) + body


async def _read(reader: StreamReader) -> tuple[int, bytes]:
    """Flags, without that of the size, and the body of the next frame."""
    flags = (await reader.readexactly(1))[0]
    size = int.from_bytes(await reader.readexactly(8 if flags & _LONG else 1))
    if size > _LARGEST:
        raise _NotSpoken(f"a frame of {size} bytes")
    return flags & ~_LONG, await reader.readexactly(size)


def _said(err: OSError) -> str:
    return (os.strerror(err.errno) if err.errno and err.errno > 0 else str(err)).lower()
