"""A client's request, and what becomes of it, as plain values: between the servers and the picker.

    HttpRequest       what the client asks for
    HeaderChanges     how the request goes on, to which backend
    ResponseHeaders   how a backend answered
    BrokenAnswer      an answer that ended too early
    NotPlaced         no backend gets the request: it is answered with a `Reply`

Nothing here knows Envoy or a socket: `server` makes these values of ext_proc's messages, and the
router of its own connections. They are structs of msgspec, not data classes, because each request
makes several: they are made in a tenth of the time.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct


class HttpRequest(Struct, frozen=True):
    """Method, path and headers of a client's request."""

    method: str
    path: str
    """With its query string."""
    headers: Mapping[str, str]
    """Names in lower case."""
    subset: frozenset[str] | None = None
    """The gateway's subset hint: the `ip:port` or `ip` of each backend it allows; None allows
    all."""
    preparation: object = None
    """What the picker found out about the body before the pick; None: nothing."""


class HeaderChanges(Struct, frozen=True):
    """Headers to set and to remove. Removals are never among the headers to set."""

    set: tuple[tuple[str, str], ...] = ()
    remove: tuple[str, ...] = ()
    destination: str | None = None
    """The picked endpoint. If given, Envoy also selects the route again and receives the value as
    dynamic metadata."""

    def with_header(self, name: str, value: str) -> "HeaderChanges":
        """A copy that also sets the header `name`."""
        return HeaderChanges((*self.set, (name, value)), self.remove, self.destination)


class ResponseHeaders(Struct, frozen=True):
    """A backend's response headers passed."""

    timing: str | None
    """Value of the timing header; None when there is none."""
    status: int = 200
    prefill: str | None = None
    """Name of the backend that ran the prefill; None when the sidecar names none."""
    path: str | None = None
    """Routing path that the sidecar took; None when no Tandem sidecar answered."""
    retry_after: str | None = None
    """Value of the header Retry-After."""
    served: str | None = None
    """`ip:port` of the backend that was used, which may be another one than the picker named; None
    when the gateway does not tell."""
    details: str | None = None
    """The gateway's response code details: `via_upstream` for a backend's own response, else why
    the gateway answered itself; None when it does not tell."""
    is_stream: bool = False
    """Whether the answer is an event stream: its headers pass with the first token, if a sidecar
    or Tandem's engine sent them."""


class Ending(StrEnum):
    """How an answer ended too early, after its headers."""

    BROKEN = "broken"
    """The connection to the backend ended."""
    IDLE = "idle"
    """Envoy's stream idle timeout ended it: neither side sent a byte for so long."""
    LEFT = "left"
    """The client left, STALL_SECONDS or more after headers which nothing followed."""
    UNKNOWN = "unknown"
    """A way that only a newer replica knows. Nothing counts it."""

    @classmethod
    def _missing_(cls, value: object) -> "Ending":
        # Decoding an event with a new way must not end the connection to the replica that sent it.
        return cls.UNKNOWN


class BrokenAnswer(Struct, frozen=True):
    """An answer that ended too early."""

    backend: str
    """`ip:port`."""
    started: float
    """When the gateway received the request; Unix seconds."""
    request_id: str = ""
    ending: Ending = Ending.BROKEN


class Reply(Struct, frozen=True):
    """An answer to a client without any backend: an error, or a list of models."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = (("content-type", "application/json"),)


NO_BACKEND: Final = "no_backend"
"""`NotPlaced.reason` where no pod can serve the request now."""


class NotPlaced(Exception):
    """No backend gets the request: `reply` is its answer, `reason` why, in one word."""

    def __init__(self, reply: Reply, reason: str = "") -> None:
        super().__init__(reply.status)
        self.reply, self.reason = reply, reason
