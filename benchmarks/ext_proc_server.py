"""The EPP's transport without its decision: every request is placed on one engine.

python -m benchmarks.ext_proc_server PORT ADDRESS [--kind http2]
"""

import asyncio
from typing import Final

import click
import uvloop

from tandem_contract import headers as wire
from tandem_contract.commandline import HostPort
from tandem_epp.ext_proc.grpc_server import GrpcServer
from tandem_epp.ext_proc.http2_server import Http2Server
from tandem_epp.ext_proc.messages import HeaderMutation, HttpRequest, ResponseHeaders
from tandem_epp.ext_proc.stream import LocalReply

_BODY_LIMIT: Final = 4 << 20


class _Placed:
    """A request that is not counted."""

    def __init__(self, mutation: HeaderMutation) -> None:
        self.mutation = mutation

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
        self._placed = _Placed(HeaderMutation(headers, remove, address))

    def needs_body(self, request: HttpRequest) -> bool:
        return request.method == "POST"

    def place(self, request: HttpRequest, body: bytes, now: float) -> _Placed:
        return self._placed

    def body_too_large(self, limit: int) -> LocalReply:
        raise NotImplementedError


async def _serve(kind: type[Http2Server] | type[GrpcServer], port: int, address: str) -> None:
    server = kind(_Picker(address), HostPort("127.0.0.1", port), _BODY_LIMIT)
    await server.start()
    await asyncio.get_running_loop().create_future()


@click.command()
@click.argument("port", type=int)
@click.argument("address")
@click.option("--kind", type=click.Choice(["http2", "grpcio"]), default="http2")
def main(port: int, address: str, kind: str) -> None:
    """Serve on 127.0.0.1:PORT until killed; requests go to ADDRESS."""
    uvloop.run(_serve(Http2Server if kind == "http2" else GrpcServer, port, address))


if __name__ == "__main__":
    main()
