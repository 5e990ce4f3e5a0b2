"""Keeps the prefixes of tenants apart: a picker that gives each request a salt of its tenant.

    cache_salt = SHA-256(tenant, the client's own cache_salt), in hexadecimal digits

The header `tenant_header` names the tenant: the proxy in front sets it, or checks it as it does an
API key. The salt is no secret: it is the same at every replica and after every restart, and clients
can compute that of a tenant whose name they know. But they cannot send it to an engine: every JSON
body that an engine gets has the salt of its own tenant, on every path. Plan keys would not do as a
secret: they are rotated daily, and each day would begin with empty caches.
"""

import hashlib
from typing import Final

import msgspec
from msgspec import Raw

from tandem_contract.api_paths import FORMS

from ..exchange import HttpRequest
from ..request.bodies import is_coded, is_json
from ..request.body_fields import UNREADABLE, BadBody, decode_members, unreadable_body
from ..request.large_bodies import LARGE
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

    def needs_body(self, request: HttpRequest) -> bool:
        """As `EndpointPicker.needs_body`, and whether the body gets a salt."""
        # Other bodies are refused unread.
        return (self._needs_salt(request) and is_json(request)) or super().needs_body(request)

    def place(self, request: HttpRequest, body: bytes | None, now: float) -> Placement:
        """As `EndpointPicker.place`, with a salt in the body."""
        # Without a body there is nothing to separate: some paths need none.
        if body == b"" or not self._needs_salt(request):
            return super().place(request, body, now)
        # Refused, because an engine might read the body as JSON all the same, without a salt.
        if not is_json(request):
            raise self._error(request, 415, "not_json", _NOT_JSON)
        if body is None:
            raise self._error(request, 500, "no_body", _NOT_SENT)
        try:
            changed = self._with_salt(request, body)
        except BadBody as err:
            raise self._error(request, 400, "bad_request", str(err), param=err.param) from err
        placement = super().place(request, changed, now)
        # Where the model was replaced, the body is changed already, and has the salt.
        if placement.body is None:
            placement.body = changed
            if _LENGTH in request.headers:
                length = str(len(changed))
                placement.mutation = placement.mutation.with_header(_LENGTH, length)
        return placement

    def salted(self, request: HttpRequest, body: bytes) -> bytes:
        """The body with the salt of its tenant. A body that is no JSON object, which `place`
        refuses, stays as it is. Equal requests get equal bytes."""
        if not self._needs_salt(request):
            return body
        try:
            return self._with_salt(request, body)
        except BadBody:
            return body

    def _needs_salt(self, request: HttpRequest) -> bool:
        # The pick itself refuses a coded body, and another path. No engine takes a salt in a form.
        return (
            self.tenant_header is not None
            and request.method == "POST"
            and not is_coded(request)
            and request.path.partition("?")[0] not in FORMS
            and request.path in self.routing.api
        )

    def _with_salt(self, request: HttpRequest, body: bytes) -> bytes:
        """Raises BadBody for what is no JSON object: an engine might read it as one."""
        tenant = request.headers.get((self.tenant_header or "").lower(), "")
        if len(body) >= LARGE:
            # Decoding would block other streams: the client's own salt does not count.
            return _with_last_member(body, salt_of(tenant, _NONE))
        try:
            given = bytes(_given.decode(body).cache_salt)
            salt = salt_of(tenant, given)
            if given == _NONE:
                return _with_last_member(body, salt)
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


def _with_last_member(body: bytes, salt: str) -> bytes:
    """The object with the salt behind its other members: of a repeated name the last one counts.
    Whatever the body is, the result is an object with the salt, or no JSON. Raises BadBody."""
    end = body.rfind(b"}")
    if end < 0:
        raise BadBody("the body is not a JSON object")
    comma = b"" if body[:end].rstrip().endswith(b"{") else b","
    return b'%b%b"%b":"%b"}' % (body[:end], comma, FIELD.encode(), salt.encode())
