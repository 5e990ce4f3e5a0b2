"""One authenticated HTTP request to the API server; failures become the errors of `errors`."""

import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
import msgspec
from aiohttp import AddrInfoType, ClientRequest, ClientTimeout
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.rest import RESTClientObject

from tandem_contract.connections import keep_alive

from .errors import Fenced, Unreachable, error_of
from .resources import Object

JSON: Final = "application/json"
SILENT_SECONDS: Final = 20.0
"""Seconds without an acknowledgement of what was sent to the API server's host, or of the kernel's
probes, after which a connection ends. Longer: changes go unnoticed for as long; shorter: a brief
interruption of the network ends all watches."""

Observer = Callable[[str, int, float], None]
"""Called when an API call ends, with verb (get, list, create, …), HTTP status (0: no response) and
seconds."""


def _always() -> bool:
    return True


_may_write: Final[ContextVar[Callable[[], bool]]] = ContextVar("may_write", default=_always)
"""Asked by this task's writes when they have a connection, right before they are sent."""


class Transport:
    """Sends requests with an ApiClient's host, TLS and credentials, without its typed models."""

    def __init__(
        self,
        client: ApiClient,
        observer: Observer | None = None,
        may_write: Callable[[], bool] = _always,
    ) -> None:
        """`may_write` is asked right before a write is sent, when it has a connection."""
        self.client = client
        self._observer = observer
        self._may_write = may_write

    def fenced(self, may_write: Callable[[], bool]) -> "Transport":
        """The same client, with a fence before its writes."""
        return Transport(self.client, self._observer, may_write)

    async def authorization(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        # Adds the token, after refreshing it if necessary.
        await self.client.update_params_for_auth(headers, [], ["BearerToken"], "", "", None)
        return headers

    def observe(self, verb: str, status: int, seconds: float) -> None:
        if self._observer is not None:
            self._observer(verb, status, seconds)

    @contextlib.asynccontextmanager
    async def request(
        self,
        verb: str,
        path: str,
        *,
        body: Object | None = None,
        query: Mapping[str, str],
        content: str = JSON,
        timeout: aiohttp.ClientTimeout,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response to one request, its body not read yet.

        Raises ApiError for status >= 400, and Fenced for a write that `may_write` forbids.
        """
        # The status stays 0 when no response arrives, which the observer reports as such.
        started, status = time.monotonic(), 0
        encoded = urlencode({key: value for key, value in query.items() if value})
        url = f"{self.client.configuration.host}{path}{'?' + encoded if encoded else ''}"
        headers = {"Accept": JSON, "Content-Type": content}
        try:
            with network(path):
                headers |= await self.authorization()
                fence = _may_write.set(self._may_write)
                try:
                    call = await self.client.call_api(
                        _METHODS[verb], url, headers, body, _request_timeout=timeout
                    )
                finally:
                    _may_write.reset(fence)
            async with call.response as response:
                status = response.status
                if status >= 400:
                    with network(path):
                        data = await response.read()
                    raise error_of(status, _status(data), retry_after=_retry_after(response))
                yield response
        finally:
            # After the caller has read the body, so that the seconds include it.
            self.observe(verb, status, time.monotonic() - started)


_METHODS: Final[Mapping[str, str]] = {
    "get": "GET",
    "list": "GET",
    "watch": "GET",
    "create": "POST",
    "update": "PUT",
    "apply": "PATCH",
    "patch": "PATCH",
    "delete": "DELETE",
}


def open_socket(address: AddrInfoType) -> socket.socket:
    """aiohttp's `socket_factory` of connections to the API server: the kernel ends those on which
    the server's host has been silent for SILENT_SECONDS, although it was probed or sent to.

    A load balancer that fails over, or a node whose connection tracking is cleared, forgets open
    connections and tells neither end. A watch, on which nothing is sent, would wait for ever.
    """
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    keep_alive(opened)
    # It counts instead of the number of unanswered probes. Only Linux has it.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = int(SILENT_SECONDS * 1000)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return opened


class FencedConnector(aiohttp.TCPConnector):
    """Gives out no connection to a write that may not be made any more.

    As late as possible: a process may be stopped while it waits for a connection, and resume when
    another one leads.
    """

    async def connect(
        self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout
    ) -> Connection:
        """Raises Fenced."""
        connection = await super().connect(req, traces, timeout)
        if req.method != "GET" and not _may_write.get()():
            connection.release()
            raise Fenced(
                0, f"{req.url.path}: not sent, because this process may not write any more"
            )
        return connection


class ProbingClient(RESTClientObject):
    """The HTTP client of an ApiClient, with `open_socket` and the fence before writes."""

    def _create_connector(self) -> aiohttp.TCPConnector:
        return FencedConnector(limit=self.maxsize, ssl=self.ssl_context, socket_factory=open_socket)


@contextlib.contextmanager
def network(path: str) -> Iterator[None]:
    """Turns network errors and timeouts into Unreachable."""
    try:
        yield
    # Before OSError, of which TimeoutError is a subclass.
    except TimeoutError as err:
        raise Unreachable(0, f"{path}: timeout waiting for the API server") from err
    except (aiohttp.ClientError, OSError) as err:
        raise Unreachable(0, f"{path}: cannot reach the API server: {err}") from err


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[Object]:
    """The events of a watch, one JSON object per line. Raises ApiError for an ERROR event."""
    partial_line = b""
    chunks = response.content.iter_any()
    while True:
        with network(response.url.path):
            chunk = await anext(chunks, b"")
        # The server ends every watch after its timeoutSeconds. A line that the end cuts off is
        # dropped: the next watch starts from the version of the last complete event.
        if not chunk:
            return
        # A chunk may end within a line; keep the rest for the next one.
        *lines, partial_line = (partial_line + chunk).split(b"\n")
        for line in lines:
            event = decode(200, line)
            if event["type"] == "ERROR":
                raise error_of(int(event["object"].get("code") or 500), event["object"])
            yield event


def decode(status: int, data: bytes) -> Object:
    """The JSON object in `data`. Raises Unreachable when it is none."""
    try:
        # A proxy in front of the API server may answer 200 with a page of its own.
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as err:
        raise Unreachable(status, f"the API server's response is not a JSON object: {err}") from err


def _status(data: bytes) -> Any:
    """A `Status` object, or the start of the text that a proxy before the API server sent."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data[:300].decode("utf-8", "replace")


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    """Seconds from the header; the API server never sends a date there."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdigit() else None
