"""How the EPP calls engines to read their metrics, and sidecars for warm-ups: scheme and TLS.

Errors: ValueError, which names the file that cannot be used.
"""

import ssl
from dataclasses import dataclass, replace
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec

from tandem_contract import endpoints
from tandem_contract.commandline import HostPort
from tandem_contract.config import Backend
from tandem_contract.paths import Role

from .pods import DiscoveredBackend

_HTTP: Final = "http://"


@dataclass(frozen=True)
class ScrapeSettings:
    """Where a backend's metrics are, and which certificates it accepts there."""

    scheme: Literal["http", "https"] = "http"
    """Of pods that are found in a cluster; a backend of the configuration has one in its URL."""
    path: str = endpoints.METRICS
    port: int | None = None
    """Where it is not the port of requests."""
    tls: ssl.SSLContext | None = None
    """For backends with https; None: certificates of the system's authorities are accepted."""
    sidecars_tls: ssl.SSLContext | None = None
    """For sidecars instead of `tls`, where `--mutual-tls` is given."""

    def metrics_url(self, backend_url: str) -> str:
        """The page of the backend with this URL."""
        if self.port is None:
            return backend_url.rstrip("/") + self.path
        parts = urlsplit(backend_url)
        # A URL with https says nothing about another port if its sidecar has mutual TLS.
        is_stated = self.scheme == "https" or self.sidecars_tls is not None
        scheme = self.scheme if is_stated else parts.scheme
        return f"{scheme}://{HostPort(parts.hostname or '', self.port)}{self.path}"

    def tls_for(self, backend: Backend, url: str) -> ssl.SSLContext | None:
        """TLS for a GET of `url`, a page of `backend`."""
        has_sidecar = self.sidecars_tls is not None and backend.role is not Role.PREFILL
        # Another port than that of requests is not the sidecar's.
        is_sidecars = has_sidecar and url.startswith(f"{backend.url.rstrip('/')}/")
        return self.sidecars_tls if is_sidecars else self.tls

    def with_scheme(
        self, discovered: DiscoveredBackend, *, to_sidecars: bool = False
    ) -> DiscoveredBackend:
        """`discovered`, a pod of a cluster, with its URL as requests must use it; `to_sidecars`:
        pods with a sidecar are called by https, the engines of prefill pods are not."""
        backend = discovered.backend
        is_sidecars = to_sidecars and backend.role is not Role.PREFILL
        # A port of its own for metrics says nothing about the port of requests.
        if not is_sidecars and (self.scheme == "http" or self.port is not None):
            return discovered
        url = f"https://{backend.url.removeprefix(_HTTP)}"
        # By TLS the EPP speaks HTTP/1.1, whatever the pool says of clear text.
        return replace(discovered, backend=msgspec.structs.replace(backend, url=url, http2=False))


def client_tls(*, verifies: bool, authorities: str, certificate: str, key: str) -> ssl.SSLContext:
    """TLS for calls to backends. `authorities`, `certificate` and `key` are PEM files; empty: the
    system's authorities, and no certificate of the EPP's own. Raises ValueError."""
    try:
        context = ssl.create_default_context(cafile=authorities or None)
    except OSError as err:
        raise ValueError(f"caCertPath: {authorities}: {_reason(err)}") from err
    if not verifies:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if bool(certificate) != bool(key):
        raise ValueError("clientCertPath and clientKeyPath need each other")
    if certificate:
        try:
            context.load_cert_chain(certificate, key)
        except OSError as err:
            raise ValueError(f"clientCertPath: {certificate}, {key}: {_reason(err)}") from err
    return context


def _reason(err: OSError) -> str:
    # OpenSSL's errors have no strerror that helps.
    return "no certificate or key in PEM" if isinstance(err, ssl.SSLError) else str(err.strerror)
