"""Tells a prefill pod, through the decode engine, that nobody will read what it holds."""

import asyncio
import logging

from tandem_contract.commandline import HostPort

from ..connectors.handover import Outgoing
from ..http.collect import Answer, Collector, NoAnswer
from ..http.messages import Headers, request_bytes
from ..http.upstream import Call, Pool
from .lifecycle import Lifecycle

log = logging.getLogger(__name__)


class Release:
    """One release under way. What fails is logged: the lease frees the blocks later."""

    def __init__(self, lifecycle: Lifecycle, request_id: str, timeout: float) -> None:
        self._lifecycle = lifecycle
        self._request_id = request_id
        self._timeout = timeout
        self._call: Call | None = None
        self._timer: asyncio.TimerHandle | None = None

    def send(self, pool: Pool, engine: HostPort, headers: Headers, what: Outgoing) -> None:
        """POST it to `engine`."""
        loop = asyncio.get_running_loop()
        self._lifecycle.enter(self)
        self._expected = what.expected
        pairs = [(b"host", str(engine).encode()), (b"content-type", b"application/json"), *headers]
        request = request_bytes(b"POST", what.target, pairs, what.body)
        self._timer = loop.call_later(self._timeout, self._expired)
        self._call = pool.send(engine, b"POST", request, Collector(self._done))

    def drain_expired(self) -> None:
        self._expired()

    def describe(self) -> dict[str, object]:
        return {"request_id": self._request_id, "phase": "release"}

    def _expired(self) -> None:
        if self._call is not None:
            self._call.abort()
        self._end(f"no answer within {self._timeout:.3g}s")

    def _done(self, answer: Answer | NoAnswer) -> None:
        match answer:
            case Answer(head) if head.status == self._expected:
                self._end(None)
            case Answer(head):
                self._end(f"the engine answered {head.status}")
            case NoAnswer(_, detail):
                self._end(detail)

    def _end(self, problem: str | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._lifecycle.leave(self)
        if problem:
            log.warning("request %s: KV not released: %s", self._request_id, problem)
