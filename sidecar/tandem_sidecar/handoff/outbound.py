"""Headers and ids of what the sidecar sends: to the engines, and back to the client."""

import asyncio
import random
import re
import secrets
import time
from functools import lru_cache
from typing import Final

from tandem_contract import headers
from tandem_contract.commandline import HostPort

from ..http.messages import HOP_BY_HOP, Headers, Request, listed_in_connection, request_bytes
from ..observability.record import MAX_TEXT, Leg, Record

REQUEST_ID: Final = headers.REQUEST_ID.encode()
_TRACEPARENT: Final = headers.TRACEPARENT.encode()
AUTHORIZATION: Final = b"authorization"
_CONNECTION: Final = b"connection"
INTERNAL: Final = frozenset(name.encode() for name in headers.INTERNAL)
"""Not a client's to say, nor an engine's to tell the client."""

ANSWER_DROPPED: Final = INTERNAL | {REQUEST_ID}
"""Of an engine's answer to a generation: the sidecar says these itself."""

_NOT_FORWARDED: Final = HOP_BY_HOP | INTERNAL | {REQUEST_ID, b"host"}
_NOT_TO_PREFILL: Final = _NOT_FORWARDED | {b"accept-encoding", b"accept"}
"""The prefill answer is read here: plain JSON."""
_TRACED: Final = frozenset({_TRACEPARENT})
"""Of a traced request: the engine's parent is our leg, not our caller."""
_ids: Final = random.Random()
"""Seeded by the system: unlike any other process's. That they cannot be guessed is not needed: no
client can say one."""
_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")


def request_id(request: Request) -> str:
    """The client's id, or a new one when it gave none or none that may stand in a log line."""
    try:
        given = request.one(REQUEST_ID)
    except ValueError:
        given = None
    return given.decode() if given and _ID.fullmatch(given) else secrets.token_hex(16)


def fresh_id(base: str) -> str:
    """An engine's id for one attempt: engines match legs by it, and clients reuse theirs."""
    return f"{base}-{_ids.getrandbits(48):012x}"


def engine_request(
    request: Request, engine: HostPort, leg: Leg, body: bytes, *, prefill: bool = False
) -> bytes:
    """The client's request for an engine as `leg`, with `body` in place of its own."""
    skip = _NOT_TO_PREFILL if prefill else _NOT_FORWARDED
    if _CONNECTION in request.values:
        skip |= listed_in_connection(request.headers)
    if leg.traceparent:
        skip |= _TRACED
    kept: Headers = [_host(engine), *leg_headers(leg)]
    kept += [pair for pair in request.headers if pair[0] not in skip]
    if request.upgrade:
        kept += [(b"connection", b"upgrade"), (b"upgrade", request.upgrade)]
    return request_bytes(request.method, request.target, kept, body)


@lru_cache(maxsize=4096)
def _host(engine: HostPort) -> tuple[bytes, bytes]:
    return b"host", str(engine).encode()


def leg_headers(leg: Leg) -> Headers:
    """What tells an engine which leg of which request it serves."""
    ident = REQUEST_ID, leg.engine_id.encode()
    return [ident, (_TRACEPARENT, leg.traceparent.encode())] if leg.traceparent else [ident]


def new_record(request: Request, ident: str, kind: str) -> Record:
    """The record of a request just read whole."""
    record = Record(ident, kind, asyncio.get_running_loop().time(), time.time())
    if request.method != b"POST":
        record.method = request.method.decode("latin-1")
    record.target = request.target.partition(b"?")[0][:MAX_TEXT].decode("latin-1")
    record.traceparent = request.values.get(_TRACEPARENT, b"").decode("latin-1")
    return record


def header_lines(pairs: dict[str, str]) -> bytes:
    """Header lines of ours; an empty value leaves its line out."""
    return b"".join(b"%b: %b\r\n" % (k.encode(), v.encode()) for k, v in pairs.items() if v)
