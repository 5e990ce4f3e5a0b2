"""A request body without what a client may not say.

A body that needs no edit is passed on as the same bytes; else everything but what is dropped stays
as it was: unknown fields, key order, integers beyond 2^53.

Errors, for the client to read:

    BadBody        not JSON, or a form with a field that is not a client's to set
      NoObject     JSON, but no object
"""

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import Raw

from tandem_contract.transfer_params import CLIENT_FORBIDDEN

_Places = Mapping[str, "_Places"]

_PLACES: Final[_Places] = {
    "vllm_xargs": {},
    "extra_args": {},
    "sampling_params": {"extra_args": {}},
}
"""Objects that vLLM copies into the place where it also keeps kv_transfer_params, and what of that
kind they hold. `vllm_xargs` is of completions, chat, responses, messages and audio; generate takes
`sampling_params` as the engine has it."""

_LOOKED_AT: Final = CLIENT_FORBIDDEN | _PLACES.keys()
_GUESSED: Final = (b"text/", b"application/x-www-form-urlencoded")
"""What clients call JSON when they were told no better: fetch and curl do so by default."""
_FORM_FIELD: Final = re.compile(rb"content-disposition:(.*?)(?:\r\n\r\n|\Z)", re.I | re.S)
"""The headers of a form's part, from where its name may stand to their end."""
_CHARSET: Final = re.compile(rb";\s*charset=\"?(?:utf-?8|us-ascii|iso-8859-1)\"?\s*(?:;|$)")


class BadBody(ValueError):
    """A body that cannot be read."""


class NoObject(BadBody):
    """Valid JSON, but no object."""


Members = Mapping[str, Raw]
"""An object's members, undecoded."""

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading JSON raises; `bad_body` says it to the client."""

decode_members: Final = msgspec.json.Decoder(dict[str, Raw]).decode


class Body(msgspec.Struct, frozen=True):
    """A JSON object as bytes, and its members undecoded."""

    data: bytes
    members: dict[str, Raw]


def parse_body(data: bytes) -> Body:
    """The body without what a client may not say. Raises BadBody.

    Every occurrence of a forbidden key goes, however it is escaped. What this parser refuses is
    refused altogether: an engine's parser may read more into it (NaN, UTF-16, a byte order mark).
    """
    try:
        members = decode_members(data)
        if members.keys().isdisjoint(_LOOKED_AT):
            return Body(data, members)
        kept = _cleaned(members, _PLACES)
    except UNREADABLE as err:
        raise bad_body(err) from err
    return Body(data, members) if kept is None else Body(msgspec.json.encode(kept), kept)


def clean_passthrough(data: bytes, content_type: bytes) -> bytes:
    """The body of a request that is not looked into further, without what is forbidden.

    What servers read as JSON can say it, and forms can through `vllm_xargs`, which vLLM reads as
    JSON. Anything else, a file above all, is passed on as it is. Raises BadBody for such a form,
    and for what an engine would take for JSON (without a type some do) and is none.
    """
    said = content_type.lower()
    if said.startswith(b"multipart/"):
        _check_form(data, said)
        return data
    is_json = not said or b"json" in said
    if not data or not (is_json or said.startswith(_GUESSED)):
        return data
    try:
        return parse_body(data).data
    except NoObject:
        return data
    except BadBody:
        if is_json:
            raise
        return data


def bad_body(err: Exception) -> BadBody:
    """What one of `UNREADABLE` means to the client."""
    if isinstance(err, msgspec.ValidationError):
        return NoObject("the body is no JSON object")
    if isinstance(err, RecursionError):
        return BadBody("the body is nested too deeply")
    return BadBody(f"the body is no valid JSON: {err}")


def _cleaned(members: Members, places: _Places) -> dict[str, Raw] | None:
    """The members that may stay; None when all of them may."""
    kept = {key: value for key, value in members.items() if key not in CLIENT_FORBIDDEN}
    changed = len(kept) != len(members)
    for name in places.keys() & kept.keys():
        inner = _cleaned_object(kept[name], places[name])
        if inner is not None:
            kept[name], changed = inner, True
    return kept if changed else None


def _cleaned_object(raw: Raw, places: _Places) -> Raw | None:
    try:
        members = decode_members(raw)
    except msgspec.ValidationError:
        return None
    kept = _cleaned(members, places)
    return None if kept is None else Raw(msgspec.json.encode(kept))


def _check_form(data: bytes, content_type: bytes) -> None:
    """Raises BadBody for a part called `vllm_xargs`, or so by an engine that decodes the names."""
    if content_type.count(b"charset") != len(_CHARSET.findall(content_type)):
        raise BadBody("a form is taken in UTF-8 only: leave its charset out")
    for part in _FORM_FIELD.finditer(data):
        if b"vllm_xargs" in unquote_to_bytes(part[1].replace(b"\\", b"")):
            raise BadBody("vllm_xargs cannot be set in a form: leave it out")
