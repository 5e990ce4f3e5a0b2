"""What the two transports have in common: grpcio's (`grpc_server`) and our own (`http2_server`).

Both drive `stream.ExtProcStream` and `access_log`, so that Envoy sees the same answers from either.

Errors: `ListenError` when a server cannot listen at its address.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

from tandem_contract.held_bytes import HeldBytes

from ...exchange import HttpRequest

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
REPLY_SECONDS: Final = 5.0
"""Seconds beyond the longest wait for which a gateway waits: the EPP itself answers before."""
ENVELOPE: Final = 1 << 16
"""Bytes that a message may hold besides the body: headers and framing."""

Preparer = Callable[[HttpRequest, bytes], AbstractAsyncContextManager[object] | None]
"""Entered before the pick and left after it; must begin by itself, soon. Its value is what the pick
needs to know about the body and cannot wait for. None: the pick waits for nothing, and costs no
task."""


class ListenError(OSError):
    """The port is in use, or the address is not one of this machine's."""


class ExtProcServer(Protocol):
    """Serves ext_proc on one address."""

    held: HeldBytes
    """What all streams hold."""
    prepare: Preparer | None
    """Called with each request that has a body; None: picks wait for nothing."""
    longest_wait: Callable[[], float]
    """Seconds that a prepared request may wait for its pick; 0: it waits for what comes soon."""

    async def start(self) -> int:
        """Listen and serve; returns the port. Raises ListenError."""

    async def stop(self, grace: float) -> None:
        """Accept no new stream, end streams of placed requests now, all others after `grace` s.

        Streams of placed requests end with status OK, which tells Envoy to go on without ext_proc.
        Any other status is an error: Envoy would reset a request that it sent in
        FULL_DUPLEX_STREAMED mode.
        """
