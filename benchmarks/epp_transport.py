"""The EPP's transport without its decision: every request is placed on one engine.

python -m benchmarks.epp_transport PORT ADDRESS [--tls-dir DIR]
"""

import asyncio
from pathlib import Path
from typing import Final

import click
import uvloop

from tandem_contract import headers as wire
from tandem_contract.commandline import HostPort
from tandem_contract.memory import reuse_large_blocks
from tandem_epp.exchange import HeaderChanges, HttpRequest, NotPlaced, ResponseHeaders
from tandem_epp.server.ext_proc.http2_server import Http2Server
from tandem_epp.server.http2.tls import TlsSettings, tls_context

_BODY_LIMIT: Final = 4 << 20


class _Placed:
    """A request that is not counted."""

    response_headers = ()
    answered_model = None

    def __init__(self, mutation: HeaderChanges) -> None:
        self.mutation = mutation

    def take_body(self) -> None:
        """The body stays."""

    def on_response_headers(self, response: ResponseHeaders, now: float) -> None:
        pass

    def end(self, now: float) -> None:
        pass


class _Picker:
    """Answers with as many headers as the EPP's picker does."""

    def __init__(self, address: str) -> None:
        plan = "v1.k." + "x" * 200
        headers = ((wire.DESTINATION_ENDPOINT, address), (wire.PLAN, plan))
        remove = tuple(sorted(wire.INTERNAL - {name for name, _ in headers}))
        self._placed = _Placed(HeaderChanges(headers, remove, address))

    def needs_body(self, request: HttpRequest) -> bool:
        return request.method == "POST"

    def place(self, request: HttpRequest, body: bytes, now: float) -> _Placed:
        return self._placed

    def body_too_large(self, limit: int) -> NotPlaced:
        raise NotImplementedError

    def body_too_slow(self) -> NotPlaced:
        raise NotImplementedError

    def body_in_pieces(self) -> NotPlaced:
        raise NotImplementedError

    def memory_full(self) -> NotPlaced:
        raise NotImplementedError


async def _serve(port: int, address: str, tls_dir: Path | None) -> None:
    tls = tls_context(TlsSettings(directory=tls_dir)) if tls_dir else None
    listen = HostPort("127.0.0.1", port)
    server = Http2Server(_Picker(address), listen, _BODY_LIMIT, tls=tls)
    await server.start()
    await asyncio.get_running_loop().create_future()


@click.command()
@click.argument("port", type=int)
@click.argument("address")
@click.option("--tls-dir", type=click.Path(path_type=Path))
def main(port: int, address: str, tls_dir: Path | None) -> None:
    """Serve on 127.0.0.1:PORT until killed; requests go to ADDRESS."""
    reuse_large_blocks()
    uvloop.run(_serve(port, address, tls_dir))


if __name__ == "__main__":
    main()
