"""A client that writes raw bytes and reads responses, for what HTTP libraries do not allow."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tandem_contract.commandline import HostPort


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes
    """Chunked coding taken off."""


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def post(self, body: bytes, *headers: str, path: str = "/v1/completions") -> None:
        lines = "".join(f"{line}\r\n" for line in headers)
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{lines}content-length: {len(body)}\r\n\r\n"
        self.send(head.encode() + body)

    async def response(self, *, head: bool = False) -> Response:
        async with asyncio.timeout(10):
            block = await self.reader.readuntil(b"\r\n\r\n")
            first, *lines = block.decode("latin-1").rstrip("\r\n").split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (li.partition(":") for li in lines)}
            status = int(first.split(" ")[1])
            body = (
                b"" if head or status < 200 or status in (204, 304) else await self._body(headers)
            )
        return Response(status, headers, body)

    async def closed(self) -> bytes:
        """The bytes up to the end of the connection."""
        async with asyncio.timeout(10):
            return await self.reader.read()

    async def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") != "chunked":
            return await self.reader.read()
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += await self.reader.readexactly(size)
            await self.reader.readline()
        await self.reader.readline()
        return body


@asynccontextmanager
async def wire(address: HostPort) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()
