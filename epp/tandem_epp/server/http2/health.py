"""Probes: gRPC's health service, and the pages that the kubelet reads by HTTP/1.1 or HTTP/2. Pure.

Source: grpc/grpc/health/v1/health.proto. `Check` answers once; `Watch` answers at once and then
whenever the status changes, which `HealthService.update` finds out.
"""

from collections.abc import Callable, Mapping
from typing import Final

from google.protobuf.message import DecodeError

from tandem_contract import endpoints

from . import health_pb2 as pb
from .errors import CallFault, Status
from .session import Call, Service

SERVICE: Final = "grpc.health.v1.Health"
SERVING: Final = 1
NOT_SERVING: Final = 2
SERVICE_UNKNOWN: Final = 3

HTTP1_STARTS: Final = (b"GET ", b"HEAD ")
"""How a probe by HTTP/1.1 begins. The preface of HTTP/2 begins otherwise."""
_HTTP1_HEAD: Final = 8192
"""Bytes of a probe by HTTP/1.1."""
_REASONS: Final = {200: "OK", 400: "Bad Request", 404: "Not Found", 503: "Service Unavailable"}


class HealthService:
    """The state of this process, for those who ask."""

    def __init__(self, is_ready: Callable[[], bool], services: frozenset[str]) -> None:
        """`services` are the names of the gRPC services that are served while `is_ready`, beside
        the names that probes ask for."""
        self._is_ready = is_ready
        self._services = services | {"", SERVICE, endpoints.GRPC_READINESS, endpoints.GRPC_EPP}
        self._watches: set[_Watch] = set()

    @property
    def methods(self) -> Mapping[str, Service]:
        """The methods of the gRPC service."""
        return {
            f"/{SERVICE}/Check": lambda call: _Check(self, call),
            f"/{SERVICE}/Watch": lambda call: _Watch(self, call),
        }

    @property
    def is_watched(self) -> bool:
        """Whether `update` has anything to do."""
        return bool(self._watches)

    def status(self, service: str) -> int:
        """The serving status of a service."""
        if service == endpoints.GRPC_LIVENESS:
            return SERVING
        if service not in self._services:
            return SERVICE_UNKNOWN
        return SERVING if self._is_ready() else NOT_SERVING

    def update(self) -> None:
        """Tell those that watch what has changed."""
        for watch in list(self._watches):
            watch.update()

    def close(self) -> None:
        """End all watches."""
        for watch in list(self._watches):
            watch.update()
            watch.close()

    def page(self, path: str) -> tuple[int, bytes] | None:
        """Status and text of a page, as on the health port; None: there is no such page."""
        match path.partition("?")[0]:
            case endpoints.LIVE:
                return 200, b"ok\n"
            case endpoints.READY:
                return (200, b"ready\n") if self._is_ready() else (503, b"not ready\n")
        return None

    def watch(self, handler: "_Watch") -> None:
        """Keep `handler` up to date."""
        self._watches.add(handler)

    def unwatch(self, handler: "_Watch") -> None:
        """Forget `handler`."""
        self._watches.discard(handler)

    def answer_http1(self, data: bytes) -> bytes | None:
        """The answer to a request by HTTP/1.1, after which the connection ends; None: more of the
        request must come."""
        head, end, _ = data.partition(b"\r\n\r\n")
        if not end:
            return None if len(data) <= _HTTP1_HEAD else _http1(400, b"bad request\n")
        words = head.partition(b"\r\n")[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _http1(400, b"bad request\n")
        status, text = self.page(words[1].decode("latin-1")) or (404, b"not found\n")
        return _http1(status, text, has_body=words[0] != b"HEAD")


def _http1(status: int, text: bytes, *, has_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: text/plain; charset=utf-8\r\n"
        f"content-length: {len(text)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + (text if has_body else b"")


class _Check:
    """Answers one question."""

    def __init__(self, health: HealthService, call: Call) -> None:
        self._health, self._call = health, call
        self._service: str | None = None

    def on_message(self, message: bytes) -> None:
        if self._service is not None:
            raise CallFault(Status.INTERNAL, "Check takes one request")
        self._service = _service(message)

    def on_over_budget(self) -> None:
        self._call.exhaust()

    def on_half_close(self) -> None:
        if self._service is None:
            raise CallFault(Status.INTERNAL, "Check needs a request")
        status = self._health.status(self._service)
        if status == SERVICE_UNKNOWN:
            raise CallFault(Status.NOT_FOUND, f"unknown service {self._service}")
        self._call.send(_response(status))
        self._call.finish()

    def on_end(self) -> None:
        pass


class _Watch:
    """Follows one service's status."""

    def __init__(self, health: HealthService, call: Call) -> None:
        self._health, self._call = health, call
        self._service: str | None = None
        self._told = 0
        """The status that the client knows."""

    def on_message(self, message: bytes) -> None:
        if self._service is not None:
            raise CallFault(Status.INTERNAL, "Watch takes one request")
        self._service = _service(message)
        self._health.watch(self)
        self._tell()

    def on_over_budget(self) -> None:
        self._call.exhaust()

    def on_half_close(self) -> None:
        if self._service is None:
            raise CallFault(Status.INTERNAL, "Watch needs a request")

    def on_end(self) -> None:
        self._health.unwatch(self)

    def update(self) -> None:
        """Tell the client if the status has changed."""
        if self._tell():
            self._call.flush()

    def close(self) -> None:
        """End the call."""
        self._call.finish(Status.UNAVAILABLE, "the server stops")
        self._call.flush()

    def _tell(self) -> bool:
        status = self._health.status(self._service or "")
        if status == self._told:
            return False
        self._told = status
        self._call.send(_response(status))
        return True


def _service(message: bytes) -> str:
    try:
        return pb.HealthCheckRequest.FromString(message).service
    except DecodeError as err:
        raise CallFault(Status.INTERNAL, "the request is malformed") from err


def _response(status: int) -> bytes:
    return pb.HealthCheckResponse(status=status).SerializeToString()
