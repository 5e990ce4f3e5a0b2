"""Requests that the sidecar sends to engines: their ids and headers, and the release of KV."""

import asyncio
import logging
import random
import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from tandem_contract import headers
from tandem_contract.commandline import HostPort
from tandem_contract.request_ids import attempt_id, usable_request_id
from tandem_http1.answers import Answer, Collector, NoAnswer
from tandem_http1.connection import Call
from tandem_http1.messages import HOP_BY_HOP, Headers, Request, listed_in_connection, request_bytes

from ..connectors.protocol import KvHold, ReleaseRequest
from ..observability.record import Leg, Phase, Result
from .classify import result_of_failure
from .context import GenerationRequest, SidecarContext

log = logging.getLogger(__name__)

REQUEST_ID: Final = headers.REQUEST_ID.encode()
_RANK: Final = headers.DATA_PARALLEL_RANK.encode()
_TRACEPARENT: Final = headers.TRACEPARENT.encode()
_AUTHORIZATION: Final = b"authorization"
_CONNECTION: Final = b"connection"
INTERNAL: Final = frozenset(name.encode() for name in headers.INTERNAL)
"""Headers that neither a client may send to an engine nor an engine to a client."""

_NOT_FORWARDED: Final = HOP_BY_HOP | INTERNAL | {REQUEST_ID, b"host"}
_NOT_TO_PREFILL: Final = _NOT_FORWARDED | {b"accept-encoding", b"accept"}
"""The sidecar itself reads the prefill's answer, which must be uncompressed JSON."""
_TRACED: Final = frozenset({_TRACEPARENT})
"""Dropped from a traced request: the parent of the engine's span is the sidecar's leg."""
_ids: Final = random.Random()
"""Seeded by the system, so that processes generate different ids. They need not be unpredictable,
because a client cannot set an engine id."""


def client_request_id(request: Request) -> str:
    """The client's request id, or a new one if the client sent none or an unusable one."""
    try:
        value = request.single(REQUEST_ID)
    except ValueError:
        value = None
    usable = usable_request_id(value.decode("latin-1")) if value else None
    return usable or secrets.token_hex(16)


def new_attempt_id(base: str) -> str:
    """Make a request id for one attempt, unique because engines match legs by it.

    A client's own id may repeat.
    """
    return attempt_id(base, _ids.getrandbits(48))


def engine_request(
    request: Request,
    engine: HostPort,
    leg: Leg,
    body: bytes,
    added: Sequence[tuple[bytes, bytes]] = (),
    *,
    rank: int | None = None,
    prefill: bool = False,
) -> bytes:
    """Encode the client's request for an engine as `leg`, with `body` instead of its own and the
    headers `added`, which replace the client's. `rank`: the data-parallel rank that serves it;
    None: the engine chooses."""
    skip = _NOT_TO_PREFILL if prefill else _NOT_FORWARDED
    # RFC 9110 §7.6.1: headers that Connection names are for this hop only.
    if _CONNECTION in request.values:
        skip |= listed_in_connection(request.headers)
    if leg.traceparent:
        skip |= _TRACED
    sent: Headers = [_host(engine), *leg_headers(leg), *added]
    if added:
        skip |= {name for name, _ in added}
    if rank is not None:
        sent.append((_RANK, b"%d" % rank))
    sent += [pair for pair in request.headers if pair[0] not in skip]
    # Upgrade is hop-by-hop and was dropped above; it is written again for the engine's connection.
    if request.upgrade:
        sent += [(b"connection", b"upgrade"), (b"upgrade", request.upgrade)]
    return request_bytes(request.method, request.target, sent, body)


@lru_cache(maxsize=4096)
def _host(engine: HostPort) -> tuple[bytes, bytes]:
    return b"host", str(engine).encode()


def leg_headers(leg: Leg) -> Headers:
    """Headers that tell an engine the leg's request id and the parent of its spans."""
    request_id = REQUEST_ID, leg.attempt_id.encode()
    if not leg.traceparent:
        return [request_id]
    return [request_id, (_TRACEPARENT, leg.traceparent.encode())]


