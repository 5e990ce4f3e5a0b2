"""A client for backends that speak HTTP/2 without TLS (h2c) and no HTTP/1.1.

An InferencePool says so of its pods (`appProtocol: kubernetes.io/h2c`). Connections begin with
HTTP/2 (prior knowledge, RFC 9113, section 3.3); requests to one address share a connection.

Errors: OSError, of which TimeoutError is one.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import httpx2

from tandem_contract.config import Backend

_MAX_BODY: Final = 16 << 20
"""Bytes of an answer, several hundred times a metrics page: a backend cannot fill the memory."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, read to its end."""

    status: int
    headers: Mapping[str, str]
    """Names are found in any case."""
    body: bytes


class Http2Client:
    """Makes requests; on one event loop."""

    def __init__(self) -> None:
        self._client: httpx2.AsyncClient | None = None

    async def get(self, url: str, seconds: float) -> bytes:
        """The body of a 2xx answer within `seconds`. Raises OSError."""
        answer = await self.request("GET", url, seconds)
        if not 200 <= answer.status < 300:
            raise ConnectionError(f"it answers {answer.status}")
        return answer.body

    async def request(
        self,
        method: str,
        url: str,
        seconds: float,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> Answer:
        """The answer within `seconds`. Raises OSError."""
        client = self._client = self._client or _client()
        request = client.build_request(
            method, url, headers=headers, content=body or None, timeout=seconds
        )
        try:
            # The library's timeout is for each read: it also gives up a connection that hangs.
            async with asyncio.timeout(seconds):
                response = await client.send(request, stream=True)
                try:
                    return Answer(response.status_code, response.headers, await _read(response))
                finally:
                    await response.aclose()
        except httpx2.TimeoutException as err:
            raise TimeoutError from err
        except httpx2.HTTPError as err:
            raise ConnectionError(f"{type(err).__name__}: {err}") from err

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            await self._client.aclose()


def speaks_http2(backend: Backend, url: str) -> bool:
    """Whether `url`, a page of `backend`, is read by HTTP/2: not at a port that is for metrics
    only, of which the pool says nothing."""
    return backend.http2 and url.startswith(f"{backend.url.rstrip('/')}/")


def _client() -> "httpx2.AsyncClient":
    # Made when it is needed: the library then loads 3 MB. No limit of connections and no variable
    # such as HTTP_PROXY, as for HTTP/1.1. Not compressed: the limit of a body counts what arrives.
    return httpx2.AsyncClient(
        http1=False,
        http2=True,
        verify=False,
        trust_env=False,
        headers={"accept-encoding": "identity"},
        limits=httpx2.Limits(),
    )


async def _read(response: "httpx2.Response") -> bytes:
    parts, size = [], 0
    async for part in response.aiter_raw():
        size += len(part)
        if size > _MAX_BODY:
            raise ConnectionError(f"its answer has more than {_MAX_BODY} bytes")
        parts.append(part)
    return b"".join(parts)
