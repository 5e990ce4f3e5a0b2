"""Keeps the prefixes of tenants apart: a picker that gives each request a salt of its tenant.

    cache_salt = SHA-256(tenant, the client's own cache_salt), in hexadecimal digits

The header `tenant_header` names the tenant: the proxy in front sets it, or checks it as it does an
API key. The salt depends on the tenant whatever salt a client sends, so no client can form that of
another tenant. It is the same at every replica and after every restart, and no plan key is in it:
keys are rotated daily, and each day would begin with empty caches.
"""

import hashlib
from typing import Final

import msgspec
from msgspec import Raw

from tandem_contract.request_kinds import kind_of_path

from .bodies import is_coded, is_json
from .body_fields import UNREADABLE, decode_members
from .ext_proc.messages import HttpRequest
from .large_bodies import LARGE
from .picker import EndpointPicker
from .placement import Placement

FIELD: Final = "cache_salt"
_NONE: Final = b"null"
_LENGTH: Final = "content-length"
_NOT_JSON: Final = "the body is not JSON: send it with content-type: application/json"
_NOT_SENT: Final = (
    "cache_salt.from_header needs the request's body: have the gateway send bodies to the endpoint"
    " picker"
)


class SaltingPicker(EndpointPicker):
    """Picks pods, and keeps tenants apart if it is told which header names them."""

    tenant_header: str | None = None
    """The header that names the tenant; None: all clients share prefixes."""

    def place(self, request: HttpRequest, body: bytes | None, now: float) -> Placement:
        """As `EndpointPicker.place`, with a salt in the body of a request that generates."""
        if self.tenant_header is None or not _needs_salt(request):
            return super().place(request, body, now)
        # Refused, because an engine might read the body as JSON all the same, without a salt.
        if not is_json(request):
            raise self._error(request, 415, "not_json", _NOT_JSON)
        if body is None:
            raise self._error(request, 500, "no_body", _NOT_SENT)
        changed = self.salted(request, body)
        placement = super().place(request, changed, now)
        # Where the model was replaced, the body is changed already, and has the salt.
        if placement.body is None and changed is not body:
            placement.body = changed
            if _LENGTH in request.headers:
                length = str(len(changed))
                placement.mutation = placement.mutation.with_header(_LENGTH, length)
        return placement

    def salted(self, request: HttpRequest, body: bytes) -> bytes:
        """The body with the salt of its tenant. A body that is no JSON object, which the pick
        refuses, stays as it is. Equal requests get equal bytes."""
        if self.tenant_header is None or not _needs_salt(request):
            return body
        tenant = request.headers.get(self.tenant_header.lower(), "")
        if len(body) >= LARGE:
            # Decoding would block other streams: the client's own salt does not count.
            return _with_last_member(body, salt_of(tenant, _NONE))
        try:
            given = bytes(_given.decode(body).cache_salt)
            salt = salt_of(tenant, given)
            if given == _NONE:
                return _with_last_member(body, salt)
            return msgspec.json.encode({**decode_members(body), FIELD: salt})
        except UNREADABLE:
            return body


def salt_of(tenant: str, given: bytes) -> str:
    """The salt of a request. `given`: the client's own `cache_salt` as JSON; `null`: none."""
    name = tenant.encode("latin-1", "replace")
    # Its length first: no other tenant with another salt gives the same bytes.
    return hashlib.sha256(b"%d %b%b" % (len(name), name, given)).hexdigest()


class _Given(msgspec.Struct):
    cache_salt: Raw = Raw(_NONE)


_given: Final = msgspec.json.Decoder(_Given)


def _needs_salt(request: HttpRequest) -> bool:
    # The pick itself refuses a coded body.
    return (
        request.method == "POST"
        and kind_of_path(request.path) is not None
        and not is_coded(request)
    )


def _with_last_member(body: bytes, salt: str) -> bytes:
    """The object with the salt behind its other members: of a repeated name the last one counts."""
    end = body.rfind(b"}")
    if end < 0:
        return body
    comma = b"" if body[:end].rstrip().endswith(b"{") else b","
    return b'%b%b"%b":"%b"}' % (body[:end], comma, FIELD.encode(), salt.encode())
