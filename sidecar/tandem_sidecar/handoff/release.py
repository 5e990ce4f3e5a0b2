"""Tells a prefill pod, through the decode engine, that nobody will read what it holds."""

import asyncio
import logging

from tandem_contract.commandline import HostPort

from ..connectors.handover import Handover, Outgoing
from ..http.collect import Answer, Collector, NoAnswer
from ..http.messages import request_bytes
from ..http.upstream import Call
from ..observability.record import Phase, Result
from .classify import result_of_failure
from .context import Generation, Tools
from .outbound import AUTHORIZATION, leg_headers

log = logging.getLogger(__name__)


def release(
    tools: Tools, gen: Generation, engine: HostPort, engine_id: str, handover: Handover
) -> None:
    """Have `engine` release what the attempt `engine_id` of `gen` handed over.

    It outlives the exchange; some connectors have nothing to send.
    """
    what = tools.connector.release(gen.kind, gen.body, handover)
    if what is not None:
        Release(tools, gen, engine, engine_id).send(what)


class Release:
    """One release under way. What fails is logged: the lease frees the blocks later."""

    def __init__(self, tools: Tools, gen: Generation, engine: HostPort, engine_id: str) -> None:
        self._tools = tools
        self._gen = gen
        self._engine = engine
        self._engine_id = engine_id
        self._loop = asyncio.get_running_loop()
        self._seen = gen.record.leg(Phase.RELEASE, str(engine), engine_id, self._loop.time())
        self._expected = 0
        self._call: Call | None = None
        self._timer: asyncio.TimerHandle | None = None

    def send(self, what: Outgoing) -> None:
        """POST it."""
        self._tools.lifecycle.enter(self)
        self._expected = what.expected
        headers = [
            (b"host", str(self._engine).encode()),
            (b"content-type", b"application/json"),
            *leg_headers(self._seen),
            *(pair for pair in self._gen.request.headers if pair[0] == AUTHORIZATION),
        ]
        request = request_bytes(b"POST", what.target, headers, what.body)
        timeout = self._gen.settings.kv_transfer_timeout
        self._timer = self._loop.call_later(timeout, self.drain_expired)
        self._call = self._tools.pool.send(self._engine, b"POST", request, Collector(self._done))

    def drain_expired(self) -> None:
        """Wait no longer."""
        if self._call is not None:
            self._call.abort()
        self._end(Result.DEADLINE, "no answer in time")

    def describe(self) -> dict[str, object]:
        return {"request_id": self._gen.request_id, "phase": "release"}

    def _done(self, answer: Answer | NoAnswer) -> None:
        match answer:
            case Answer(head) if head.status == self._expected:
                self._end(Result.ANSWERED, "", head.status)
            case Answer(head):
                detail = f"the engine answered {head.status}"
                self._end(Result.ERROR, detail, head.status)
            case NoAnswer(failure, detail):
                self._end(result_of_failure(failure), detail)

    def _end(self, result: Result, problem: str, status: int | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._seen.end(result, self._loop.time(), status=status, detail=problem)
        self._tools.lifecycle.leave(self)
        self._tools.observer.on_release_end(self._gen.record, self._seen)
        if problem:
            ids = {"request_id": self._gen.request_id, "engine_id": self._engine_id}
            log.warning("KV not released: %s", problem, extra=ids)
