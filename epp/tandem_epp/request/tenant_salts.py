"""Keeps the prefixes of tenants apart: each request gets a salt of its tenant. Pure.

    cache_salt = SHA-256(tenant, the client's own cache_salt), in hexadecimal digits

A header names the tenant: the proxy in front sets it, or checks it as it does an API key. The salt
is no secret: it is the same at every replica and after every restart, and clients can compute that
of a tenant whose name they know. But they cannot send it to an engine: every JSON body that an
engine gets has the salt of its own tenant, on every path. Plan keys would not do as a secret: they
are rotated daily, and each day would begin with empty caches.

Errors: `BadBody`.
"""

import hashlib
from typing import Final

import msgspec
from msgspec import Raw

from tandem_contract.api_paths import FORMS, ApiPaths

from ..exchange import HttpRequest
from .bodies import is_coded
from .body_fields import UNREADABLE, decode_members, unreadable_body, with_last_member
from .large_bodies import LARGE

FIELD: Final = "cache_salt"
_NONE: Final = b"null"


class TenantSalts:
    """Gives bodies the salts of their tenants, if it is told which header names them."""

    def __init__(self) -> None:
        self.header: str | None = None
        """The header that names the tenant; None: all clients share prefixes."""

    def apply_to(self, request: HttpRequest, api: ApiPaths) -> bool:
        """Whether the body of `request` gets a salt. `api`: the paths that clients may request."""
        # The pick itself refuses a coded body, and another path. No engine takes a salt in a form.
        return (
            self.header is not None
            and request.method == "POST"
            and not is_coded(request)
            and request.path.partition("?")[0] not in FORMS
            and request.path in api
        )

    def salted(self, request: HttpRequest, body: bytes) -> bytes:
        """The body with the salt of its tenant. Equal requests get equal bytes. Raises BadBody for
        what is no JSON object: an engine might read it as one."""
        tenant = request.headers.get((self.header or "").lower(), "")
        if len(body) >= LARGE:
            # Decoding would block other streams: the client's own salt does not count.
            return _with_salt(body, salt_of(tenant, _NONE))
        try:
            given = bytes(_given.decode(body).cache_salt)
            salt = salt_of(tenant, given)
            if given == _NONE:
                return _with_salt(body, salt)
            return msgspec.json.encode({**decode_members(body), FIELD: salt})
        except UNREADABLE as err:
            raise unreadable_body(body, err) from err


def salt_of(tenant: str, given: bytes) -> str:
    """The salt of a request. `given`: the client's own `cache_salt` as JSON; `null`: none."""
    name = tenant.encode("latin-1", "replace")
    # Its length first: no other tenant with another salt gives the same bytes.
    return hashlib.sha256(b"%d %b%b" % (len(name), name, given)).hexdigest()


class _Given(msgspec.Struct):
    cache_salt: Raw = Raw(_NONE)


_given: Final = msgspec.json.Decoder(_Given)


def _with_salt(body: bytes, salt: str) -> bytes:
    return with_last_member(body, FIELD, b'"%b"' % salt.encode())
