"""Parses a client's body and removes the fields that a client may not set.

A body without such fields keeps its bytes. Otherwise everything that is not removed stays as it
was: unknown fields, key order, integers beyond 2^53.

Errors, whose messages are sent to the client:

    BadBody            not JSON, or a form with a field that a client may not set
      NotAnObject      valid JSON, but not an object
"""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Raw

from tandem_contract.forms import BadForm, read_parts
from tandem_contract.transfer_params import CLIENT_FORBIDDEN

_NestedObjects = Mapping[str, "_NestedObjects"]

_EXTRA_ARGS: Final[_NestedObjects] = {
    "vllm_xargs": {},
    "extra_args": {},
    "sampling_params": {"extra_args": {}},
}
"""Objects that vLLM merges into the dictionary in which it also keeps kv_transfer_params, and the
objects inside them that it merges too. Completions, chat, responses, messages and audio have
`vllm_xargs`; generate takes `sampling_params` in the engine's own form."""

_INSPECTED: Final = CLIENT_FORBIDDEN | _EXTRA_ARGS.keys()
_DEFAULT_TYPES: Final = (b"text/", b"application/x-www-form-urlencoded")
"""Content types that clients send by default although the body is JSON: fetch and curl do."""
_FORBIDDEN_IN_FORMS: Final = CLIENT_FORBIDDEN | {"vllm_xargs", "extra_args"}
"""Names of form fields that a client may not set: vLLM decodes the value of `vllm_xargs`."""


class BadBody(ValueError):
    """A body that the sidecar refuses."""


class NotAnObject(BadBody):
    """Valid JSON, but not an object."""


Members = Mapping[str, Raw]
"""The undecoded members of a JSON object."""

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of decoding JSON; `to_bad_body` turns them into an error for the client."""

decode_members: Final = msgspec.json.Decoder(dict[str, Raw]).decode


class Body(msgspec.Struct, frozen=True):
    """A JSON object: its bytes and its undecoded members."""

    data: bytes
    members: dict[str, Raw]


def parse_body(data: bytes) -> Body:
    """Parse a JSON body and remove the forbidden fields. Raises BadBody.

    Every occurrence of a forbidden key is removed, however it is escaped. A body that this parser
    refuses is not forwarded: an engine's more lenient parser could find a forbidden field in it
    (NaN, UTF-16, a byte order mark).
    """
    try:
        # Members stay encoded: only an edit costs an encoding, and numbers keep their digits.
        members = decode_members(data)
        if members.keys().isdisjoint(_INSPECTED):
            return Body(data, members)
        allowed = _clean(members, _EXTRA_ARGS)
    except UNREADABLE as err:
        raise to_bad_body(err) from err
    return Body(data, members) if allowed is None else Body(msgspec.json.encode(allowed), allowed)


def clean_passthrough(data: bytes, content_type: bytes) -> bytes:
    """The body of a request that generates nothing, without the forbidden fields.

    An engine may read them from JSON, and from a form's field `vllm_xargs`, which vLLM decodes as
    JSON. Every other body, such as a file, stays as it is. Raises BadBody for such a form, and for
    an invalid body that an engine would parse as JSON (some do so without a content type).
    """
    media_type = content_type.lower()
    if media_type.startswith(b"multipart/"):
        _check_form(data, content_type.decode("latin-1"))
        return data
    is_json = not media_type or b"json" in media_type
    if not data or not (is_json or media_type.startswith(_DEFAULT_TYPES)):
        return data
    try:
        return parse_body(data).data
    # A list or a string has no members that vLLM could merge.
    except NotAnObject:
        return data
    except BadBody:
        if is_json:
            raise
        return data


def to_bad_body(err: Exception) -> BadBody:
    """Turn one of the `UNREADABLE` exceptions into an error for the client."""
    if isinstance(err, msgspec.ValidationError):
        return NotAnObject("the body is not a JSON object")
    if isinstance(err, RecursionError):
        return BadBody("the body is nested too deeply")
    return BadBody(f"the body is not valid JSON: {err}")


def _clean(members: Members, nested: _NestedObjects) -> dict[str, Raw] | None:
    """Remove forbidden keys here and in the `nested` objects; None: there are none."""
    allowed = {key: value for key, value in members.items() if key not in CLIENT_FORBIDDEN}
    changed = len(allowed) != len(members)
    for name in nested.keys() & allowed.keys():
        inner = _clean_object(allowed[name], nested[name])
        if inner is not None:
            allowed[name], changed = inner, True
    return allowed if changed else None


def _clean_object(raw: Raw, nested: _NestedObjects) -> Raw | None:
    try:
        members = decode_members(raw)
    except msgspec.ValidationError:
        return None
    allowed = _clean(members, nested)
    return None if allowed is None else Raw(msgspec.json.encode(allowed))


def _check_form(data: bytes, content_type: str) -> None:
    """Raise BadBody for a form that engines may read in other ways, or with a forbidden field."""
    try:
        for part in read_parts(content_type, data):
            if part.name.lower() in _FORBIDDEN_IN_FORMS:
                raise BadBody(f"{part.name} cannot be set in a form: remove it")
    except BadForm as err:
        raise BadBody(str(err)) from err
