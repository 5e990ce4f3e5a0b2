"""Which requests generate text, and which of those one engine must serve alone.

The table of rules is `tandem_contract.single_engine`, which the EPP reads too; the sidecar checks
again because another EPP, or no EPP, may have routed the request.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from tandem_contract import single_engine
from tandem_contract.request_kinds import PATHS, SAMPLING_PARAMS, RequestKind
from tandem_contract.response_ids import PREVIOUS

from .parse import UNREADABLE, Body, Members, decode_members, to_bad_body

_id: Final = msgspec.json.Decoder(str | None)
_KINDS: Final[Mapping[bytes, RequestKind]] = {path.encode(): kind for kind, path in PATHS.items()}


def kind_of(method: bytes, target: bytes) -> RequestKind | None:
    """The kind of generation that a request line asks for; None: the request passes through."""
    return _KINDS.get(target.split(b"?", 1)[0]) if method == b"POST" else None


def single_engine_reason(kind: RequestKind, body: Body) -> str | None:
    """Why one engine must serve this request alone, as a metric label; None: it may be split.

    Raises BadBody for a member that cannot be decoded.
    """
    try:
        return single_engine.single_engine_reason(kind, body.data, _flatten(kind, body.members))
    except UNREADABLE as err:
        raise to_bad_body(err) from err


def previous_response(kind: RequestKind, body: Body) -> str:
    """Id of the stored response that the request continues; empty: none. Raises BadBody."""
    if kind is not RequestKind.RESPONSES or PREVIOUS not in body.members:
        return ""
    try:
        value: str | None = _id.decode(body.members[PREVIOUS])
    except msgspec.ValidationError:
        # No text: the engine refuses it.
        return ""
    except UNREADABLE as err:
        raise to_bad_body(err) from err
    return value or ""


def _flatten(kind: RequestKind, members: Members) -> Members:
    """The members, with those of a generate request's sampling parameters beside the others."""
    if kind is not RequestKind.GENERATE or SAMPLING_PARAMS not in members:
        return members
    try:
        return {**members, **decode_members(members[SAMPLING_PARAMS])}
    except msgspec.ValidationError:
        return members
