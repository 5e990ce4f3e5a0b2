"""GET of a pod's HTTP endpoints: directly, or through the API server's pod proxy.

Errors: `NoAnswer`.
"""

import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import aiohttp

from tandem_kube.errors import ApiError, NotFound

if TYPE_CHECKING:
    from tandem_kube.client import Api

TIMEOUT: Final = aiohttp.ClientTimeout(total=5)

Get = Callable[[str], Awaitable[bytes]]
"""Path → body of a 200 answer. Raises NoAnswer."""


class NoAnswer(Exception):
    """The pod cannot be reached, or it does not answer with 200."""

    def __init__(self, path: str, reason: str, *, is_not_found: bool = False) -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason
        self.is_not_found = is_not_found
        """The pod answered with 404."""


def direct(http: aiohttp.ClientSession, base: str) -> Get:
    """GET of `base` and a path, for pods whose addresses can be reached from here."""

    async def get(path: str) -> bytes:
        try:
            async with http.get(base + path) as answer:
                body = await answer.read()
        except TimeoutError:
            raise NoAnswer(path, f"no answer within {TIMEOUT.total:.0f} s") from None
        except aiohttp.ClientConnectorError as err:
            # Its own text holds aiohttp's notation of the address and of the TLS setting.
            raise NoAnswer(path, f"cannot connect to {err.host}:{err.port}: {_why(err)}") from err
        except aiohttp.ClientError as err:
            raise NoAnswer(path, str(err)) from err
        if answer.status != 200:
            # The body may be a whole page, and need not be text.
            text = body[:200].decode(errors="replace").strip()
            raise NoAnswer(
                path,
                f"status {answer.status}: {text}",
                is_not_found=answer.status == 404,
            )
        return body

    return get


def _why(err: aiohttp.ClientConnectorError) -> str:
    """The system's words for the error, such as `Connection refused`; a name that does not resolve
    has none."""
    return os.strerror(err.errno) if err.errno and err.errno > 0 else str(err.os_error)


def proxied(api: "Api", namespace: str, pod: str, port: int) -> Get:
    """GET of a path at `pod:port` through the API server; takes the right to get pods/proxy."""

    async def get(path: str) -> bytes:
        try:
            return await api.proxied(pod, namespace, port, path)
        except ApiError as err:
            # The API server passes the pod's status on, so a 404 may be the pod's own.
            is_not_found = isinstance(err, NotFound)
            raise NoAnswer(path, err.message, is_not_found=is_not_found) from err

    return get
