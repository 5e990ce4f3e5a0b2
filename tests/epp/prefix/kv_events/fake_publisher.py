"""A fake of vLLM 0.32's publisher of KV events: its sockets, frames and replay, and no engine."""

import asyncio
import time
from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

from tandem_epp.prefix.kv_events.subscriber import EngineAddress

END = (-1).to_bytes(8, "big", signed=True)


class FakeVllmPublisher:
    """Publishes at two ports of 127.0.0.1; `restart` takes them over with an empty buffer."""

    def __init__(
        self, *, keeps: int = 10_000, has_replay: bool = True, topic: bytes = b"kv@pod@model"
    ) -> None:
        self.keeps, self.has_replay, self.topic = keeps, has_replay, topic
        self._context = zmq.asyncio.Context()
        self._ports = [0, 0]
        self.replays_asked: list[int] = []

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._close()
        self._context.destroy(linger=0)

    @property
    def address(self) -> EngineAddress:
        events, replay = (f"tcp://127.0.0.1:{port}" for port in self._ports)
        return EngineAddress(events, replay)

    async def restart(self) -> None:
        """Another process of the same pod."""
        await self._close()
        await self._open()

    def hang_up(self) -> None:
        """End the connections of subscribers without a pause, as the end of a process does."""
        self._pub.close()

    async def publish(self, *events: Any, is_lost: bool = False, array: bool = False) -> int:
        """Send one batch; returns its number. `is_lost`: no subscriber gets it. `array`: the form
        of batches and events in which older releases send them."""
        number, self._number = self._number, self._number + 1
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        if not array and number % 2:
            # Newer than 0.32: the batch is a map, too.
            payload = msgspec.msgpack.encode(
                {"ts": time.time(), "events": events, "data_parallel_rank": 0}
            )
        if not is_lost:
            await self._pub.send_multipart((self.topic, number.to_bytes(8, "big"), payload))
        self._buffer.append((number, payload))
        return number

    async def publish_raw(self, payload: bytes) -> None:
        """Send a payload that is perhaps no batch."""
        number, self._number = self._number, self._number + 1
        await self._pub.send_multipart((self.topic, number.to_bytes(8, "big"), payload))

    async def _open(self) -> None:
        self._number = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=self.keeps)
        self._pub = await self._bind(zmq.PUB, 0)
        self._router = await self._bind(zmq.ROUTER, 1)
        self._task = asyncio.create_task(self._serve())

    async def _bind(self, kind: int, place: int) -> "zmq.asyncio.Socket":
        socket = self._context.socket(kind)
        socket.linger = 0
        async with asyncio.timeout(10):
            while True:
                # ZMQ closes the former socket in a thread of its own.
                with suppress(zmq.ZMQError):
                    socket.bind(f"tcp://127.0.0.1:{self._ports[place] or '*'}")
                    break
                await asyncio.sleep(0.01)
        self._ports[place] = int(socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        return socket

    async def _close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._pub.close()
        self._router.close()

    async def _serve(self) -> None:
        while True:
            client, _, first = await self._router.recv_multipart()
            start = int.from_bytes(first, "big")
            self.replays_asked.append(start)
            if not self.has_replay:
                continue
            for number, payload in list(self._buffer):
                if number >= start:
                    await self._router.send_multipart(
                        (client, b"", self.topic, number.to_bytes(8, "big"), payload)
                    )
            await self._router.send_multipart((client, b"", b"", END, b""))


def stored(
    hashes: list[Any], token_ids: list[int], parent: Any = None, **members: Any
) -> dict[str, Any]:
    """BlockStored with blocks of four tokens, as vLLM 0.32 encodes it: a tagged map."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": token_ids,
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        **members,
    }


def removed(hashes: list[Any], **members: Any) -> dict[str, Any]:
    return {
        "type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0, **members
    }  # fmt: skip


CLEARED = {"type": "AllBlocksCleared"}
