"""TLS of a server: a certificate from a directory, reloaded when it changes, or a self-signed one.

    tls = ServerTls(directory, ["http/1.1"])    # Raises BadServerCertificate
    tls.context                                 # for each new connection
    tls.reload()                                # every second or so

The directory is a mounted Secret of type kubernetes.io/tls. Without one the certificate is made at
the start: it encrypts, and no client can verify it. Its key is never written to a disk.
"""

import datetime
import logging
import os
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

CERTIFICATE: Final = "tls.crt"
"""PEM, the server's certificate first and then the chain."""
KEY: Final = "tls.key"
"""PEM, without a passphrase."""
AUTHORITIES: Final = "ca.crt"
"""PEM; of clients, for mutual TLS."""

_VALID_FOR: Final = datetime.timedelta(days=3650)
"""As long as llm-d's self-signed certificates: they are replaced with every start, not by age."""
_CLOCK_SKEW: Final = datetime.timedelta(minutes=5)
"""A client whose clock is late must accept the certificate, too."""


class BadServerCertificate(ValueError):
    """The message names the directory and says why its files cannot be used."""


class ServerTls:
    """The TLS context for new connections to a server."""

    def __init__(
        self,
        directory: Path | None,
        protocols: Sequence[str],
        *,
        minimum: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2,
        ciphers: str = "",
        is_mutual: bool = False,
    ) -> None:
        """`protocols`: names for ALPN, preferred first. `ciphers`: allowed ciphers of TLS 1.2, by
        OpenSSL's names, with colons between them; empty: its default. `is_mutual`: clients need a
        certificate of the directory's authorities. Raises BadServerCertificate."""
        self._directory = directory
        self._protocols = list(protocols)
        self._minimum, self._ciphers, self._is_mutual = minimum, ciphers, is_mutual
        self._loaded = self._read()
        self._last_warning = ""
        self.context: ssl.SSLContext = self._build(self._loaded)
        """Replaced as a whole by `reload`, since a key of another type would not replace the old
        one in the same context. Running connections keep theirs."""

    def reload(self) -> None:
        """Read the directory again; files that cannot be used are warned of once."""
        if self._directory is None:
            return
        try:
            files = self._read()
            if files == self._loaded:
                return
            # Set before the context is built: unusable files are tried once, not every second.
            self._loaded = files
            self.context = self._build(files)
        except BadServerCertificate as err:
            if str(err) != self._last_warning:
                log.warning("certificate not reloaded, the previous one stays in use: %s", err)
            self._last_warning = str(err)
        else:
            log.info("certificate reloaded from %s", self._directory)
            self._last_warning = ""

    def _read(self) -> bytes:
        if self._directory is None:
            return self_signed_pem()
        try:
            names = (CERTIFICATE, KEY, *([AUTHORITIES] if self._is_mutual else []))
            return b"\n".join((self._directory / name).read_bytes() for name in names)
        except OSError as err:
            raise BadServerCertificate(f"{err.filename}: cannot read it: {err.strerror}") from err

    def _build(self, pem: bytes) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = self._minimum
        if self._ciphers:
            context.set_ciphers(self._ciphers)
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(self._protocols)
        try:
            if self._is_mutual and self._directory is not None:
                require_clients(context, self._directory)
            load_pem(context, pem)
        except ssl.SSLError as err:
            raise BadServerCertificate(
                f"{self._directory}: {CERTIFICATE} and {KEY} are not a certificate in PEM format"
                " and its key without a passphrase"
                + (f", or {AUTHORITIES} has no certificate" if self._is_mutual else "")
            ) from err
        return context


def require_clients(context: ssl.SSLContext, directory: Path) -> None:
    """Accept clients with a certificate of the authorities in `directory` only. Raises OSError,
    which ssl.SSLError is."""
    context.load_verify_locations(directory / AUTHORITIES)
    context.verify_mode = ssl.CERT_REQUIRED


def mutual_client(directory: Path) -> ssl.SSLContext:
    """For clients of servers with `is_mutual`: any certificate of the same authorities is accepted,
    since pods are called by their addresses. Raises OSError, which ssl.SSLError is."""
    context = ssl.create_default_context(cafile=str(directory / AUTHORITIES))
    context.check_hostname = False
    context.load_cert_chain(directory / CERTIFICATE, directory / KEY, password="")
    return context


def self_signed_pem(name: str = "tandem") -> bytes:
    """A new certificate for `name` and its key, in PEM format."""
    # 10 MB of memory: imported only where a server serves TLS without a certificate of its own.
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _VALID_FOR)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def load_pem(context: ssl.SSLContext, pem: bytes) -> None:
    """Use certificates and key in `pem` for `context`. Raises ssl.SSLError."""
    # OpenSSL reads files only. A file in memory needs no writable directory and leaves no trace.
    descriptor = os.memfd_create("tls", os.MFD_CLOEXEC)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(pem)
        # An empty password: an encrypted key fails here instead of prompting on a terminal.
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password="")
    finally:
        os.close(descriptor)
