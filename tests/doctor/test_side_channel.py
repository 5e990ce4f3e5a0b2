import asyncio

import msgspec
import pytest
import zmq.asyncio

from tandem_contract.commandline import HostPort
from tandem_doctor.side_channel import connect, handshake


async def fake_vllm_listener(socket: zmq.asyncio.Socket, answer: bytes) -> None:
    """A fake: answers as the listener of vLLM 0.32's NIXL connector does (base_scheduler.py)."""
    identity, empty, request = await socket.recv_multipart()
    assert msgspec.msgpack.decode(request) == [b"get_meta_msg", 0, 0]
    await socket.send_multipart([identity, empty, answer, msgspec.msgpack.encode(1.0)])


@pytest.mark.parametrize("is_valid", [True, False])
async def test_the_handshake_of_vllm_is_parsed(is_valid: bool) -> None:
    metadata = {"attn_backend_name": "FLASH_ATTN", "block_size": 64}
    payload = {
        "compatibility_hash": "abc",
        "agent_metadata_bytes": msgspec.msgpack.encode(metadata),
    }
    answer = msgspec.msgpack.encode(payload) if is_valid else b"\xc1"
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        listener = asyncio.create_task(fake_vllm_listener(socket, answer))
        channel = await handshake(HostPort("127.0.0.1", port))
        await listener
    if is_valid:
        assert (channel.error, channel.compatibility_hash) == (None, "abc")
        assert channel.metadata == metadata
    else:
        assert "is not vLLM's" in (channel.error or "")


async def test_a_closed_port() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    address = HostPort(*server.sockets[0].getsockname())
    assert (await connect(address)).error is None
    server.close()
    await server.wait_closed()
    assert "refused" in ((await connect(address)).error or "").lower()
    assert "refused" in ((await handshake(address)).error or "").lower()
