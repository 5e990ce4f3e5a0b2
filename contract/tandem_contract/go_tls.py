"""Names that Go gives to versions and ciphers of TLS, for llm-d's flags, in Python's and OpenSSL's.

    tls_version("VersionTLS12")                              ssl.TLSVersion.TLSv1_2
    openssl_ciphers(["TLS_AES_128_GCM_SHA256", …], AEAD)     "ECDHE-RSA-AES128-GCM-SHA256:…"

Source: Go's package crypto/tls, its version constants as controller-runtime spells them, and
`CipherSuites()`, the ones that Go calls secure.
"""

import ssl
from collections.abc import Iterable, Mapping
from typing import Final

AEAD: Final[Mapping[str, str]] = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
}
"""Go's name → OpenSSL's. RFC 9113, appendix A, forbids the other ciphers of TLS 1.2."""
WITH_CBC: Final[Mapping[str, str]] = {
    **AEAD,
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
}
"""Those that HTTP/1.1 may use as well."""

_VERSIONS: Final[Mapping[str, ssl.TLSVersion]] = {
    "VersionTLS10": ssl.TLSVersion.TLSv1,
    "VersionTLS11": ssl.TLSVersion.TLSv1_1,
    "VersionTLS12": ssl.TLSVersion.TLSv1_2,
    "VersionTLS13": ssl.TLSVersion.TLSv1_3,
}
_CIPHERS_13: Final = frozenset(
    ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
)
"""Of TLS 1.3: accepted and, as in Go, always on."""


def tls_version(name: str) -> ssl.TLSVersion:
    """The version that Go calls `name`. Raises ValueError with the names that there are."""
    if name not in _VERSIONS:
        raise ValueError(f"{name!r} is none of {', '.join(_VERSIONS)}")
    return _VERSIONS[name]


def openssl_ciphers(names: Iterable[str], allowed: Mapping[str, str]) -> str:
    """The ciphers of TLS 1.2 among `names`, for `SSLContext.set_ciphers`; empty: only others.

    Raises ValueError for the first name that is not in `allowed`, with those that are.
    """
    stripped = (name.strip() for name in names)
    listed = [name for name in stripped if name and name not in _CIPHERS_13]
    for name in listed:
        if name not in allowed:
            raise ValueError(f"{name} is not allowed: use {', '.join(allowed)}")
    return ":".join(allowed[name] for name in listed)
