"""What the data path knows of the backends: TLS, API keys, and which of them decode."""

import ssl
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from tandem_contract.commandline import HostPort
from tandem_contract.paths import Role
from tandem_epp.backends.pods import DiscoveredBackend
from tandem_http1.messages import Headers
from tandem_sidecar.security.credentials import EngineTls
from tandem_sidecar.settings import Settings

from .configuration import address_of, authorizations, tls_addresses

_NO_ENGINE: Final = HostPort("", 0)
"""No backend is this process's own engine, as a decode pod's is its sidecar's."""
_ANY_ENGINE: Final = HostPort("", 1)


class KnownBackends:
    """The current backends; `apply` replaces them."""

    def __init__(self, settings: Settings, backends: Sequence[DiscoveredBackend] = ()) -> None:
        # Which backends speak TLS, their URLs tell, also those of later backends.
        self.credentials = EngineTls(replace(settings.tls, prefill=True), _NO_ENGINE)
        self.mutual_tls: Callable[[], ssl.SSLContext | None] = lambda: None
        """Returns the context for sidecars with mutual TLS; None: backends have certificates of
        their own."""
        self.apply(backends)

    def apply(self, backends: Sequence[DiscoveredBackend]) -> None:
        """Use `backends` from now on."""
        self._tls_addresses = tls_addresses(each.backend for each in backends)
        self._authorizations = authorizations(each.backend for each in backends)
        self._decode_engines = tuple(
            address_of(each.backend)
            for each in backends
            if each.backend.role.serves(Role.DECODE) and not each.leaving
        )

    def decode_engines(self) -> tuple[HostPort, ...]:
        """The addresses of the backends that may decode and do not leave."""
        return self._decode_engines

    def authorization(self, address: HostPort) -> Headers:
        """The Authorization header for a backend with an API key; empty: it has none."""
        return self._authorizations.get(address, [])

    def tls_for(self, address: HostPort) -> ssl.SSLContext | None:
        """The context for a connection to a backend; None: plain TCP."""
        if address not in self._tls_addresses:
            return None
        return self.mutual_tls() or self.credentials.for_address(address)

    def tls_for_checks(self) -> ssl.SSLContext | None:
        """The context for health checks of any backend: it trusts the authorities of requests."""
        return self.credentials.for_address(_ANY_ENGINE)
