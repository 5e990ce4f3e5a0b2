"""Holds the tasks of requests while no pod has room for them.

    must_wait(model, size)   cheap: whether `turn` would wait
    async with turn(...)     waits; within it the request is placed, so that it counts before the
                             next one goes

Time alone makes room, too, as prompts are computed: so a model with waiting requests is looked at
every `_CHECK_SECONDS`, and no other.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import ceil
from random import Random
from time import time
from typing import Final, NamedTuple, Protocol

from tandem_contract.config import FlowControl as FlowSettings

from ..backends.fleet import Fleet
from ..exchange import HttpRequest, NotPlaced
from ..request.inference import InferenceRequest
from .elsewhere import WaitingElsewhere
from .flows import DISPLACED, EXPIRED, FULL, LEFT, SHED, STOPPING, WENT, Flows, Held
from .headers import shorter_ttl, tenant_of
from .metrics import FlowMetrics

_CHECK_SECONDS: Final = 0.01
"""Seconds between two looks at a model whose requests wait, if nothing else happens. Longer: an
engine may run dry. Shorter: costs CPU, a few microseconds each."""
_MOST_RETRY_AFTER: Final = 60
"""Seconds."""
_MESSAGES: Final = {
    FULL: "too many requests wait: try again later",
    DISPLACED: "requests of a higher priority need the place of this one: try again later",
    EXPIRED: "no backend had room for the request in time: try again later",
    SHED: "requests of a negative priority are refused while others wait: try again later",
    STOPPING: "the endpoint picker is shutting down: send the request again",
}
_NO_BACKEND: Final = "no backend became ready in time: try again"


class Refuse(Protocol):
    """Makes a reply: `placement.refusals.Refusals.error`."""

    def __call__(
        self,
        request: HttpRequest | None,
        status: int,
        reason: str,
        message: str,
        *,
        retry_after: int = 1,
    ) -> NotPlaced: ...


class Turn(NamedTuple):
    """What became of the wait."""

    refusal: NotPlaced | None = None
    """The request's answer; None: it is placed now."""
    seconds: float = 0.0
    """How long it waited."""
    subset: frozenset[str] | None = None
    """Addresses of the pods that it may go to; None: any."""


_AT_ONCE: Final = Turn()


class _Task(Held):
    """A request that waits, and its task."""

    __slots__ = ("request", "turn")

    request: HttpRequest
    turn: "asyncio.Future[NotPlaced | None]"


