"""The address of a store and how to access it: settings, checked. Pure.

    {endpoint}/{kv_namespace}/{prefix_hash}

The settings select the protocol: `file://` is a directory; an HTTP URL with credentials is S3, and
one without is a plain HTTP store. `protocol` overrides this, for instance for an S3 store whose
credentials come from the environment. For S3 the first segment of the namespace is the bucket.

Errors: `LocationError`.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from .errors import LocationError

DEFAULT_NAMESPACE: Final = "inference/kv-cache"
DEFAULT_REGION: Final = "us-east-1"
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")


class Protocol(StrEnum):
    """The protocol of a store."""

    S3 = "s3"
    HTTP = "http"
    FILE = "file"


class Secret(str):
    """A string that no log shows: its `repr` and its formatting are redacted."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Secret(redacted)"

    def __str__(self) -> str:
        return "redacted"

    def __format__(self, spec: str) -> str:
        return "redacted"

    def reveal(self) -> str:
        """The plain text, to hand to a client library."""
        return str.__str__(self)


_NO_SECRET: Final = Secret("")


@dataclass(frozen=True, slots=True)
class StoreCredentials:
    """Access to an S3 store: keys in the settings, in files, or found as AWS's tools do."""

    access_key: Secret = _NO_SECRET
    secret_key: Secret = _NO_SECRET
    directory: Path | None = None
    """A mounted Secret with the files access_key, secret_key and optionally session_token, read
    again when they change. None: the keys above; where these are empty, AWS's default chain."""


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """A namespace in a store."""

    endpoint: str
    namespace: str = DEFAULT_NAMESPACE
    protocol: Protocol = Protocol.HTTP
    credentials: StoreCredentials | None = None
    """None for S3: AWS's default chain, see `stores.s3_keys`."""
    region: str = DEFAULT_REGION
    virtual_host_style: bool = False
    """Whether the bucket is a part of the host name, and not of the path."""
    ca_file: Path | None = None
    """PEM file with the authority of the store's certificate, trusted besides the system's."""
    timeout: float = 30.0
    """Seconds for one operation. Too low: large objects on a slow network fail. Too high: data wait
    longer in memory while the store stalls. Loads have their own, shorter deadline."""
    connect_timeout: float = 2.0
    """Seconds to connect. Too high: the client finds out later that the store is down."""

    @property
    def bucket(self) -> str:
        """The first segment of the namespace."""
        return self.namespace.split("/", 1)[0]

    @property
    def host_url(self) -> str:
        """The URL that requests go to; with virtual_host_style the bucket is in its host name."""
        scheme, _, host = self.endpoint.partition("://")
        return f"{scheme}://{self.bucket}.{host}" if self.virtual_host_style else self.endpoint

    @property
    def prefix(self) -> str:
        """The namespace without the bucket; may be empty."""
        return self.namespace.partition("/")[2]

    @property
    def directory(self) -> Path:
        """Directory of a file store's namespace."""
        # The endpoint has no slash at its end: of file:/// its path is empty.
        return Path("/", unquote(urlsplit(self.endpoint).path), self.namespace)

    def path_of(self, name: str) -> str:
        """`{kv_namespace}/{name}`, the path of a KvReference."""
        return f"{self.namespace}/{name}"


def store_location(
    endpoint: str,
    namespace: str = DEFAULT_NAMESPACE,
    *,
    protocol: str | None = None,
    credentials: StoreCredentials | None = None,
    region: str = DEFAULT_REGION,
    virtual_host_style: bool = False,
    ca_file: Path | None = None,
    timeout: float = 30.0,
) -> StoreLocation:
    """Check the settings. Raises LocationError, whose message shows no credential."""
    try:
        parts = urlsplit(endpoint)
        port_is_valid = parts.port != 0
    except ValueError:
        raise LocationError("the store's endpoint is not a URL") from None
    # Checked before any error that quotes the endpoint. Not by `parts.username`: a URL without a
    # scheme has none.
    if parts.query or parts.fragment or ("@" in endpoint and not endpoint.startswith("file:///")):
        raise LocationError(
            "the store's endpoint has a user, a password or a query: put keys into a Secret"
        )
    if not _NAMESPACE.fullmatch(namespace) or len(namespace) > 512:
        raise LocationError(
            f"kv_namespace {namespace!r}: segments of letters, digits, '.', '_' and '-' that do "
            "not start with '.' or '-', separated by '/'"
        )
    kind = _protocol(parts.scheme, protocol, credentials is not None, endpoint)
    if kind is Protocol.FILE and (parts.netloc or not parts.path.startswith("/")):
        raise LocationError(f"{endpoint!r}: write file:///DIRECTORY, with an absolute path")
    if kind is not Protocol.FILE and not (parts.hostname and port_is_valid):
        raise LocationError(f"{endpoint!r} is no URL of a store: write http://HOST:PORT")
    if virtual_host_style and kind is Protocol.S3 and _is_address(parts.hostname or ""):
        raise LocationError(
            f"{endpoint!r} has an address: virtual_host_style needs a host name, before which it "
            "puts the bucket"
        )
    return StoreLocation(
        endpoint.rstrip("/") or endpoint,
        namespace,
        kind,
        credentials,
        region,
        virtual_host_style,
        ca_file,
        timeout,
    )


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _protocol(scheme: str, override: str | None, has_credentials: bool, endpoint: str) -> Protocol:
    if scheme not in ("http", "https", "file"):
        raise LocationError(
            f"{endpoint!r}: the endpoint must start with http://, https:// or file:///"
        )
    try:
        kind = Protocol(override) if override is not None else None
    except ValueError:
        raise LocationError(f"protocol {override!r}: write s3, http or file") from None
    if scheme == "file":
        kind = kind or Protocol.FILE
    elif kind is None:
        kind = Protocol.S3 if has_credentials else Protocol.HTTP
    if (kind is Protocol.FILE) != (scheme == "file"):
        raise LocationError(f"protocol {kind.value} does not fit the endpoint {endpoint!r}")
    return kind
