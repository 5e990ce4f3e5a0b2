"""What all requests of a client have in common.

Errors: `SettingsError`: a setting cannot be used; the message says which and why.
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


class SettingsError(ValueError):
    """A setting of the client that cannot be used; correct it and start again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Where requests go, and what is added to each."""

    url: str
    """`http` or `https`; with or without `/v1`."""
    model: str
    """Model name to send; `Call.model` takes precedence."""
    timeout: float = 300.0
    """Seconds for a whole answer, from the time its request was sent; before that, for the
    connection. Too short a time counts slow answers as lost."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with every request, `authorization` among them. Never in logs or errors."""
    ca_file: str | None = None
    """PEM file of the certificate authorities to trust; None: the system's."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Members of every request body, sampling parameters among them; they replace the client's own.
    `sampling_params` of the generate API is merged, not replaced."""
    return_token_ids: bool = True
    """Ask for the answer's token ids (vLLM's field). Other servers may refuse the field."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the server is."""

    host: str
    port: int
    is_tls: bool
    authority: str
    """Value of the `host` header."""
    path: str
    """Path before those of the APIs; empty, or with a slash at its start alone."""


def parse_url(url: str) -> Origin:
    """The server at `url`, which may end with `/v1`. Raises SettingsError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")
    # UnicodeError, which idna raises, is a ValueError as well.
    except ValueError as err:
        raise SettingsError(f"the URL {url!r} is not valid: {err}") from err
    if parts.scheme not in ("http", "https") or not host:
        raise SettingsError(f"the URL {url!r} does not begin with http://HOST or https://HOST")
    if parts.username is not None:
        raise SettingsError("the URL has a user name: send credentials in a header instead")
    if parts.query or parts.fragment:
        raise SettingsError(f"the URL {url!r} has more than a host and a path")
    is_tls = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    if not (parts.netloc + path).isascii() or " " in path:
        raise SettingsError(f"the URL {url!r} has characters that must be encoded")
    return Origin(host, port or (443 if is_tls else 80), is_tls, parts.netloc, path)


def tls_context(ca_file: str | None) -> ssl.SSLContext:
    """How to verify the server's certificate and name. Raises SettingsError."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as err:
        raise SettingsError(f"the CA file {ca_file!r} cannot be read: {err}") from err
    context.set_alpn_protocols(["http/1.1"])
    return context
