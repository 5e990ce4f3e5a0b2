"""The bytes of a request."""

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from tandem_contract import headers
from tandem_contract.request_kinds import PATHS, RequestKind

from ..calls import Call
from .bodies import body_of
from .settings import ClientSettings, Origin, SettingsError

_FIELD_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FIELD_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_FRAMING: Final = frozenset({"content-length", "transfer-encoding", "connection", "expect"})


class RequestWriter:
    """Writes requests to one server; what they have in common is encoded once."""

    def __init__(self, settings: ClientSettings, origin: Origin) -> None:
        """Raises SettingsError for a header or a member of the body that cannot be sent."""
        if "stream" in settings.extra_body:
            raise SettingsError("the body's member 'stream' cannot be set: each call says it")
        self._settings = settings
        fields = _fields(settings.headers, origin)
        # All but the length of the body, which differs between requests.
        self._heads: Mapping[RequestKind, bytes] = {
            kind: f"POST {origin.path}{path} HTTP/1.1\r\n{fields}".encode("latin-1")
            for kind, path in PATHS.items()
        }
        self._encode = msgspec.json.Encoder().encode

    def write(self, call: Call, kind: RequestKind, request_id: str | None) -> bytes:
        """The whole request. Raises ValueError for an id that cannot be sent."""
        body = self._encode(body_of(call, kind, self._settings))
        head = self._heads[kind]
        if request_id is not None:
            head += _field(headers.REQUEST_ID, request_id).encode("latin-1")
        return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)


def _fields(extra: Mapping[str, str], origin: Origin) -> str:
    fields = {
        "host": origin.authority,
        "user-agent": "tandem-bench",
        "accept": "*/*",
        "content-type": "application/json",
    }
    for name, value in extra.items():
        if name.lower() in _FRAMING:
            raise SettingsError(f"the header {name!r} cannot be set: the client sets it")
        fields[name.lower()] = value
    return "".join(_field(name, value) for name, value in fields.items())


def _field(name: str, value: str) -> str:
    if not _FIELD_NAME.fullmatch(name):
        raise SettingsError(f"{name!r} is not a valid name of a header")
    # The value may be a credential, so it is not shown.
    if not _FIELD_VALUE.fullmatch(value):
        raise SettingsError(f"the value of the header {name!r} has a character that cannot be sent")
    return f"{name}: {value}\r\n"
