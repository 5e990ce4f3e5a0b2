"""Certificates read from files and reloaded when the files change.

    EngineTls    the certificates for connections to engines (`--tls-ca`, `--tls-cert`, `--tls-key`)
    listen_tls   the certificate that clients see (`--secure-serving`, `--cert-path`)

An engine's certificate must be valid for the name or address that the sidecar connects to, and that
is usually an IP address: list `IP Address:10.0.0.7` among its subject alternative names. `--tls-ca`
names the authority that signs certificates for the pods' addresses.

Errors: `BadCertificates`: the files cannot be used; the message says which one and why.
"""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from tandem_contract.commandline import HostPort
from tandem_contract.server_tls import BadServerCertificate, ServerTls

log = logging.getLogger(__name__)

RELOAD_SECONDS: Final = 1.0
"""Seconds between two reads of the files, also of the plan keys (`PlanKeys`): far less
than the time for which a rotation keeps both keys valid."""

_ALPN: Final = ["http/1.1"]
_MISMATCH: Final = "KEY_VALUES_MISMATCH"
"""In OpenSSL's message when the key does not belong to the certificate."""

FileContents = tuple[bytes, ...]
"""Contents of the files given, in the order of authorities, certificate, key."""


class Credentials(Protocol):
    """Something that is read from files which may change."""

    def reload(self) -> None:
        """Read the files again; if they cannot be used, keep what was read before."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Where TLS is used for connections to engines, and the files it is configured with."""

    engine: bool = False
    """Whether the decode engine speaks TLS (`--engine https://…`)."""
    prefill: bool = False
    """Whether prefill pods speak TLS."""
    ca: Path | None = None
    """Certificate authorities that engines are verified against; None: the system's."""
    unverified_engine: bool = False
    """Whether any certificate of the decode engine is accepted."""
    unverified_prefill: bool = False
    """Whether any certificate of prefill pods is accepted. A program that takes over a pod's
    address can then read prompts."""
    certificate: Path | None = None
    """The sidecar's client certificate, for engines that require one."""
    key: Path | None = None
    """The client certificate's private key."""


@dataclass(frozen=True, slots=True)
class ListenTls:
    """TLS for clients."""

    directory: Path | None = None
    """Directory of tls.crt and tls.key; None: a self-signed certificate, made at the start."""
    minimum: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    """Oldest version that clients may use."""
    ciphers: str = ""
    """OpenSSL's names for the ciphers of TLS 1.2, with colons between them; empty: its default."""
    is_mutual: bool = False
    """Whether clients need a certificate of the authorities in the directory's ca.crt."""


@dataclass(frozen=True, slots=True)
class _Contexts:
    engine: ssl.SSLContext
    prefill: ssl.SSLContext


class BadCertificates(ValueError):
    """The certificate files cannot be used for TLS."""


def listen_tls(tls: ListenTls | None) -> ServerTls | None:
    """The certificate for clients; None: plain TCP. Raises BadCertificates."""
    try:
        if tls is None:
            return None
        return ServerTls(
            tls.directory,
            _ALPN,
            minimum=tls.minimum,
            ciphers=tls.ciphers,
            is_mutual=tls.is_mutual,
        )
    except BadServerCertificate as err:
        raise BadCertificates(str(err)) from err


class EngineTls:
    """Chooses the TLS context of each connection to an engine; `for_address` is a pool's `tls`."""

    def __init__(self, tls: Tls, engine: HostPort, ranks: int = 1) -> None:
        """Read the files; `ranks` engines have ports from that of `engine` on.

        Raises BadCertificates.
        """
        self._tls = tls
        self._engines = frozenset(engine._replace(port=engine.port + rank) for rank in range(ranks))
        # Replaced as a whole by `reload`. The pool compares contexts by identity to find outdated
        # connections.
        self._contexts: _Contexts | None = None
        self._loaded_files: FileContents = ()
        self._last_warning = ""
        if tls.engine or tls.prefill:
            self._loaded_files = self._read_files()
            self._contexts = self._new_contexts()

    def for_address(self, address: HostPort) -> ssl.SSLContext | None:
        """The context for a new connection to `address`; None: plain TCP."""
        if self._contexts is None:
            return None
        # The sidecar connects to its decode engine and to prefill pods only.
        is_engine = address in self._engines
        if not (self._tls.engine if is_engine else self._tls.prefill):
            return None
        return self._contexts.engine if is_engine else self._contexts.prefill

    def reload(self) -> None:
        """Read the files again and use them for new connections.

        Files that cannot be used change nothing and are warned of once. Connections with a request
        on them stay open; idle ones, made with the previous context, are not used again.
        """
        if self._contexts is None:
            return
        try:
            files = self._read_files()
            if files == self._loaded_files:
                return
            # Set before the context is built: unusable files are tried once, not every second.
            self._loaded_files = files
            self._contexts = self._new_contexts()
        except BadCertificates as err:
            if str(err) != self._last_warning:
                log.warning("certificates not reloaded, the previous ones stay in use: %s", err)
            self._last_warning = str(err)
        else:
            log.info("certificates reloaded")
            self._last_warning = ""

    def _read_files(self) -> FileContents:
        tls = self._tls
        try:
            return tuple(path.read_bytes() for path in (tls.ca, tls.certificate, tls.key) if path)
        except OSError as err:
            raise BadCertificates(f"{err.filename}: cannot read it: {err.strerror}") from err

    def _new_contexts(self) -> "_Contexts":
        tls = self._tls
        try:
            return _Contexts(
                self._load_context(verify=not tls.unverified_engine),
                self._load_context(verify=not tls.unverified_prefill),
            )
        except OSError as err:  # removed since it was read; OpenSSL does not say which file
            raise BadCertificates(f"a certificate file is missing: {err.strerror}") from err

    def _load_context(self, *, verify: bool) -> ssl.SSLContext:
        tls = self._tls
        try:
            context = ssl.create_default_context(cafile=tls.ca)
        except ssl.SSLError as err:
            raise BadCertificates(f"{tls.ca}: contains no certificate in PEM format") from err
        # The sidecar speaks HTTP/1.1: a server that also knows HTTP/2 must not choose that.
        context.set_alpn_protocols(_ALPN)
        if not verify:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if tls.certificate is not None:
            try:
                # An empty password: an encrypted key fails here instead of prompting on a terminal.
                context.load_cert_chain(tls.certificate, tls.key, password="")
            except ssl.SSLError as err:
                reason = "not a certificate and key in PEM format"
                if _MISMATCH in str(err):
                    reason = "the key does not belong to the certificate"
                raise BadCertificates(f"{tls.certificate} with {tls.key}: {reason}") from err
        return context
