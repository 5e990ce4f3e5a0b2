"""The backends of a `tandem-router` to check, as its admin port lists them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from tandem_contract import endpoints
from tandem_contract.commandline import HostPort
from tandem_contract.paths import Role

from .gather import TargetPod, Targets
from .pod_http import TIMEOUT, Get, NoAnswer, direct

ROUTER: Final = "router"
"""What findings call the router."""
_PORTS: Final = {"http": 80, "https": 443}


class _Backend(msgspec.Struct):
    name: str
    role: Role
    url: str
    models: list[str]


class _State(msgspec.Struct):
    backends: list[_Backend]


@asynccontextmanager
async def targets_of(url: str) -> AsyncIterator[tuple[Targets, Get]]:
    """The backends, and how the router's admin port at `url` is read. Raises NoAnswer."""
    async with aiohttp.ClientSession(timeout=TIMEOUT) as http:
        admin = direct(http, url.rstrip("/"))
        answer = await admin(endpoints.STATE)
        try:
            backends = msgspec.json.decode(answer, type=_State).backends
        except msgspec.MsgspecError as err:
            reason = f"this is not the admin port of a tandem-router: {err}"
            raise NoAnswer(endpoints.STATE, reason) from err
        yield Targets([_target_pod(http, b) for b in backends], [(ROUTER, admin)]), admin


def _target_pod(http: aiohttp.ClientSession, backend: _Backend) -> TargetPod:
    parts = urlsplit(backend.url)
    port = parts.port or _PORTS.get(parts.scheme, 0)
    return TargetPod(
        pod=backend.name,
        role=backend.role,
        # Backends that serve different models hand nothing to each other.
        group=", ".join(sorted(backend.models)),
        address=HostPort(parts.hostname or "", port),
        get_engine=direct(http, backend.url.rstrip("/")),
        get_sidecar=None,
        # How a plain URL was started is not known.
        command=None,
    )
