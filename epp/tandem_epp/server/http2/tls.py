"""TLS of the servers: which certificate and which versions and ciphers of TLS they accept."""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tandem_contract.server_tls import CERTIFICATE, KEY, load_pem, require_clients, self_signed_pem

_HTTP2: Final = ("h2", "http/1.1")
"""HTTP/1.1 is for probes."""


@dataclass(frozen=True, kw_only=True)
class TlsSettings:
    """How a server serves TLS."""

    directory: Path | None = None
    """Directory of tls.crt and tls.key, as Kubernetes mounts a TLS secret; None: a certificate that
    the process makes at its start, which encrypts and cannot be verified."""
    minimum: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    """HTTP/2 needs 1.2 (RFC 9113, 9.2)."""
    ciphers: str = ""
    """OpenSSL's names for the ciphers of TLS 1.2, with colons between them; empty: its default."""
    is_mutual: bool = False
    """Whether clients need a certificate of the authorities in the directory's ca.crt."""
    allows_clear_text: bool = False
    """Whether clients may also connect without TLS, for ext_proc only."""
    client_ca: Path | None = None
    """PEM file of the authorities of client certificates, which are then required; None: clients
    need none."""


def tls_context(settings: TlsSettings, protocols: Sequence[str] = _HTTP2) -> ssl.SSLContext:
    """The context for new connections. `protocols` are offered by ALPN, the preferred first.

    Raises OSError, which ssl.SSLError is.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = settings.minimum
    # Python's default context rules out compression already.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(list(protocols))
    if settings.ciphers:
        context.set_ciphers(settings.ciphers)
    if settings.client_ca is not None:
        context.load_verify_locations(settings.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    if settings.is_mutual and settings.directory is not None:
        require_clients(context, settings.directory)
    if settings.directory is None:
        load_pem(context, self_signed_pem())
    else:
        load_certificate(context, settings.directory)
    return context


def load_certificate(context: ssl.SSLContext, directory: Path) -> None:
    """Use the files' current content for new connections. Raises OSError; the context then keeps
    what it had."""
    # Tried on another context first: a key that does not fit would leave half of the pair.
    for target in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
        target.load_cert_chain(directory / CERTIFICATE, directory / KEY)