def release_kv(
    context: SidecarContext,
    generation: GenerationRequest,
    engine: HostPort,
    attempt_id: str,
    kv_hold: KvHold,
) -> None:
    """Have `engine` release the KV that the attempt `attempt_id` made a prefill pod hold.

    The release may outlive the request. Nothing is sent for connectors without a release.
    """
    connector = context.connector.core
    release = connector.release_request(generation.kind, generation.body, kv_hold)
    if release is not None:
        ReleaseCall(context, generation, engine, attempt_id).send(release)


class ReleaseCall:
    """One release in flight. A failure is only logged: the producer's lease frees the blocks later.

    It is part of the running work, so that a drain waits for it.
    """

    def __init__(
        self,
        context: SidecarContext,
        generation: GenerationRequest,
        engine: HostPort,
        attempt_id: str,
    ) -> None:
        self._context = context
        self._generation = generation
        self._engine = engine
        self._attempt_id = attempt_id
        self._loop = context.loop
        record = generation.record
        self._leg = record.leg(Phase.RELEASE, str(engine), attempt_id, self._loop.time())
        self._release: ReleaseRequest
        self._is_last = False
        self._call: Call | None = None
        self._timer: asyncio.TimerHandle | None = None

    def send(self, release: ReleaseRequest, *, is_last: bool = False) -> None:
        """POST the release. `is_last`: try no other engine if this one cannot be reached."""
        self._context.lifecycle.add(self)
        self._release, self._is_last = release, is_last
        generation = self._generation
        sent = [
            _host(self._engine),
            (b"content-type", b"application/json"),
            *leg_headers(self._leg),
            # An engine with an API key asks for it here, too.
            *self._authorization(),
        ]
        request = request_bytes(b"POST", release.target, sent, release.body)
        timeout = generation.kv_transfer_timeout
        self._timer = self._loop.call_later(timeout, self.drain_expired)
        self._call = self._context.pool.send(
            self._engine, b"POST", request, Collector(self._take_answer)
        )

    def _authorization(self) -> Headers:
        if own := self._context.authorization(self._engine):
            return own
        return [pair for pair in self._generation.request.headers if pair[0] == _AUTHORIZATION]

    def drain_expired(self) -> None:
        """Stop waiting for the answer; also called when the release's own timeout passes."""
        if self._call is not None:
            self._call.abort()
        self._end(Result.DEADLINE, "no answer in time")

    def engine_drains(self, engine: HostPort | None) -> None:
        """It goes on: a release takes no time."""

    def describe(self) -> dict[str, object]:
        return {"request_id": self._generation.request_id, "phase": "release"}

    def _take_answer(self, answer: Answer | NoAnswer) -> None:
        match answer:
            case Answer(head) if head.status == self._release.expected_status:
                self._end(Result.ANSWERED, "", head.status)
            case Answer(head):
                # Another status does not prove that the producer was notified, so the release
                # counts as failed.
                expected = self._release.expected_status
                detail = f"the engine answered {head.status}, expected {expected}"
                self._end(Result.ERROR, detail, head.status)
            case NoAnswer(failure, detail):
                self._try_another()
                self._end(result_of_failure(failure), detail)

    def _try_another(self) -> None:
        """Release through another decode engine: the KV is read by none, so any of them may."""
        other = None if self._is_last else self._context.other_decode(self._engine)
        if other is not None:
            call = ReleaseCall(self._context, self._generation, other, self._attempt_id)
            call.send(self._release, is_last=True)

    def _end(self, result: Result, problem: str, status: int | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._leg.end(result, self._loop.time(), status=status, detail=problem)
        self._context.lifecycle.remove(self)
        self._context.observer.on_release_end(self._generation.record, self._leg)
        if problem:
            ids = {"request_id": self._generation.request_id, "engine_id": self._attempt_id}
            log.warning("KV not released: %s", problem, extra=ids)
