"""TLS of the server: a certificate and its key in a directory, as Kubernetes mounts them."""

import ssl
from pathlib import Path
from typing import Final

CERTIFICATE: Final = "tls.crt"
"""PEM, the server's certificate first and then the chain."""
KEY: Final = "tls.key"


def tls_context(directory: Path) -> ssl.SSLContext:
    """TLS with ALPN `h2`; HTTP/1.1 is offered for probes. Raises OSError, which ssl.SSLError is."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # RFC 9113, 9.2: nothing below 1.2, and no renegotiation and compression, which Python's default
    # context rules out already.
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["h2", "http/1.1"])
    load_certificate(context, directory)
    return context


def load_certificate(context: ssl.SSLContext, directory: Path) -> None:
    """Use the files' current content for new connections. Raises OSError; the context then keeps
    what it had."""
    # Tried on another context first: a key that does not fit would leave half of the pair.
    for target in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
        target.load_cert_chain(directory / CERTIFICATE, directory / KEY)
