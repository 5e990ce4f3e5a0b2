"""The first hand-off of each pair of backends, before a client's request needs it.

`tandem_epp.backends.warmup` says when, and what for. An EPP asks a sidecar for the hand-off; here
the data path makes it, for a client on a socket pair that reads the answer and drops it.
"""

import asyncio
import socket
import uuid
from random import Random
from typing import Final

import msgspec

from tandem_contract.paths import RoutingPath
from tandem_contract.plan import WARM_UP, Timeouts
from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_epp.backends.pods import Pod
from tandem_epp.backends.warmup_requests import ATTEMPT_SECONDS, warm_up_body
from tandem_http1.client import ActiveRequest, ClientConnection
from tandem_http1.messages import Request, request_bytes
from tandem_http1.server import Server
from tandem_sidecar.bodies.parse import parse_body
from tandem_sidecar.handoff.context import GenerationRequest
from tandem_sidecar.handoff.generation import start_generation
from tandem_sidecar.handoff.reply import new_record
from tandem_sidecar.observability.record import Record
from tandem_sidecar.security.route import Route

from .configuration import address_of
from .placed import Parts, candidate

_TARGET: Final = PATHS[RequestKind.COMPLETIONS].encode()
_HEADERS: Final = [
    (b"host", b"warm-up"),
    (b"content-type", b"application/json"),
    (b"connection", b"close"),
]


class OwnHandOffs:
    """Hands off by this process's own data path; it is a router's `warmup.HandOffs`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._random = Random()

    async def hand_off(self, decode: Pod, prefill: Pod) -> str:
        """See `warmup.HandOffs`."""
        if self._parts.context.lifecycle.draining:
            return "unreachable"
        handler = _OneHandOff(self._parts, decode, prefill)
        body = msgspec.json.encode(warm_up_body(decode, prefill, self._random))
        request = request_bytes(b"POST", _TARGET, _HEADERS, body)
        try:
            async with asyncio.timeout(ATTEMPT_SECONDS):
                await _exchange(handler, self._parts, request)
        except TimeoutError:
            return "unreachable"
        return _result(handler.record)

    async def close(self) -> None:
        """Nothing is open between two hand-offs."""


class _OneHandOff:
    """The handler of the only request of a connection."""

    record: Record | None = None
    """None until the request arrived."""

    def __init__(self, parts: Parts, decode: Pod, prefill: Pod) -> None:
        self._parts, self._decode, self._prefill = parts, decode, prefill

    def refuse(self, request: Request) -> bytes:
        """Nothing: the warm-up fails, and says why."""
        return b""

    def handle(self, request: Request, client: ClientConnection) -> ActiveRequest:
        """Send the request to the two backends, whatever else is known of them."""
        context, decode = self._parts.context, self._decode
        serving = self._parts.picker.routing.serving
        request_id = f"warm-up-{uuid.uuid4()}"
        self.record = new_record(context, request, request_id, RequestKind.COMPLETIONS)
        route = Route(
            RoutingPath.PREFILL_THEN_DECODE,
            WARM_UP,
            (candidate(self._prefill),),
            decode_name=decode.name,
            decode_rank=decode.rank,
            timeouts=Timeouts(serving.prefill_timeout, serving.kv_transfer_timeout),
        )
        generation = GenerationRequest(
            request,
            request_id,
            RequestKind.COMPLETIONS,
            parse_body(request.body),
            route,
            self.record,
            context.settings,
            {},
        )
        return start_generation(
            context, client, generation, address_of(decode.backend), decode.name
        )


async def _exchange(handler: _OneHandOff, parts: Parts, request: bytes) -> None:
    """Send `request` to `handler` and read the answer to its end: before that the hand-off is not
    complete. When it is cancelled, the data path aborts the hand-off as for any client."""
    server = Server(handler, parts.context.settings.limits)
    client_end, server_end = socket.socketpair()
    loop = asyncio.get_running_loop()
    # Cancelled before a transport has it, the client's end would stay open.
    close = client_end.close
    try:
        await loop.connect_accepted_socket(server.new_connection, server_end)
        reader, writer = await asyncio.open_connection(sock=client_end)
        close = writer.close
        writer.write(request)
        while await reader.read(1 << 16):
            pass
    finally:
        close()
        server.close()


def _result(record: Record | None) -> str:
    """How the request of `record` ended, as `warmup.HandOffs` names it."""
    if record is None or record.status is None:
        return "unreachable"
    if record.status >= 400:
        return "error"
    return "warm" if record.path is RoutingPath.PREFILL_THEN_DECODE else "fallback"