class FlowController:
    """The waiting requests of a process. Belongs to one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: FlowMetrics,
        *,
        refuse: Refuse,
        needs_prefill: Callable[[HttpRequest, InferenceRequest, float], bool],
        priority: Callable[[HttpRequest], int],
        random: Random,
    ) -> None:
        """`needs_prefill`: whether the choice would split the request now, Unix seconds."""
        self._fleet, self._metrics, self._refuse = fleet, metrics, refuse
        self._needs_prefill, self._priority = needs_prefill, priority
        self._flows = Flows[_Task](fleet, self._on_end, random)
        self._timers: dict[str | None, asyncio.TimerHandle] = {}
        """By model."""
        self._is_stopping = False
        self._inside = 0
        """Requests within `turn`."""
        self._left = asyncio.Event()
        """One of them has left."""

    @property
    def settings(self) -> FlowSettings | None:
        """None: no request waits. May be replaced at any time; what waits keeps its deadline."""
        return self._flows.settings

    @settings.setter
    def settings(self, settings: FlowSettings | None) -> None:
        self._flows.settings = settings
        for model in self._flows.models:
            self._advance(model)

    @property
    def elsewhere(self) -> WaitingElsewhere:
        """What waits here and at other replicas."""
        return self._flows.elsewhere

    def limit_bytes(self, limit: int) -> None:
        """The bodies that wait have so many bytes at most, whatever the settings say."""
        self._flows.byte_limit = limit

    @property
    def is_on(self) -> bool:
        """Whether any request waits."""
        return self._flows.settings is not None

    def longest_wait(self) -> float:
        """Seconds that any request may wait; 0: none waits."""
        return self.settings.longest_ttl if self.settings is not None else 0.0

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(self._flows.counts.values())

    @property
    def needs_model(self) -> bool:
        """Whether it depends on a request's model whether it waits."""
        return self._fleet.has_mixed_models

    def must_wait(self, model: str | None, size: int) -> bool:
        """Whether a request for `model` whose body has `size` bytes cannot be placed at once."""
        return self._flows.must_wait(model, size, time())

    @asynccontextmanager
    async def turn(
        self, request: HttpRequest, parsed: InferenceRequest | None, size: int
    ) -> AsyncIterator[Turn]:
        """Wait for the turn of a request whose body has `size` bytes; it is placed within.
        `parsed`: what was read of it; None: it is refused or passed through, and waits for
        nothing."""
        settings = self.settings
        if settings is None or parsed is None or not self.must_wait(parsed.model, size):
            yield _AT_ONCE
            return
        task = self._task(request, parsed, size, settings)
        reason = STOPPING if self._is_stopping else self._flows.admit(task, settings)
        if reason is not None:
            yield Turn(self._refusal(task, reason, task.arrived))
            return
        self._count(task)
        self._inside += 1
        try:
            self._advance(task.model)
            refusal = await task.turn
            yield Turn(refusal, time() - task.arrived, task.subset)
        except asyncio.CancelledError:
            self._flows.leave(task, time())
            raise
        finally:
            self._inside -= 1
            self._left.set()
            self._flows.placed(task)
            self._advance(task.model)

    async def close(self) -> None:
        """Refuse all that wait and all that come from now on: the process ends. Returns when they
        are answered."""
        self._is_stopping = True
        self._flows.stop(time())
        while self._inside:
            self._left.clear()
            await self._left.wait()

    def _task(
        self, request: HttpRequest, parsed: InferenceRequest, size: int, settings: FlowSettings
    ) -> _Task:
        now, flows = time(), self._flows
        priority, model = self._priority(request), flows.key(parsed.model)
        average = self._fleet.figures.output_tokens
        output = average if parsed.max_tokens is None else min(average, float(parsed.max_tokens))
        tokens = parsed.prompt_tokens + output
        task = _Task(
            model,
            priority,
            tenant_of(request.headers),
            now,
            now + shorter_ttl(request.headers, flows.ttl(model, priority, settings)),
            size=size,
            tokens=tokens,
            cost=max(1.0, tokens) if settings.fairness == "tokens" else 1.0,
            is_split=flows.has_prefill_pods(model) and self._needs_prefill(request, parsed, now),
        )
        task.request, task.turn = request, asyncio.get_running_loop().create_future()
        return task

    def _advance(self, model: str | None) -> None:
        if (timer := self._timers.pop(model, None)) is not None:
            timer.cancel()
        if self._flows.advance(model, time()):
            loop = asyncio.get_running_loop()
            self._timers[model] = loop.call_later(_CHECK_SECONDS, self._advance, model)

    def _on_end(self, task: _Task, reason: str, now: float) -> None:
        self._count(task)
        if reason in (WENT, LEFT):
            self._metrics.ended(task.priority, reason, now - task.arrived)
            refusal = None
        else:
            refusal = self._refusal(task, reason, now)
        # With the task of a client that left, it is cancelled.
        if not task.turn.done():
            task.turn.set_result(refusal)

    def _count(self, task: _Task) -> None:
        self._metrics.held(task.priority, self._flows.counts[task.priority], self._flows.bytes)

    def _refusal(self, task: _Task, reason: str, now: float) -> NotPlaced:
        self._metrics.ended(task.priority, reason, now - task.arrived)
        if reason == EXPIRED and not self._flows.has_pods(task.model):
            return self._refuse(task.request, 503, "no_backend", _NO_BACKEND)
        message = _MESSAGES[reason]
        if reason == STOPPING:
            return self._refuse(task.request, 503, reason, message)
        wait = max(1, min(_MOST_RETRY_AFTER, ceil(self._flows.expected_wait(task))))
        return self._refuse(task.request, 429, reason, message, retry_after=wait)
