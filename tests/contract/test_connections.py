"""A full server gives a newcomer the place of a client that it waits for."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem_contract import connections
from tandem_contract.connections import to_evict
from tandem_epp.http2.limits import Limits

from ..epp.http2.test_server import serving
from ..kvstore.servers import store_in_this_process

IDLE = b""
SLOW_HEAD = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
SLOW_BODY = b"PUT /ns/a HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nx"


@dataclass(frozen=True)
class Client:
    peer: str
    state: tuple[bool, float] | None

    def silence(self, now: float) -> tuple[bool, float] | None:
        return self.state


def test_which_connection_is_closed() -> None:
    served, new = Client("a", None), Client("a", (False, 1.0))
    assert to_evict([served, new], 0.0) == []
    late, idle, older = (Client("a", s) for s in ((True, 9.0), (False, 3.0), (False, 5.0)))
    alone = Client("b", (False, 1000.0))
    assert to_evict([served, new, late, idle, older, alone], 0.0) == [older]
    assert to_evict([served, new, late, alone], 0.0) == [late]
    assert to_evict([served, alone], 0.0) == [alone]


@pytest.mark.component
@pytest.mark.parametrize("begin", [IDLE, SLOW_HEAD, SLOW_BODY], ids=["idle", "head", "body"])
@pytest.mark.parametrize("server", ["store", "epp"])
async def test_a_newcomer_is_served_by_a_full_server(
    server: str, begin: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LATE_SECONDS", 0.05)
    async with AsyncExitStack() as stack:
        if server == "epp":
            port = (await stack.enter_async_context(serving(Limits(connections=3)))).port
        else:
            store = store_in_this_process(tmp_path, max_connections=3)
            location = (await stack.enter_async_context(store)).location
            port = int(location.endpoint.rpartition(":")[2])
        for _ in range(3):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(begin)
        async with asyncio.timeout(30):
            while not await is_served(port):
                pass


async def is_served(port: int) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        return b" 200 " in await reader.readline()
    except ConnectionError:
        return False
    finally:
        writer.close()
