"""What a request body says: its kind, what a client may not say, and the edits of each leg.

Edits keep everything else as it was: unknown fields, key order, integers beyond 2^53; a body that
needs no edit is passed on as the same bytes.

Errors, for the client to read:

    BadBody        not JSON
      NoObject     JSON, but no object
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, Final

import msgspec
from msgspec import Raw

from tandem_contract.kvparams import CLIENT_FORBIDDEN

_NESTED: Final = "vllm_xargs"
"""vLLM copies this object into the place where it also keeps kv_transfer_params."""


class BadBody(ValueError):
    """A body that cannot be read."""


class Kind(Enum):
    """Requests that generate, told by path; others are passed through."""

    COMPLETIONS = b"/v1/completions"
    CHAT = b"/v1/chat/completions"


Members = Mapping[str, Raw]
"""An object's members, undecoded."""

_KINDS: Final = {kind.value: kind for kind in Kind}
_members: Final = msgspec.json.Decoder(dict[str, Raw])
_list: Final = msgspec.json.Decoder(list[Raw])


class NoObject(BadBody):
    """Valid JSON, but no object."""


class Body(msgspec.Struct, frozen=True):
    """A JSON object as bytes, and its members undecoded."""

    data: bytes
    members: dict[str, Raw]


def kind_of(method: bytes, target: bytes) -> Kind | None:
    """Which generation a request line asks for; None for everything else."""
    return _KINDS.get(target.split(b"?", 1)[0]) if method == b"POST" else None


def parse_body(data: bytes) -> Body:
    """The body without what a client may not say. Raises BadBody.

    Every occurrence of a forbidden key goes, however it is escaped. What this parser refuses is
    refused altogether: an engine's parser may read more into it (NaN, UTF-16, a byte order mark).
    """
    with _as_bad_body():
        members = _members.decode(data)
        kept = {key: value for key, value in members.items() if key not in CLIENT_FORBIDDEN}
        if _NESTED in kept:
            kept[_NESTED] = _without_forbidden(kept[_NESTED])
    if len(kept) == len(members) and kept.get(_NESTED) is members.get(_NESTED):
        return Body(data, members)
    return Body(msgspec.json.encode(kept), kept)


def clean_passthrough(data: bytes, content_type: bytes) -> bytes:
    """The body of a request that is not looked into further, without what is forbidden.

    Only JSON objects can say it. Raises BadBody for what claims to be JSON and is not.
    """
    if not data or content_type.lower().startswith((b"multipart/", b"audio/", b"image/")):
        return data
    try:
        return parse_body(data).data
    except NoObject:
        return data


def with_member(body: Body, name: str, value: bytes) -> bytes:
    """The body with one more member, after the others; `value` is encoded JSON."""
    head = body.data[: body.data.rindex(b"}")]
    comma = b"," if body.members else b""
    return b'%b%b"%b":%b}' % (head, comma, name.encode(), value)


def with_members(body: Body, changes: Mapping[str, Any], drop: frozenset[str]) -> bytes:
    """The body with `changes` set (a new key goes last) and `drop` left out."""
    members: dict[str, Any] = {k: v for k, v in body.members.items() if k not in drop}
    return msgspec.json.encode(members | dict(changes))


def unified_reason(kind: Kind, body: Body) -> str | None:
    """Why this request must be served by one engine, as a metric label; None when it need not.

    Each reason names something that two legs would get wrong. Raises BadBody.
    """
    with _as_bad_body():
        return next((reason for reason, holds in _RULES if holds(kind, body.members)), None)


@contextmanager
def _as_bad_body() -> Iterator[None]:
    try:
        yield
    except msgspec.ValidationError as err:
        raise NoObject("the body is no JSON object") from err
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise BadBody(f"the body is no valid JSON: {err}") from err
    except RecursionError as err:
        raise BadBody("the body is nested too deeply") from err


def _value(members: Members, name: str) -> Any:
    return msgspec.json.decode(members[name]) if name in members else None


def _is_off(members: Members, name: str) -> bool:
    return _value(members, name) in (None, False)


def _echoes_logprobs(_kind: Kind, members: Members) -> bool:
    return not _is_off(members, "echo") and _value(members, "logprobs") is not None


def _is_batch(kind: Kind, members: Members) -> bool:
    """More than one prompt: strings, or lists of token ids."""
    raw = bytes(members.get("prompt", b"")).lstrip()
    if kind is not Kind.COMPLETIONS or raw[:1] != b"[" or raw[1:].lstrip()[:1] not in (b'"', b"["):
        return False
    return len(_list.decode(raw)) > 1


def _fetches(kind: Kind, members: Members) -> bool:
    """Whether a content part names media by a URL that both engines would fetch."""
    raw = bytes(members.get("messages", b""))
    if kind is not Kind.CHAT or (b"_url" not in raw and b"\\u" not in raw):
        return False
    parts = (_dicts(message.get("content")) for message in _dicts(_value(members, "messages")))
    return any(_remote(part) for group in parts for part in group)


_RULES: Final[tuple[tuple[str, Callable[[Kind, Members], bool]], ...]] = (
    ("n", lambda _, m: _value(m, "n") not in (None, 1)),
    ("best_of", lambda _, m: _value(m, "best_of") not in (None, 1)),
    ("beam_search", lambda _, m: not _is_off(m, "use_beam_search")),
    ("previous_response", lambda _, m: not _is_off(m, "previous_response_id")),
    ("prompt_logprobs", lambda _, m: _value(m, "prompt_logprobs") is not None),
    ("echo_logprobs", _echoes_logprobs),
    ("batch", _is_batch),
    ("media_by_url", _fetches),
)


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _remote(part: dict[str, Any]) -> bool:
    for key, value in part.items():
        if key.endswith("_url"):
            url = value.get("url") if isinstance(value, dict) else value
            if isinstance(url, str) and not url.startswith("data:"):
                return True
    return False


def _without_forbidden(raw: Raw) -> Raw:
    """The nested object cleaned likewise; the same `raw` when there is nothing to clean."""
    try:
        members = _members.decode(raw)
    except msgspec.ValidationError:
        return raw
    kept = {key: value for key, value in members.items() if key not in CLIENT_FORBIDDEN}
    return raw if len(kept) == len(members) else Raw(msgspec.json.encode(kept))
