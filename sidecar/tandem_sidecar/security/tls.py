"""The certificates engines are spoken to with, followed live as their files change.

An engine's certificate must carry the name it is asked by, and engines are mostly asked by IP
address: `IP Address:10.0.0.7` among its subject alternative names. An authority that signs for the
pods' addresses is given by `--tls-ca`.

Errors: `BadCertificates`: the files cannot be used; the message says which and why.
"""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tandem_contract.commandline import HostPort

log = logging.getLogger(__name__)

_ALPN: Final = ["http/1.1"]
_MISMATCH: Final = "KEY_VALUES_MISMATCH"

Files = tuple[bytes, ...]
"""What the files held, in the order of authorities, certificate, key."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates for the connections to engines; files are followed live."""

    engine: bool = False
    """The decode engine speaks TLS (`--engine https://…`)."""
    prefill: bool = False
    """So do the prefill pods."""
    ca: Path | None = None
    """Whom to trust; None: the system's authorities."""
    certificate: Path | None = None
    """Ours, for engines that ask for one."""
    key: Path | None = None


class BadCertificates(ValueError):
    """Files that no TLS can be spoken with."""


class EngineTls:
    """Which engines are spoken to over TLS, and with what; `for_address` is a pool's `tls`."""

    def __init__(self, tls: Tls, engine: HostPort) -> None:
        """Read the files. Raises BadCertificates."""
        self._tls = tls
        self._engine = engine
        self._context: ssl.SSLContext | None = None
        self._read: Files = ()
        self._complaint = ""
        if tls.engine or tls.prefill:
            self._read = self._files()
            self._context = self._made()

    def for_address(self, address: HostPort) -> ssl.SSLContext | None:
        """What a new connection to `address` is made with; None: no TLS."""
        wanted = self._tls.engine if address == self._engine else self._tls.prefill
        return self._context if wanted else None

    def reload(self) -> None:
        """Take the files as they are now, for connections from here on.

        Unusable ones change nothing. Connections in use go on as they are, idle ones do not.
        """
        if self._context is None:
            return
        try:
            files = self._files()
            if files == self._read:
                return
            self._read = files
            self._context = self._made()
        except BadCertificates as err:
            if str(err) != self._complaint:
                log.warning("certificates not reloaded, the old ones stay: %s", err)
            self._complaint = str(err)
        else:
            log.info("certificates reloaded")
            self._complaint = ""

    def _files(self) -> Files:
        tls = self._tls
        try:
            return tuple(path.read_bytes() for path in (tls.ca, tls.certificate, tls.key) if path)
        except OSError as err:
            raise BadCertificates(f"{err.filename}: cannot read it: {err.strerror}") from err

    def _made(self) -> ssl.SSLContext:
        """A context of what the files hold."""
        try:
            return self._loaded()
        except OSError as err:  # there a moment ago; OpenSSL does not say which
            raise BadCertificates(f"a certificate's file is gone: {err.strerror}") from err

    def _loaded(self) -> ssl.SSLContext:
        tls = self._tls
        try:
            context = ssl.create_default_context(cafile=tls.ca)
        except ssl.SSLError as err:
            raise BadCertificates(f"{tls.ca}: no certificate in PEM form is there") from err
        context.set_alpn_protocols(_ALPN)
        if tls.certificate is not None:
            try:
                context.load_cert_chain(tls.certificate, tls.key, password="")
            except ssl.SSLError as err:
                why = "no certificate and key in PEM form"
                if _MISMATCH in str(err):
                    why = "the key is not the certificate's"
                raise BadCertificates(f"{tls.certificate} with {tls.key}: {why}") from err
        return context
