"""Checks that a server can be measured, before any load: `/health` and `/v1/models`.

Errors: `errors.NotReadyError`, whose message has the URL and says what to do.
"""

import asyncio
import os
import ssl
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Final

import aiohttp
import msgspec

from ..client.settings import tls_context
from .errors import NotReadyError
from .spec import Target

TIMEOUT: Final = 10.0
"""Seconds for each answer: a server that is this slow when idle cannot be measured."""
PAUSE: Final = 0.25
"""Seconds between two tries."""
MOST_LISTED: Final = 10
"""Models that an error lists."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: tuple[_Model, ...]


class _MayBecomeReady(Exception):
    """A failure that a server has while it starts."""


_models: Final = msgspec.json.Decoder(_Models)


async def check_ready(
    target: Target,
    models: Iterable[str],
    *,
    wait: float = 0.0,
    stop: asyncio.Event,
) -> tuple[str, ...]:
    """Raises NotReadyError unless the server is up, lets us in, and serves all of `models`;
    SettingsError for a file of certificate authorities that cannot be read.

    `wait`: seconds for which a server that is not up, or does not serve a model yet, may become
    ready; until `stop` is set. Returns the names of the models that it serves; empty when it has no
    list of them.
    """
    base = target.url.rstrip("/").removesuffix("/v1")
    deadline = monotonic() + wait
    tls = tls_context(target.ca_file) if base.startswith("https:") else True
    async with aiohttp.ClientSession(
        headers=target.headers, timeout=aiohttp.ClientTimeout(total=TIMEOUT)
    ) as session:
        while True:
            try:
                await _check_health(session, base, tls)
                served = await _served(session, base, tls)
                _check_models(base, served, [*models])
            except _MayBecomeReady as err:
                if stop.is_set() or monotonic() >= deadline:
                    raise NotReadyError(str(err)) from err
                # No event tells that a server is up: it is asked again.
                await asyncio.sleep(PAUSE)
            else:
                return served


async def _check_health(
    session: aiohttp.ClientSession, base: str, tls: ssl.SSLContext | bool
) -> None:
    url = base + "/health"
    status, _ = await _get(session, url, tls)
    # Servers without this endpoint answer with 404 or any other 4xx.
    if status >= 500:
        raise _MayBecomeReady(f"{url}: the server is not ready (HTTP {status})")


async def _served(
    session: aiohttp.ClientSession, base: str, tls: ssl.SSLContext | bool
) -> tuple[str, ...]:
    status, body = await _get(session, base + "/v1/models", tls)
    if status != 200:
        return ()
    try:
        return tuple(model.id for model in _models.decode(body).data)
    except msgspec.MsgspecError:
        # Another API's list; a wrong model fails in the warm-up.
        return ()


def _check_models(base: str, served: Sequence[str], models: Sequence[str]) -> None:
    missing = [model for model in models if model not in served]
    if served and missing:
        shown = ", ".join(served[:MOST_LISTED]) + (", …" if len(served) > MOST_LISTED else "")
        raise _MayBecomeReady(
            f"{base}/v1/models: the server has no model {missing[0]!r}; it serves {shown}"
        )


async def _get(
    session: aiohttp.ClientSession, url: str, tls: ssl.SSLContext | bool
) -> tuple[int, bytes]:
    try:
        async with session.get(url, ssl=tls, allow_redirects=False) as response:
            status, body = response.status, await response.read()
    except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError) as err:
        reason = str(err.os_error) if isinstance(err, aiohttp.ClientConnectorError) else str(err)
        raise NotReadyError(
            f"{url}: TLS failed: {reason}; give the server's certificate authority (--ca-file)"
        ) from err
    except TimeoutError as err:
        raise _MayBecomeReady(f"{url}: no answer within {TIMEOUT:g} s") from err
    except (aiohttp.ClientError, OSError) as err:
        raise _MayBecomeReady(f"{url}: cannot connect: {_reason(err)}") from err
    if status in (401, 403):
        raise NotReadyError(
            f"{url}: the server refuses the credentials (HTTP {status}): "
            "give a valid key (--api-key, or --header for another scheme)"
        )
    return status, body


def _reason(err: BaseException) -> str:
    cause = err.os_error if isinstance(err, aiohttp.ClientConnectorError) else err
    # A failed name lookup has a negative number, which is no system error.
    if isinstance(cause, OSError):
        number = cause.errno or 0
        return os.strerror(number) if number > 0 else cause.strerror or str(cause)
    return str(cause) or repr(cause)
