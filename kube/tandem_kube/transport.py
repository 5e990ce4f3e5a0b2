"""One HTTP exchange with the API server: authenticated, timed, its errors drawn from `errors`."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
import msgspec
from kubernetes.aio.client.api_client import ApiClient

from .errors import Unreachable, error_of
from .resources import Object

JSON: Final = "application/json"

Observer = Callable[[str, int, float], None]
"""Told of every call that ended: verb (get, list, create, …), HTTP status (0: none), seconds."""


class Transport:
    """What the ApiClient knows of the server, used without its typed models."""

    def __init__(self, client: ApiClient, observer: Observer | None = None) -> None:
        self.client = client
        self._observer = observer

    @contextlib.asynccontextmanager
    async def answer(
        self,
        verb: str,
        path: str,
        *,
        body: Object | None = None,
        query: Mapping[str, str],
        content: str = JSON,
        timeout: aiohttp.ClientTimeout,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        started, status = time.monotonic(), 0
        given = urlencode({key: value for key, value in query.items() if value})
        url = f"{self.client.configuration.host}{path}{'?' + given if given else ''}"
        headers = {"Accept": JSON, "Content-Type": content}
        try:
            with network(path):
                await self.client.update_params_for_auth(
                    headers, [], ["BearerToken"], path, _METHODS[verb], body
                )
                made = await self.client.call_api(
                    _METHODS[verb], url, headers, body, _request_timeout=timeout
                )
            async with made.response as response:
                status = response.status
                if status >= 400:
                    with network(path):
                        data = await response.read()
                    raise error_of(status, _status(data), retry_after=_retry_after(response))
                yield response
        finally:
            if self._observer is not None:
                self._observer(verb, status, time.monotonic() - started)


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


@contextlib.contextmanager
def network(path: str) -> Iterator[None]:
    """What the network raises, as Unreachable."""
    try:
        yield
    except TimeoutError as err:
        raise Unreachable(0, f"{path}: no answer in time from the API server") from err
    except (aiohttp.ClientError, OSError) as err:
        raise Unreachable(0, f"{path}: cannot reach the API server: {err}") from err


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[Object]:
    rest = b""
    chunks = response.content.iter_any()
    while True:
        with network(response.url.path):
            chunk = await anext(chunks, b"")
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            event = decode(200, line)
            if event["type"] == "ERROR":
                raise error_of(int(event["object"].get("code") or 500), event["object"])
            yield event


def decode(status: int, data: bytes) -> Object:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as err:
        raise Unreachable(status, f"the API server's answer is no JSON object: {err}") from err


def _status(data: bytes) -> Any:
    """A `Status` object, or the text of whatever stood between us and the API server."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data[:300].decode("utf-8", "replace")


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    """Seconds; the API server writes no dates there."""
    said = response.headers.get("Retry-After", "")
    return float(said) if said.isdigit() else None
