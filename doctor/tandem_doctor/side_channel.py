"""Begins a NIXL handshake as a reader of KV would, and reads the engine's metadata.

vLLM listens with ZeroMQ for (get_meta_msg, pipeline rank, tensor rank) and answers with a hash of
what two engines must have in common, and its metadata. The one request is sent here in ZMTP 3.0
without a library, because the image from which the doctor runs inside a cluster has no ZeroMQ.
The reference engine has a protocol of its own that begins with the reader's layout; for it the
doctor only checks that the port accepts connections.
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
"""Seconds for the handshake. In vLLM the listener shares the Python interpreter with the scheduler,
so a busy engine answers late."""
_GET_METADATA: Final = msgspec.msgpack.encode((b"get_meta_msg", 0, 0))

# ZMTP 3.0, rfc.zeromq.org/spec/23: a greeting, a READY command, then messages in frames.
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY: Final = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 3) + b"REQ"
_MORE, _LONG, _COMMAND = 1, 2, 4
_MAX_FRAME: Final = 64 * 1024**2
"""Bytes; a larger frame is not part of a handshake."""


class _Payload(msgspec.Struct):
    compatibility_hash: str
    agent_metadata_bytes: bytes


class _NotZmtp(Exception):
    """The port does not speak ZeroMQ's protocol; the message says what it sent."""


async def handshake(address: HostPort) -> SideChannel:
    """Request the metadata of vLLM's side channel at `address`."""
    where = str(address)
    try:
        async with asyncio.timeout(TIMEOUT), _connection(address) as (reader, writer):
            answer = await _request(reader, writer, _GET_METADATA)
        payload = msgspec.msgpack.decode(answer, type=_Payload)
        metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=dict[str, Any])
    except TimeoutError:
        return SideChannel(where, f"no handshake within {TIMEOUT:.0f} s")
    except OSError as err:
        return SideChannel(where, _error_text(err))
    # The port is open, but another program or another version of vLLM listens there.
    except (_NotZmtp, IncompleteReadError, msgspec.MsgspecError) as err:
        return SideChannel(where, f"its handshake is not vLLM's: {err}")
    return SideChannel(where, None, payload.compatibility_hash, metadata)


async def connect(address: HostPort) -> SideChannel:
    """Whether `address` accepts connections."""
    try:
        async with asyncio.timeout(TIMEOUT), _connection(address):
            return SideChannel(str(address))
    except TimeoutError:
        return SideChannel(str(address), f"no connection within {TIMEOUT:.0f} s")
    except OSError as err:
        return SideChannel(str(address), _error_text(err))


async def firewall_error(address: HostPort) -> str | None:
    """Why a connection to `address` gets no answer from its host; None if it does.

    A refused connection is an answer, too: nothing listens there, and no firewall dropped it.
    """
    try:
        async with asyncio.timeout(TIMEOUT), _connection(address):
            return None
    except ConnectionRefusedError:
        return None
    except TimeoutError:
        return f"no answer within {TIMEOUT:.0f} s"
    except OSError as err:
        return _error_text(err)


@asynccontextmanager
async def _connection(address: HostPort) -> AsyncIterator[tuple[StreamReader, StreamWriter]]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield reader, writer
    finally:
        # The doctor sends nothing more: the engine sees the end of the stream.
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _request(reader: StreamReader, writer: StreamWriter, message: bytes) -> bytes:
    """Send one message as a REQ socket does; returns the first part of the answer."""
    writer.write(_GREETING + _frame(_COMMAND, _READY))
    greeting = await reader.readexactly(len(_GREETING))
    if greeting[0] != _GREETING[0] or greeting[9] != _GREETING[9]:
        raise _NotZmtp("its greeting is not ZMTP")
    # ZeroMQ takes a message for a command until it has sent its own READY: wait for that first.
    while not (await _read_frame(reader))[0] & _COMMAND:
        pass
    # A REQ socket sends an empty delimiter frame before its message; the answer has one, too.
    writer.write(_frame(_MORE, b"") + _frame(0, message))
    while (await _read_frame(reader)) != (_MORE, b""):
        pass
    return (await _read_frame(reader))[1]


def _frame(flags: int, body: bytes) -> bytes:
    return bytes((flags, len(body))) + body


async def _read_frame(reader: StreamReader) -> tuple[int, bytes]:
    """Flags (without the one for long frames) and body of the next frame."""
    flags = (await reader.readexactly(1))[0]
    size = int.from_bytes(await reader.readexactly(8 if flags & _LONG else 1))
    # Before reading: another protocol's bytes could be taken for a huge length.
    if size > _MAX_FRAME:
        raise _NotZmtp(f"a frame of {size} bytes")
    return flags & ~_LONG, await reader.readexactly(size)


def _error_text(err: OSError) -> str:
    return (os.strerror(err.errno) if err.errno and err.errno > 0 else str(err)).lower()
