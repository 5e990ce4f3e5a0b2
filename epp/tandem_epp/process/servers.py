"""The servers of the process: ext_proc, health, and the pages of the metrics port.

Errors: OSError, naming the flag, when a server cannot listen or a certificate cannot be read.
"""

import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiohttp import web

from tandem_contract.connections import raise_descriptor_limit
from tandem_contract.held_bytes import HeldBytes
from tandem_contract.server_tls import require_clients
from tandem_kube.pages import listening

from ..exchange import BrokenAnswer
from ..server.ext_proc.grpc_server import GrpcServer
from ..server.ext_proc.http2_server import Http2Server
from ..server.ext_proc.interface import ExtProcServer
from ..server.ext_proc.stream import RequestPicker
from ..server.http2.health import HealthService
from ..server.http2.limits import Limits
from ..server.http2.server import Server
from ..server.http2.tls import TlsSettings, load_certificate, tls_context
from ..settings import Settings
from .configuration import FileWatch

if TYPE_CHECKING:
    from tandem_kube.client import Api

_log: Final = logging.getLogger(__name__)
_PROBE_SECONDS: Final = 1.0
"""Seconds that open connections to the health port get at shutdown."""


class Servers:
    """Makes the servers, and keeps their certificates current."""

    def __init__(self, settings: Settings, held: HeldBytes, is_ready: Callable[[], bool]) -> None:
        raise_descriptor_limit()
        self._settings, self._held, self._is_ready = settings, held, is_ready
        self._tls = tls_context(settings.tls) if settings.tls else None
        """None: ext_proc is served in clear text."""
        metrics = settings.metrics_tls
        self._metrics_tls = tls_context(metrics, ["http/1.1"]) if metrics else None

    def ext_proc(
        self, picker: RequestPicker, on_broken: Callable[[BrokenAnswer, float], None]
    ) -> ExtProcServer:
        """The server for Envoy, which the caller starts."""
        settings, held = self._settings, self._held
        common = picker, settings.listen, settings.max_body, on_broken
        seconds = settings.body_timeout
        if settings.ext_proc_server == "grpcio":
            return GrpcServer(*common, held=held, body_seconds=seconds)
        return Http2Server(
            *common,
            held=held,
            body_seconds=seconds,
            is_ready=self._is_ready,
            tls=self._tls,
            allows_clear=settings.tls is not None and settings.tls.allows_clear_text,
        )

    @asynccontextmanager
    async def health(self) -> AsyncIterator[None]:
        """Answer probes, by gRPC and by HTTP."""
        address = self._settings.health
        server = Server({}, HealthService(self._is_ready, frozenset()), Limits())
        try:
            await server.listen(address.host, address.port)
        except OSError as err:
            raise OSError(f"cannot listen on {address}: is the port in use? See --health") from err
        try:
            yield
        finally:
            await server.stop(_PROBE_SECONDS)

    @asynccontextmanager
    async def metrics(self, app: web.Application, api: "Api | None") -> AsyncIterator[None]:
        """Serve `app` on the metrics port; with `api`, only to whom the cluster allows it."""
        if api is not None:
            from tandem_kube.authorization import authorize  # noqa: PLC0415 - see `discovery`

            app.middlewares.append(authorize(api))
        async with listening(app, self._settings.metrics, "--metrics", self._metrics_tls):
            yield

    def watches(self) -> list[FileWatch]:
        """A watch for each directory of certificates."""
        return [
            *_watch(self._settings.tls, self._tls),
            *_watch(self._settings.metrics_tls, self._metrics_tls),
        ]


def _watch(settings: TlsSettings | None, context: ssl.SSLContext | None) -> list[FileWatch]:
    if settings is None or settings.directory is None or context is None:
        return []
    directory = settings.directory
    return [FileWatch(directory, lambda: _reload(context, directory, settings.is_mutual))]


def _reload(context: ssl.SSLContext, directory: Path, is_mutual: bool) -> None:
    try:
        load_certificate(context, directory)
        if is_mutual:
            # Added to those that it has: the old authority stays trusted until a restart.
            require_clients(context, directory)
    except OSError as err:
        _log.error("%s: not reloaded, the last certificate stays: %s", directory, err)
